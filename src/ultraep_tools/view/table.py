"""Table: a few numbers of every record. The numbers of the plots, and of one record.

A *moment* is one microbatch of one step, over all layers. If a range has more moments than the page
can show, one point of a line or one column of the map covers several of them, with their mean,
minimum and maximum.

Shapes: N records, M moments, G stages, R ranks, P points, U different speeds, C replicas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.config import PER_SECOND
from ultraep.errors import ConfigError
from ultraep.hops import CHUNKS, hops
from ultraep.plan import Plan, peak_of
from ultraep.trace.read import Trace
from ultraep.trace.schema import KEY, Array, Key, of_backward
from ultraep_tools.report.numbers import FloatArray, Numbers, plain

MOST_LAYERS = 4096
MOST_PLANS = 4000  # records of a replay
LAST = 2**62  # after all moments
VALUES = ("before", "after", "copies", "bytes", "lost", "saved", "cost")


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
    speeds: IntArray  # index of the speeds of a record in `speed_sets`; 0: equal
    stages: FloatArray  # [G] mean seconds of each stage, on the rank with the largest mean
    speed_sets: FloatArray  # [U, R] all different speeds, as shares of the nominal speed

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

    def take(self, records: IntArray, **changes: FloatArray) -> Table:
        """Return some of the records, with some columns replaced."""
        of_all = ("stages", "speed_sets")
        columns = [entry.name for entry in fields(self) if entry.name not in of_all]
        return replace(self, **{name: getattr(self, name)[records] for name in columns} | changes)

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


class Points:
    """The moments of a range as points of a line, each of one or several moments."""

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
        several = len(np.unique(microbatch_M)) > 1
        self.facts: Numbers = {  # step: x position of each point; at: its step and microbatch
            "axis": "microbatch, counted from the first" if several else "step",
            "step": (self.starts if several else step).tolist(),
            "at": np.column_stack([step, microbatch]).tolist(),
            "several": several,
            "unit": "microbatch" if several else "step",
            "steps_per_point": per_point,
            "begin": begin,
            "end": end,
            "moments": len(step_M),
            "domains": [],
        }


def overview(table: Table, begin: int = 0, end: int = LAST, *, most: int = 600) -> Numbers:
    """Return lines over time, means by layer and totals of a range of moments."""
    points = Points(table, begin, end, most)
    count, lines = len(points.starts), Numbers()
    for name in ("before", "after", "copies"):
        values = getattr(table, name)[points.records]
        lines[name] = {
            "mean": plain(_mean(points.point, values, count)),
            "min": plain(-_largest(points.point, -values, count)),
            "max": plain(_largest(points.point, values, count)),
        }
    for name in ("bytes", "lost", "saved", "cost"):  # per moment, summed over its layers
        sums, known = _sums(points.point, getattr(table, name)[points.records], count)
        lines[name] = plain(np.where(known > 0, sums / points.moments, np.nan))
    return points.facts | {
        "lines": lines,
        "speeds": speeds(table, points),
        "layers": by_layer(table, points.records),
        "totals": totals(table, points.records),
        "worst": table.worst(points.records),
    }


def speeds(table: Table, points: Points) -> Numbers | None:
    """Return the slowest and the fastest rank of every point; None if speeds are always equal."""
    index, sets, count = table.speeds[points.records], table.speed_sets, len(points.starts)
    if not index.any():
        return None
    cells = np.bincount(points.point * len(sets) + index, minlength=count * len(sets))
    records_PU = cells.reshape(count, len(sets))
    mean_PR = records_PU @ sets / np.maximum(records_PU.sum(axis=1, keepdims=True), 1)
    return {
        "slowest": plain(mean_PR.min(axis=1)),
        "fastest": plain(mean_PR.max(axis=1)),
        "slowest_rank": mean_PR.argmin(axis=1).tolist(),
        "fastest_rank": mean_PR.argmax(axis=1).tolist(),
    }


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
    """Return means and sums of these records; None where nothing is known."""
    numbers: Numbers = {"records": len(records)}
    for name in VALUES:
        values = getattr(table, name)[records]
        known = values[~np.isnan(values)]
        if name in ("before", "after"):
            mean, worst = plain([known.mean(), known.max()]) if len(known) else (None, None)
            numbers |= {name: mean, f"{name}_worst": worst}
        else:
            numbers[name] = plain([known.sum()])[0] if len(known) else None
    return numbers


def heat(table: Table, value: str, begin: int = 0, end: int = LAST, *, most: int = 240) -> Numbers:
    """Return the mean of every layer in every column of the map: [layer][column]."""
    points = Points(table, begin, end, most)
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


def records_to_replan(layer_N: IntArray, most: int = MOST_PLANS) -> IntArray:
    """Return the records of all layers, or of some evenly spaced layers if there are too many."""
    layers, place_N = np.unique(layer_N, return_inverse=True)
    if not len(layers):
        raise ConfigError("nothing to replay: the trace has no records")
    keep = max(1, min(len(layers), most * len(layers) // len(layer_N)))
    chosen = np.linspace(0, len(layers) - 1, keep).round().astype(int)
    return np.flatnonzero(np.isin(place_N, chosen))


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
    header, topology = trace.header, trace.topology
    copies = trace.copies.astype(np.int64)
    usable = (copies >= 0).all(axis=1)
    usable &= (copies[:, 0] < header.experts) & (copies[:, 1] < header.ranks)
    copies, quotas = copies[usable], trace.quotas[usable].astype(np.int64)
    held = np.full((header.ranks, header.slots), -1)
    in_slots = copies[:, 2] < header.slots  # some policies use more slots than there are
    held[copies[in_slots, 1], copies[in_slots, 2]] = copies[in_slots, 0]
    return {
        "policy": str(trace.policy[0]),
        "ranks": header.ranks,
        "homes": [topology.home_experts(rank).tolist() for rank in range(header.ranks)],
        "slots": header.slots,
        "loads": trace.loads[0].sum(axis=0, dtype=np.int64).tolist(),
        "rows": trace.slot_rows[0].tolist(),
        "held": held.reshape(-1).tolist(),
        "speeds": trace.speeds_of(0),
        "before": plain(trace.imbalance_before)[0],
        "after": plain(trace.imbalance_after)[0],
        "bytes": trace.bytes_moved[0].tolist(),
        "copies": _copies(trace, copies, quotas),
        "priced": _priced(trace, copies),
        "unusable": int((~usable).sum()),
    }


def _priced(trace: Trace, copies: IntArray) -> Numbers | None:
    """Return the predicted seconds with and without replicas; None without rates."""
    rates, homes = trace.rates_of(0), trace.topology.home_of_expert
    if rates is None or trace.header.objective != "time":
        return None
    received, sent = np.bincount(copies[:, 1]), np.bincount(homes[np.unique(copies[:, 0])])
    transfers = int(max(received.max(initial=0), sent.max(initial=0)))
    speeds = trace.speeds_of(0) or ()
    before, unit = peak_of(trace.initial_rank_loads[0].astype(np.int64), speeds)
    after, _ = peak_of(trace.rank_loads[0].astype(np.int64), speeds)
    planned = rates.time(peak=after, unit=unit, transfers=transfers, replicas=len(copies))
    without = rates.time(peak=before, unit=unit, transfers=0, replicas=0)
    return {"rates": str(rates), "time": planned / PER_SECOND, "without": without / PER_SECOND}


def _copies(trace: Trace, copies: IntArray, quotas: IntArray) -> Numbers:
    """Return every replica with the path of its weights.

    relay: "direct" or "chain".   mode: the setting of the balancer. For "auto", and for "" (not
    recorded), the paths follow the rule that balancers apply.
    """
    header, none = trace.header, np.zeros(0, dtype=np.int64)
    loads = trace.loads[0].astype(np.int64)
    plan = Plan(header.topology, header.config, loads, copies, quotas, none, none)
    sent = hops(plan, header.relay or "auto", chunks=header.chunks or CHUNKS)
    rows = {(int(c[0]), int(c[1])): int(q) for c, q in zip(copies, quotas, strict=True)}
    paths: dict[tuple[int, int], list[int]] = {}
    replicas = []
    for hop in sent:
        path = [*paths.get((hop.expert, hop.sender), [hop.sender]), hop.receiver]
        paths[hop.expert, hop.receiver] = path
        replicas.append(
            {
                "expert": hop.expert,
                "slot": hop.slot,
                "rows": rows[hop.expert, hop.receiver],
                "path": path,
            }
        )
    relay = "chain" if any(hop.depth for hop in sent) else "direct"
    return {"relay": relay, "mode": header.relay, "list": replicas}


def stages_of(trace: Trace) -> dict[str, Numbers | None]:
    """Return when the stages of the only record ran, by pass; None without times."""
    backward_G = of_backward(trace.header.stages)
    return {
        "forward": _stages(trace, "forward", trace.began[0], ~backward_G),
        "backward": _stages(trace, "backward", trace.back_began[0], backward_G),
    }


def _stages(trace: Trace, name: str, began: FloatArray, own_G: NDArray[np.bool_]) -> Numbers | None:
    """Return start, duration and waiting time of the stages of all ranks."""
    seconds, waited = (_finite(times[0, :, own_G].T) for times in (trace.seconds, trace.waited))
    if np.isnan(began).all() or not seconds.any():
        return None
    with np.errstate(invalid="ignore"):  # a file may hold any number
        begin = (began - np.nanmin(began))[:, None] + np.cumsum(seconds, axis=1) - seconds
    return {
        "name": name,
        "stages": [stage for stage, own in zip(trace.header.stages, own_G, strict=True) if own],
        "begin": [_rounded(row) for row in begin],
        "seconds": [_rounded(row) for row in seconds],
        "waited": [_rounded(row) for row in waited],
    }


def _finite(seconds: Array) -> FloatArray:
    return np.where(np.isfinite(seconds), seconds, 0).astype(np.float64)


def _rounded(values: FloatArray) -> list[float | None]:
    return [round(value, PLACES) if math.isfinite(value) else None for value in values.tolist()]
