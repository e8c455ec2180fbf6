"""Table: a few numbers of every record. The numbers of the plots, and of one record.

A *moment* is one microbatch of one step, over all layers. If a range has more moments than the page
can show, one point of a line covers several of them, with their mean, minimum and maximum.

Shapes: N records, M moments, G stages, R ranks, C replicas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.config import PER_SECOND
from ultraep.plan import Plan
from ultraep.trace.read import Trace
from ultraep.trace.schema import KEY, Key, of_backward
from ultraep_tools.report.numbers import FloatArray, Numbers, microbatch, plain

LAST = 2**62  # after all moments
SUMS = ("copies", "bytes", "lost", "saved", "cost")


@dataclass(frozen=True, eq=False)
class Table:
    """Records that all ranks have. Unknown values are NaN.

    before, after: imbalance without and with replicas.   copies: replicas.
    lost: seconds that the slowest rank computes experts longer than the mean rank.
    saved: seconds that it would compute longer without replicas, if time is proportional to rows;
        0 for records without replicas.
    cost: seconds of the stages that balancing adds, on the slowest rank.
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
    rows: IntArray  # routed rows of all ranks
    balanced: NDArray[np.bool_]  # whether the policy of the record replicates
    stages: FloatArray  # [G] mean seconds of each stage, on the rank with the largest mean
    layer_seconds: float  # mean seconds of all stages of a record, mean of the ranks

    def __len__(self) -> int:
        return len(self.step)

    @cached_property
    def moments(self) -> tuple[IntArray, IntArray, IntArray]:
        """[M] step, [M] microbatch, and [N] the moment of every record."""
        keys = np.column_stack([self.step, self.microbatch])
        moments, moment_N = np.unique(keys, axis=0, return_inverse=True)
        return moments[:, 0], moments[:, 1], moment_N.reshape(-1)

    @cached_property
    def layers(self) -> tuple[IntArray, IntArray]:
        """The layers in ascending order, and [N] the position of each record's layer in them."""
        names, place_N = np.unique(self.layer, return_inverse=True)
        return names, place_N.reshape(-1)

    def worst(self, records: IntArray) -> Key | None:
        """Return step, layer and microbatch of the most imbalanced of these records."""
        return self.key(int(records[self.before[records].argmax()])) if len(records) else None

    def key(self, record: int) -> Key:
        step, layer, microbatch = (int(getattr(self, name)[record]) for name in KEY)
        return step, layer, microbatch

    def within(self, begin: int, end: int, layer: int | None = None) -> IntArray:
        """Return the records of moments begin..end-1, of one layer or of all."""
        moment_N = self.moments[2]
        inside = (moment_N >= begin) & (moment_N < end)
        return np.flatnonzero(inside if layer is None else inside & (self.layer == layer))


def overview(table: Table, begin: int = 0, end: int = LAST, *, most: int = 600) -> Numbers:
    """Return lines over time, means by layer and totals of a range of moments.

    Means and totals cover the balanced records, or all records if none is balanced.

    most: points of a line.   unbalanced: records that means and totals leave out.
    """
    step_M, microbatch_M, moment_N = table.moments
    begin, end = max(0, begin), min(len(step_M), end)
    per_point = max(1, math.ceil((end - begin) / most))
    starts = np.arange(begin, end, per_point)
    records = table.within(begin, end)
    balanced = records[table.balanced[records]]
    kept = balanced if len(balanced) else records
    point_N = (moment_N[records] - begin) // per_point
    several = len(np.unique(microbatch_M)) > 1
    return {
        "axis": "microbatch, counted from the first" if several else "step",
        "unit": "microbatch" if several else "step",
        "step": (starts if several else step_M[starts]).tolist(),  # x position of each point
        "steps_per_point": per_point,
        "begin": begin,
        "end": end,
        "moments": len(step_M),
        "lines": lines(table, records, point_N, np.diff(np.append(starts, end))),
        "layers": by_layer(table, kept),
        "totals": totals(table, kept),
        "unbalanced": len(records) - len(kept),
    }


