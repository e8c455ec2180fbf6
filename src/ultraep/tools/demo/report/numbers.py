"""The numbers of the report: what each section draws, ready for JSON. No words, no pictures.

Long trainings are thinned out: a point then stands for several steps in a row, with their mean,
least and largest value; `steps_per_point` says for how many.

Shapes: N records, T steps, P points, R ranks, E experts, S slots of all ranks.
"""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np

from ultraep.arrays import IntArray
from ultraep.tools.demo.report.sources import Sources
from ultraep.tools.report.numbers import MOST_NUMBERS, FloatArray, Numbers, kept, plain
from ultraep.trace.read import Trace

MOST_POINTS = 1000  # of a line


def all_numbers(sources: Sources, replayed: Numbers) -> dict[str, Numbers]:
    """By section; everything that the page draws."""
    return {
        "imbalance": imbalance_by_step(sources),
        "layers": imbalance_by_layer(sources.trace),
        "microbatches": microbatches(sources),
        "copies": copies_by_step(sources),
        "replay": replayed,
        "loss": losses(sources),
        "speed": speeds(sources),
        "requests": requests(sources),
    }


class Points:
    """The steps of a training as points of a line: one each, or several together."""

    def __init__(self, sources: Sources) -> None:
        steps = sources.result.steps
        self.per_point = math.ceil(steps / MOST_POINTS)
        self._domains = [asdict(domain) for domain in sources.domains]
        self._begins = np.arange(0, steps, self.per_point)

    def of(self, step: IntArray, values: FloatArray) -> Numbers:
        """Mean, least and largest value of every point; None where there is none."""
        point = step // self.per_point
        count = len(self._begins)
        low, high = np.full(count, np.inf), np.full(count, -np.inf)
        np.minimum.at(low, point, values)
        np.maximum.at(high, point, values)
        return {"mean": self.means(step, values), "min": plain(low), "max": plain(high)}

    def means(self, step: IntArray, values: FloatArray) -> list[float | None]:
        """The mean of every point."""
        point = step // self.per_point
        sums = np.bincount(point, values, minlength=len(self._begins))
        with np.errstate(invalid="ignore"):
            return plain(sums / np.bincount(point, minlength=len(self._begins)))

    def described(self) -> Numbers:
        """What all lines share."""
        return {
            "step": self._begins.tolist(),
            "steps_per_point": self.per_point,
            "domains": self._domains,
        }


def imbalance_by_step(sources: Sources) -> Numbers:
    """Over the layers of every step, without and with copies."""
    points, trace = Points(sources), sources.trace
    return points.described() | {
        "before": points.of(trace.step, trace.imbalance_before),
        "after": points.of(trace.step, trace.imbalance_after),
    }


def imbalance_by_layer(trace: Trace) -> Numbers:
    """Over the steps of every layer, mean and worst."""
    own = [trace.layer == layer for layer in trace.layers]
    before, after = trace.imbalance_before, trace.imbalance_after
    return {
        "layer": trace.layers.tolist(),
        "before": plain([before[records].mean() for records in own]),
        "before_worst": plain([before[records].max() for records in own]),
        "after": plain([after[records].mean() for records in own]),
        "after_worst": plain([after[records].max() for records in own]),
    }


def copies_by_step(sources: Sources) -> Numbers:
    """Copies of a layer, mean over the layers; bytes of all ranks and layers of a step."""
    points, trace = Points(sources), sources.trace
    step, place = np.unique(trace.step, return_inverse=True)
    moved: FloatArray = np.bincount(place, trace.bytes_moved.sum(axis=1)).astype(np.float64)
    return points.described() | {
        "copies": points.of(trace.step, trace.num_copies.astype(np.float64)),
        "bytes": points.means(step, moved),
        "bytes_in_all": int(trace.bytes_moved.sum()),
    }


def losses(sources: Sources) -> Numbers:
    """Numbers of every run."""
    points, result = Points(sources), sources.result
    step = np.arange(result.steps)
    found = {row.policy: points.means(step, np.array(row.losses)) for row in result.policies}
    return points.described() | {"losses": found}


def speeds(sources: Sources) -> Numbers:
    """Tokens of all ranks per second of every step, under every policy."""
    points, result = Points(sources), sources.result
    step, tokens = np.arange(result.steps), result.sizes.tokens * result.sizes.ranks
    found = {
        row.policy: points.means(step, tokens / np.maximum(row.seconds, 1e-9))
        for row in result.policies
    }
    return points.described() | {"tokens_per_second": found}


def requests(sources: Sources) -> Numbers:
    """What was measured of requests and of single layers, by policy."""
    rows = sources.result.policies
    return {
        "policy": [row.policy for row in rows],
        "first_token_median": plain([row.first_token_median for row in rows]),
        "first_token_p90": plain([row.first_token_p90 for row in rows]),
        "layer_tokens_per_second": plain([row.layer_tokens_per_second for row in rows]),
        "forced_tokens_per_second": plain([sources.result.forced_tokens_per_second])[0],
    }


# -- microbatches to choose from -----------------------------------------------------------------


def microbatches(sources: Sources) -> Numbers:
    """Every microbatch of every layer: tokens of the experts, rows of the slots, held copies.

    `records[moment][layer]` is None where nothing was recorded.
    """
    trace, topology = sources.trace, sources.trace.topology
    moments, moment_N = np.unique(
        np.column_stack([trace.step, trace.microbatch]), axis=0, return_inverse=True
    )
    moment_N = moment_N.reshape(-1)
    worst = int(trace.imbalance_before.argmax())
    shown = kept(len(moments), _numbers_of_moment(trace), int(moment_N[worst]), MOST_NUMBERS)
    place = {int(moment): number for number, moment in enumerate(shown)}
    layers = trace.layers.tolist()
    records: list[list[Numbers | None]] = [[None] * len(layers) for _ in shown]
    for record, moment in enumerate(moment_N.tolist()):
        if moment in place:
            column = layers.index(int(trace.layer[record]))
            records[place[moment]][column] = _microbatch(trace, record)
    return {
        "noun": "Step",
        "homes": [topology.home_experts(rank).tolist() for rank in range(topology.ranks)],
        "slots": topology.slots,
        "layers": layers,
        "recorded": len(moments),
        "moments": [_moment(sources, *moments[moment].tolist()) for moment in shown],
        "worst": [place[int(moment_N[worst])], layers.index(int(trace.layer[worst]))],
        "records": records,
    }


def _moment(sources: Sources, step: int, microbatch: int) -> Numbers:
    return {"step": step, "microbatch": microbatch, "domain": sources.result.domains[step]}


def _numbers_of_moment(trace: Trace) -> int:
    topology = trace.topology
    slots = int(topology.first_slot_of_rank[-1]) + topology.ranks * topology.slots
    return len(trace.layers) * (topology.experts + slots)


def _microbatch(trace: Trace, record: int) -> Numbers:
    topology = trace.topology
    begin = int(trace.copy_ends[record - 1]) if record else 0
    held_RL = np.full((topology.ranks, topology.slots), -1)
    for expert, host, slot in trace.copies[begin : int(trace.copy_ends[record])].tolist():
        if slot < topology.slots:  # policies beyond the limits may hold more
            held_RL[host, slot] = expert
    return {
        "loads": trace.loads[record].sum(axis=0).tolist(),
        "rows": trace.slot_rows[record].tolist(),
        "held": held_RL.reshape(-1).tolist(),
    }
