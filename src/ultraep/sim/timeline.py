"""One microbatch as a timeline for Perfetto or chrome://tracing: every policy, rank by rank.

A policy is a process. Its first thread shows the passes of the layers, the others are ranks. All
ranks meet when rows are dispatched, when experts begin and when outputs are combined; a rank that
has less to do than the busiest one shows a gap until then. Layers are drawn as the microbatch runs
through them: forward in their order, then backward in reverse, as if there were no more of them.

Shapes: S microbatches, R ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep.errors import ConfigError
from ultraep.outputs import write_text
from ultraep.sim.layer import LayerClock
from ultraep.sim.planning import Copies
from ultraep.sim.run import plan_and_clock
from ultraep.sim.scenario import Contender, Scenario

FloatArray = NDArray[np.float64]
Event = dict[str, Any]

MOST_RANKS = 16  # threads of a policy
MOST_FULLEST = 8  # of them for ranks that are the fullest of a layer
TO_MICRO = 1e6
# Stages backward in the order of time; what is left of the reduction comes last.
BACKWARD = (
    *("weights again", "combine back", "experts back", "dispatch back"),
    *("attention back", "reduce"),
)
# The stage forward that keeps the ranks busy for as long.
BUSY_LIKE = {"combine back": "combine", "dispatch back": "dispatch"}


@dataclass(frozen=True)
class Stage:
    """A stage of one pass through a layer."""

    name: str
    seconds: float  # until all ranks are through
    busy: FloatArray  # [R] seconds for which each rank is at work


@dataclass(frozen=True)
class Pass:
    """The stages of one layer, forward or backward, one after the other."""

    name: str
    stages: list[Stage]

    @property
    def seconds(self) -> float:
        """Of all stages."""
        return sum(stage.seconds for stage in self.stages)


def median_microbatch(by_microbatch: FloatArray) -> int:
    """The microbatch whose time is the median one; the shorter of two in the middle."""
    order = np.argsort(by_microbatch, kind="stable")
    return int(order[(len(order) - 1) // 2])


def make_timeline(
    scenario: Scenario,
    contenders: Sequence[Contender],
    *,
    microbatch: int,
    layers: int = 4,
) -> dict[str, Any]:
    """The first layers with experts of one microbatch, in the format of Chrome's tracing."""
    if layers < 1:
        raise ConfigError(f"a timeline needs at least one layer, got {layers}")
    first, last = scenario.model.dense_layers, scenario.model.layers
    numbers = range(first, min(first + layers, last))
    by_layer = [
        [
            _passes(layer, clock, copies, microbatch)
            for clock, copies in plan_and_clock(scenario, contenders, layer)
        ]
        for layer in numbers
    ]
    events: list[Event] = []
    for process, (contender, own) in enumerate(
        zip(contenders, zip(*by_layer, strict=True), strict=True), start=1
    ):
        events += _process(process, contender.label, list(own))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "microbatch": microbatch,
            "layers": f"{numbers[0]} to {numbers[-1]}",
            "ranks": _which_ranks(scenario.ranks),
            "cluster": scenario.cluster.name,
            "model": scenario.model.name,
        },
    }


def write_timeline(path: str | Path, timeline: dict[str, Any]) -> None:
    """As JSON."""
    write_text(path, json.dumps(timeline))


def _which_ranks(ranks: int) -> str:
    if ranks <= MOST_RANKS:
        return f"all {ranks}"
    return (
        f"{MOST_RANKS} of {ranks} for each policy: the fullest of a layer, the emptiest, "
        "and evenly between"
    )


# -- passes --------------------------------------------------------------------------------------


def _passes(layer: int, clock: LayerClock, copies: Copies, microbatch: int) -> list[Pass]:
    """Forward, and backward in training."""
    times, busy = clock.times(copies), clock.by_rank(copies)
    ranks = clock.topology.ranks

    def stage(name: str, seconds_S: FloatArray) -> Stage:
        seconds = float(seconds_S[microbatch])
        by_rank = busy.get(BUSY_LIKE.get(name, name))
        own_R = np.full(ranks, seconds) if by_rank is None else by_rank[microbatch]
        return Stage(name, seconds, own_R)

    forward = [stage(name, seconds_S) for name, seconds_S in times.forward.items()]
    made = [Pass(f"layer {layer} forward", forward)]
    if times.backward:
        again = [Stage(f"recompute {one.name}", one.seconds, one.busy) for one in forward]
        back = [stage(name, times.backward[name]) for name in BACKWARD]
        stages = [*again, *back] if "recompute" in times.backward else back
        made.append(Pass(f"layer {layer} backward", stages))
    return made


def _in_order(layers: list[list[Pass]]) -> list[Pass]:
    """Forward through the layers, then backward in reverse."""
    ahead = [passes[0] for passes in layers]
    back = [one for passes in reversed(layers) for one in passes[1:]]
    return ahead + back


# -- events --------------------------------------------------------------------------------------


def _process(process: int, label: str, layers: list[list[Pass]]) -> Iterator[Event]:
    """Everything of one policy."""
    ranks = _ranks_to_draw([_experts_busy(passes[0]) for passes in layers])
    yield _named("process_name", label, process)
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    yield _named("thread_name", "layers", process, 0)
    for rank in ranks:
        yield _named("thread_name", f"rank {rank}", process, rank + 1)
    begin = 0.0
    for one in _in_order(layers):
        yield _event(one.name, "layer", begin, one.seconds, process, 0)
        yield from _stages(one, begin, process, ranks)
        begin += one.seconds


def _stages(one: Pass, begin: float, process: int, ranks: list[int]) -> Iterator[Event]:
    for stage in one.stages:
        for rank in ranks:
            if stage.busy[rank] > 0:
                busy = float(stage.busy[rank])
                yield _event(stage.name, one.name, begin, busy, process, rank + 1)
        begin += stage.seconds


def _event(
    name: str, category: str, begin: float, seconds: float, process: int, thread: int
) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": begin * TO_MICRO,
        "dur": seconds * TO_MICRO,
        "pid": process,
        "tid": thread,
    }


def _named(kind: str, name: str, process: int, thread: int = 0) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _experts_busy(one: Pass) -> FloatArray:
    return next(stage.busy for stage in one.stages if stage.name == "experts")


def _ranks_to_draw(busy_by_layer: list[FloatArray]) -> list[int]:
    """All ranks, or the fullest of layers, the emptiest of all, and others evenly between."""
    total_R = np.sum(busy_by_layer, axis=0)
    if len(total_R) <= MOST_RANKS:
        return list(range(len(total_R)))
    fullest = list(dict.fromkeys(int(busy_R.argmax()) for busy_R in busy_by_layer))[:MOST_FULLEST]
    order = [rank for rank in np.argsort(total_R, kind="stable").tolist() if rank not in fullest]
    places = np.linspace(0, len(order) - 1, MOST_RANKS - len(fullest)).round().astype(int)
    return sorted([*fullest, *(order[place] for place in places)])