def lines(table: Table, records: IntArray, point_N: IntArray, moments_P: IntArray) -> Numbers:
    """Return the lines over time.

    point_N: the point of each of the records.   moments_P: the number of moments of each point.
    """
    numbers, count = Numbers(), len(moments_P)
    for name in ("before", "after", "copies"):
        values = getattr(table, name)[records]
        numbers[name] = {
            "mean": plain(_mean(point_N, values, count)),
            "min": plain(-_largest(point_N, -values, count)),
            "max": plain(_largest(point_N, values, count)),
        }
    for name in ("bytes", "lost", "saved", "cost"):  # per moment, summed over its layers
        sums, known = _sums(point_N, getattr(table, name)[records], count)
        numbers[name] = plain(np.where(known > 0, sums / moments_P, np.nan))
    return numbers


def by_layer(table: Table, records: IntArray) -> Numbers:
    """Return the mean and the worst value of every layer."""
    names, place_N = table.layers
    layers: Numbers = {"layer": names.tolist()}
    for name in ("before", "after"):
        values = getattr(table, name)[records]
        layers[name] = plain(_mean(place_N[records], values, len(names)))
        layers[f"{name}_worst"] = plain(_largest(place_N[records], values, len(names)))
    return layers


def totals(table: Table, records: IntArray) -> Numbers:
    """Return means and sums of these records; a sum is None if it is unknown."""
    moments = len(np.unique(table.moments[2][records]))
    numbers: Numbers = {"records": len(records), "moments": moments}
    for name in ("before", "after"):
        values = getattr(table, name)[records]
        mean, worst = plain([values.mean(), values.max()]) if len(records) else (None, None)
        numbers |= {name: mean, f"{name}_worst": worst}
    for name in SUMS:
        values = getattr(table, name)[records]
        numbers[name] = None if np.isnan(values).all() else plain([np.nansum(values)])[0]
    return numbers


def _sums(place: IntArray, values: FloatArray, count: int) -> tuple[FloatArray, IntArray]:
    """[count] sums of the known values at every place, and their number."""
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


# -- one record ----------------------------------------------------------------------------------

PLACES = 7  # a tenth of a microsecond


def numbers_of(trace: Trace) -> Numbers:
    """Return everything that the page draws of the only record of a trace."""
    header = trace.header
    copies = trace.copies.astype(np.int64)
    usable = (copies >= 0).all(axis=1)
    usable &= (copies[:, 0] < header.experts) & (copies[:, 1] < header.ranks)
    copies, quotas = copies[usable], trace.quotas[usable].astype(np.int64)
    loads, none = trace.loads[0].astype(np.int64), np.zeros(0, dtype=np.int64)
    plan = Plan(header.topology, trace.config(0), loads, copies, quotas, none, trace.rank_loads[0])
    picoseconds = plan.time, plan.time_without_replicas
    return microbatch(plan) | {
        "policy": str(trace.policy[0]),
        "homes": [header.topology.home_experts(rank).tolist() for rank in range(header.ranks)],
        "slots": header.slots,
        "rows": trace.slot_rows[0].tolist(),
        "speeds": trace.speeds_of(0),
        "before": plain(trace.imbalance_before)[0],
        "after": plain(trace.imbalance_after)[0],
        "bytes": int(trace.bytes_moved[0].sum()),
        "replicas": len(copies),
        "predicted": [time / PER_SECOND for time in picoseconds if time is not None],
        "unusable": int((~usable).sum()),
    }


def stages_of(trace: Trace) -> dict[str, Numbers | None]:
    """Return when the stages of the only record ran, by pass; None without times."""
    backward_G = of_backward(trace.header.stages)
    return {
        "forward": _stages(trace, "forward", trace.began[0], ~backward_G),
        "backward": _stages(trace, "backward", trace.back_began[0], backward_G),
    }


def _stages(trace: Trace, name: str, began: FloatArray, own_G: NDArray[np.bool_]) -> Numbers | None:
    """Return start and duration of the stages of all ranks."""
    recorded = trace.seconds[0][:, own_G]
    seconds = np.where(np.isfinite(recorded), recorded, 0).astype(float)
    if np.isnan(began).all() or not seconds.any():
        return None
    with np.errstate(invalid="ignore"):  # a file may hold any number
        begin = (began - np.nanmin(began))[:, None] + np.cumsum(seconds, axis=1) - seconds
    return {
        "name": name,
        "stages": [stage for stage, own in zip(trace.header.stages, own_G, strict=True) if own],
        "begin": [plain(row, PLACES) for row in begin],
        "seconds": [plain(row, PLACES) for row in seconds],
    }
