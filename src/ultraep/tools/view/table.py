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
from typing import Any

import numpy as np

from ultraep.arrays import IntArray
from ultraep.errors import ConfigError
from ultraep.tools.report.numbers import FloatArray, Numbers, plain
from ultraep.trace.schema import KEY, Array, Key

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

    @cached_property
    def layers(self) -> tuple[IntArray, IntArray]:
        """The layers, each once, and [N] which of them every record has."""
        names, place_N = np.unique(self.layer, return_inverse=True)
        return names, place_N.reshape(-1)

    def take(self, records: IntArray, **others: FloatArray) -> Table:
        """Some of the records, with other values for them."""
        columns = [entry.name for entry in fields(self) if entry.name != "stages"]
        return replace(self, **{name: getattr(self, name)[records] for name in columns} | others)

    def worst(self, records: IntArray) -> Key | None:
        """Step, layer and microbatch of the most uneven of these records."""
        if not len(records):
            return None
        before = self.before[records]
        known = np.where(np.isnan(before), self.after[records], before)
        return self.key(int(records[known.argmax()]))

    def key(self, record: int) -> Key:
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
        if len(table.layers[0]) > MOST_LAYERS:
            raise ConfigError(
                f"the trace has {len(table.layers[0]):,} layers, at most {MOST_LAYERS:,} are shown"
            )
        step_M, microbatch_M, moment_N = table.moments
        begin, end = max(0, begin), min(len(step_M), end)
        per_point = max(1, math.ceil((end - begin) / most))
        self.starts = np.arange(begin, end, per_point)
        self.moments = np.diff(np.append(self.starts, end))
        self.records = table.within(begin, end)
        self.point = (moment_N[self.records] - begin) // per_point
        step, microbatch = step_M[self.starts], microbatch_M[self.starts]
        several = len(np.unique(table.microbatch)) > 1
        self.facts: Numbers = {  # `step` is where a point stands, `at` what it is
            "axis": "microbatches, counted from the first" if several else "step",
            "step": (self.starts if several else step).tolist(),
            "at": np.column_stack([step, microbatch]).tolist(),
            "several": several,
            "steps_per_point": per_point,
            "begin": begin,
            "end": end,
            "moments": len(step_M),
            "domains": [],
        }


def overview(table: Table, begin: int = 0, end: int = LAST, *, most: int = 600) -> Numbers:
    """Return lines over time, bars of layers and sums, of one stretch of the run."""
    points = Stretch(table, begin, end, most)
    count, lines = len(points.starts), dict[str, Any]()
    for name in ("before", "after", "copies"):
        values = getattr(table, name)[points.records]
        lines[name] = {
            "mean": plain(_mean(points.point, values, count)),
            "min": plain(-_largest(points.point, -values, count)),
            "max": plain(_largest(points.point, values, count)),
        }
    for name in ("bytes", "lost", "saved", "cost"):  # of a moment: summed over its layers
        sums, known = _sums(points.point, getattr(table, name)[points.records], count)
        lines[name] = plain(np.where(known > 0, sums / points.moments, np.nan))
    return points.facts | {
        "lines": lines,
        "layers": by_layer(table, points.records),
        "totals": totals(table, points.records),
        "worst": table.worst(points.records),
    }


def by_layer(table: Table, records: IntArray) -> Numbers:
    """Return the mean and the worst of every layer."""
    names, place_N = table.layers
    layers: Numbers = {"layer": names.tolist()}
    for name in ("before", "after", "copies", "bytes"):
        values = getattr(table, name)[records]
        layers[name] = plain(_mean(place_N[records], values, len(names)))
        if name in ("before", "after"):
            layers[f"{name}_worst"] = plain(_largest(place_N[records], values, len(names)))
    return layers


def totals(table: Table, records: IntArray) -> Numbers:
    """Return means and sums of these records; None where nothing is known."""
    numbers: Numbers = {"records": len(records)}
    for name in ("before", "after"):
        values = getattr(table, name)[records]
        known = values[~np.isnan(values)]
        mean, worst = plain([known.mean(), known.max()]) if len(known) else (None, None)
        numbers |= {name: mean, f"{name}_worst": worst, f"{name}_known": len(known)}
    for name in ("copies", "bytes", "lost", "saved", "cost"):
        values = getattr(table, name)[records]
        known = values[~np.isnan(values)]
        numbers[name] = plain([known.sum()])[0] if len(known) else None
    return numbers


def heat(table: Table, value: str, begin: int = 0, end: int = LAST, *, most: int = 240) -> Numbers:
    """Return the mean of every layer in every stretch of moments: [layer][column]."""
    points = Stretch(table, begin, end, most)
    names, place_N = table.layers
    columns = len(points.starts)
    cell = place_N[points.records] * columns + points.point
    cells = _mean(cell, getattr(table, value)[points.records], len(names) * columns)
    return points.facts | {
        "value": value,
        "layers": names.tolist(),
        "starts": points.starts.tolist(),
        "z": [plain(row) for row in cells.reshape(len(names), columns)],
    }


def _sums(place: IntArray, values: FloatArray, count: int) -> tuple[FloatArray, Array]:
    """[count] sums of the known values at every place, and how many are known."""
    known = ~np.isnan(values)
    sums = np.bincount(place[known], values[known], minlength=count).astype(np.float64)
    return sums, np.bincount(place[known], minlength=count)


def _mean(place: IntArray, values: FloatArray, count: int) -> FloatArray:
    sums, known = _sums(place, values, count)
    return np.where(known > 0, sums / np.maximum(known, 1), np.nan)


def _largest(place: IntArray, values: FloatArray, count: int) -> FloatArray:
    largest = np.full(count, -np.inf)
    np.fmax.at(largest, place, values)
    return largest
