"""Table: some numbers of every record at one moment, and what the page draws of them.

A *moment* is one microbatch of one step, over all layers; moments stand in their order. Where there
are more of them than a page has room for, a point of a line or a column of the map stands for
several: with their mean, least and largest value.

Shapes: N records, M moments, P points, G stages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from ultraep.arrays import IntArray
from ultraep.errors import ConfigError
from ultraep.tools.report.numbers import FloatArray, Numbers, plain
from ultraep.trace.schema import KEY, Array, Arrays

MOST_LAYERS = 4096
LAST = 2**62  # behind all moments
VALUES = ("before", "after", "copies", "bytes", "lost", "saved", "cost")


@dataclass(frozen=True, eq=False)
class Table:
    """Records that all ranks have. What is not known, or not yet, is NaN.

    lost: seconds that the slowest rank computes experts for longer than the mean rank.
    saved: seconds that it would compute longer without copies, if time follows rows; 0 where
        there are none.
    cost: seconds of the stages that balancing adds, on the rank that takes longest.
    """

    step: IntArray
    layer: IntArray
    microbatch: IntArray
    before: FloatArray
    after: FloatArray
    copies: FloatArray
    bytes: FloatArray
    lost: FloatArray
    saved: FloatArray
    cost: FloatArray
    stages: FloatArray  # [G] mean seconds of each stage, on the rank with the largest mean

    def __len__(self) -> int:
        return len(self.step)

    @cached_property
    def moments(self) -> tuple[IntArray, IntArray, IntArray]:
        """[M] step, [M] microbatch, and [N] the moment of every record."""
        order = np.lexsort((self.microbatch, self.step))
        step, microbatch = self.step[order], self.microbatch[order]
        new = np.ones(len(order), dtype=bool)
        new[1:] = (np.diff(step) != 0) | (np.diff(microbatch) != 0)
        moment_N = np.empty(len(order), dtype=np.int64)
        moment_N[order] = np.cumsum(new) - 1
        return step[new], microbatch[new], moment_N

    def check(self) -> None:
        """Refuse what no page can show."""
        if len(self.layers[0]) > MOST_LAYERS:
            raise ConfigError(
                f"the trace has {len(self.layers[0]):,} layers, at most {MOST_LAYERS:,} are shown"
            )

    @cached_property
    def layers(self) -> tuple[IntArray, IntArray]:
        """The layers, each once, and [N] which of them every record has."""
        names, place_N = np.unique(self.layer, return_inverse=True)
        return names, place_N.reshape(-1)

    def take(self, records: IntArray, **others: FloatArray) -> Table:
        """Some of the records, with other values for them."""
        columns = [entry.name for entry in fields(self) if entry.name != "stages"]
        return replace(self, **{name: getattr(self, name)[records] for name in columns} | others)

    def worst(self, records: IntArray) -> tuple[int, int, int] | None:
        """Step, layer and microbatch of the most uneven of these records."""
        if not len(records):
            return None
        before = self.before[records]
        known = np.where(np.isnan(before), self.after[records], before)
        return self.key(int(records[known.argmax()]))

    @property
    def keys(self) -> Arrays:
        """Steps, layers and microbatches of all records, by name."""
        return {name: getattr(self, name) for name in KEY}

    def key(self, record: int) -> tuple[int, int, int]:
        """Step, layer and microbatch."""
        step, layer, microbatch = (int(getattr(self, name)[record]) for name in KEY)
        return step, layer, microbatch

    def within(self, begin: int, end: int, layer: int | None = None) -> IntArray:
        """Records from one moment to another, that not included; of one layer or of all."""
        moment_N = self.moments[2]
        wanted = (moment_N >= begin) & (moment_N < end)
        return np.flatnonzero(wanted if layer is None else wanted & (self.layer == layer))


# -- what is drawn -------------------------------------------------------------------------------


class Stretch:
    """Moments of a stretch as points of a line: one each, or several together."""

    def __init__(self, table: Table, begin: int, end: int, most: int) -> None:
        step_M, microbatch_M, moment_N = table.moments
        self.begin, self.end = max(0, begin), min(len(step_M), end)
        self.table, self.per_point = table, max(1, math.ceil((self.end - self.begin) / most))
        self.starts = np.arange(self.begin, self.end, self.per_point)
        self.records = table.within(self.begin, self.end)
        self.point = (moment_N[self.records] - self.begin) // self.per_point
        self.step, self.microbatch = step_M[self.starts], microbatch_M[self.starts]

    def spans(self, values_N: FloatArray) -> Numbers:
        """Mean, least and largest value of every point; None where there is none."""
        values, count = values_N[self.records], len(self.starts)
        known = ~np.isnan(values)
        low, high = np.full(count, np.inf), np.full(count, -np.inf)
        np.minimum.at(low, self.point[known], values[known])
        np.maximum.at(high, self.point[known], values[known])
        return {"mean": self._means(values, known), "min": plain(low), "max": plain(high)}

    def per_moment(self, values_N: FloatArray) -> list[float | None]:
        """Sums over the layers of a moment, mean of the moments of every point."""
        values = values_N[self.records]
        known, count = ~np.isnan(values), len(self.starts)
        sums = np.bincount(self.point[known], values[known], minlength=count)
        there = np.bincount(self.point[known], minlength=count) > 0
        moments = np.diff(np.append(self.starts, self.end))
        return plain(np.where(there, sums / moments, np.nan))

    def _means(self, values: FloatArray, known: Array) -> list[float | None]:
        count = len(self.starts)
        sums = np.bincount(self.point[known], values[known], minlength=count)
        with np.errstate(invalid="ignore"):
            return plain(sums / np.bincount(self.point[known], minlength=count))

    def described(self) -> Numbers:
        """What all lines share; `step` is where a point stands, `at` what it is."""
        several = len(np.unique(self.table.microbatch)) > 1
        return {
            "axis": "microbatches, counted from the first" if several else "step",
            "step": (self.starts if several else self.step).tolist(),
            "at": np.column_stack([self.step, self.microbatch]).tolist(),
            "several": several,
            "steps_per_point": self.per_point,
            "begin": self.begin,
            "end": self.end,
            "moments": len(self.table.moments[0]),
            "domains": [],
        }


def overview(table: Table, begin: int = 0, end: int = LAST, *, most: int = 600) -> Numbers:
    """Lines over time, bars of layers and sums, of one stretch of the run."""
    table.check()
    points = Stretch(table, begin, end, most)
    lines = {name: points.spans(getattr(table, name)) for name in ("before", "after", "copies")}
    sums = {
        name: points.per_moment(getattr(table, name)) for name in ("bytes", "lost", "saved", "cost")
    }
    return points.described() | {
        "lines": lines | sums,
        "layers": by_layer(table, points.records),
        "totals": totals(table, points.records),
        "worst": table.worst(points.records),
    }


def by_layer(table: Table, records: IntArray) -> Numbers:
    """Mean and worst of every layer."""
    names, place_N = table.layers
    place = place_N[records]
    found: Numbers = {"layer": names.tolist()}
    for name in ("before", "after"):
        values = getattr(table, name)[records]
        known = ~np.isnan(values)
        worst = np.full(len(names), -np.inf)
        np.maximum.at(worst, place[known], values[known])
        found |= {name: plain(_means_at(place[known], values[known], len(names)))}
        found |= {f"{name}_worst": plain(worst)}
    for name in ("copies", "bytes"):
        values = getattr(table, name)[records]
        known = ~np.isnan(values)
        found[name] = plain(_means_at(place[known], values[known], len(names)))
    return found


def totals(table: Table, records: IntArray) -> Numbers:
    """Means and sums of these records."""
    found: Numbers = {"records": len(records)}
    for name in ("before", "after"):
        values = getattr(table, name)[records]
        known = values[~np.isnan(values)]
        found |= {name: plain([known.mean() if len(known) else np.nan])[0]}
        found |= {f"{name}_worst": plain([known.max(initial=-np.inf)])[0]}
        found |= {f"{name}_known": len(known)}
    for name in ("copies", "bytes", "lost", "saved", "cost"):
        values = getattr(table, name)[records]
        known = values[~np.isnan(values)]
        found[name] = plain([known.sum()])[0] if len(known) else None
    return found


def heat(table: Table, value: str, begin: int = 0, end: int = LAST, *, most: int = 240) -> Numbers:
    """Mean of every layer in every stretch of moments: [layer][column]."""
    table.check()
    points = Stretch(table, begin, end, most)
    names, place_N = table.layers
    values = getattr(table, value)[points.records]
    known = ~np.isnan(values)
    cell = place_N[points.records] * len(points.starts) + points.point
    cells = _means_at(cell[known], values[known], len(names) * len(points.starts))
    rows = cells.reshape(len(names), len(points.starts))
    return points.described() | {
        "value": value,
        "layers": names.tolist(),
        "starts": points.starts.tolist(),
        "z": [plain(row) for row in rows],
    }


def _means_at(places: IntArray, values: FloatArray, count: int) -> FloatArray:
    sums = np.bincount(places, values, minlength=count)
    with np.errstate(invalid="ignore"):
        means: FloatArray = sums / np.bincount(places, minlength=count)
    return means
