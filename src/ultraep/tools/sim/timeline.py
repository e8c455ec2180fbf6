"""One microbatch as a timeline for Perfetto or chrome://tracing: every policy, rank by rank.

A policy is a process. Its first thread shows the passes of the layers, the other threads are ranks.
All ranks synchronise at dispatch, at the experts and at combine; a rank with less work than the
busiest one shows a gap. Layers run forward in order, then backward in reverse. The timeline is
drawn from trace records with the stages of the runtime.

Shapes: S microbatches, H layers, R ranks, G stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ultraep.arrays import IntArray
from ultraep.plan import DEFAULT_CONFIG
from ultraep.tools.sim.costs import FloatArray
from ultraep.tools.sim.layer import LayerClock
from ultraep.tools.sim.planning import Replicas
from ultraep.tools.sim.run import plan_and_clock
from ultraep.tools.sim.runtime import Contender
from ultraep.tools.sim.scenario import Scenario
from ultraep.trace.export import Event, named, span, stages, threads, timeline
from ultraep.trace.read import Trace
from ultraep.trace.schema import SIMULATED, Header, of_backward

MAX_RANKS = 16  # threads per policy
MAX_BUSIEST = 8  # threads for ranks that are the busiest of a layer
FORWARD_STAGE = {"combine back": "combine", "dispatch back": "dispatch"}  # with equal busy times
BACK_G = of_backward(SIMULATED)


def median_microbatch(by_microbatch: FloatArray) -> int:
    """Return the microbatch with the median time, the shorter of two in the middle."""
    order = np.argsort(by_microbatch, kind="stable")
    return int(order[(len(order) - 1) // 2])


def make_timeline(
    scenario: Scenario, contenders: Sequence[Contender], *, microbatch: int, layers: int = 4
) -> dict[str, Any]:
    """Return the first layers with experts of one microbatch, in Chrome's trace format."""
    numbers = np.array(scenario.model.expert_layers[:layers])
    by_layer = [list(plan_and_clock(scenario, contenders, layer)) for layer in numbers.tolist()]
    events: list[Event] = []
    for process, clocked in enumerate(zip(*by_layer, strict=True)):
        trace = simulated_trace(contenders[process], clocked, numbers, microbatch)
        events += _draw(trace, process + 1)
    ranks = f"all {scenario.ranks}"
    if scenario.ranks > MAX_RANKS:
        ranks = f"{MAX_RANKS} of {scenario.ranks} for each policy: "
        ranks += "the busiest of a layer, the emptiest, and evenly between"
    facts = {"layers": f"{numbers[0]} to {numbers[-1]}", "ranks": ranks}
    facts |= {"cluster": scenario.cluster.name, "model": scenario.model.name}
    return timeline(events, microbatch=microbatch, **facts)


def simulated_trace(
    contender: Contender,
    clocked: Sequence[tuple[LayerClock, Replicas]],
    layers: IntArray,
    microbatch: int,
) -> Trace:
    """Return trace records of one microbatch, one per layer with its clock and replicas."""
    by_layer = [_stage_seconds(clock, replicas, microbatch) for clock, replicas in clocked]
    seconds, waited = (np.stack(arrays) for arrays in zip(*by_layer, strict=True))
    forward_H, backward_H = (seconds[:, 0, pass_G].sum(axis=1) for pass_G in (~BACK_G, BACK_G))
    ends_H = np.cumsum(forward_H)
    back_H = ends_H[-1] + np.cumsum(backward_H[::-1])[::-1] - backward_H
    header = Header.of(clocked[0][0].topology, DEFAULT_CONFIG, stages=SIMULATED)
    arrays = {
        "step": np.zeros_like(layers),
        "layer": layers,
        "microbatch": np.full_like(layers, microbatch),
        "began": np.tile(ends_H - forward_H, (header.ranks, 1)).T,
        "back_began": np.tile(back_H, (header.ranks, 1)).T,
        "seconds": seconds,
        "waited": waited,
    }
    return Trace(replace(header, policy=contender.label), arrays)


def _stage_seconds(
    clock: LayerClock, replicas: Replicas, microbatch: int
) -> tuple[FloatArray, FloatArray]:
    """[R, G] seconds of the stages until the last rank ends, and the part spent waiting."""
    times, busy = clock.times(replicas), clock.by_rank(replicas)
    seconds_RG = np.zeros((clock.topology.ranks, len(SIMULATED)))
    waited_RG = np.zeros_like(seconds_RG)
    for name, seconds_S in (times.forward | times.backward).items():
        stage = SIMULATED.index(name)
        seconds_RG[:, stage] = seconds_S[microbatch]
        busy_SR = busy.get(FORWARD_STAGE.get(name, name))
        if busy_SR is not None:
            waited_RG[:, stage] = seconds_S[microbatch] - busy_SR[microbatch]
    if "recompute" in times.backward:
        waited_RG[:, SIMULATED.index("recompute")] = waited_RG[:, ~BACK_G].sum(axis=1)
    return seconds_RG, waited_RG


def _draw(trace: Trace, process: int) -> Iterator[Event]:
    """Yield all events of one policy."""
    busy_HR = (trace.seconds - trace.waited)[:, :, SIMULATED.index("experts")]
    ranks = _ranks_to_draw(busy_HR)
    yield named("process_name", trace.header.policy, process)
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    yield named("thread_name", "layers", process)
    yield from threads(ranks, process, first_thread=1)
    passes = (("forward", trace.began, ~BACK_G, 1), ("backward", trace.back_began, BACK_G, -1))
    for direction, began, pass_G, order in passes:
        seconds_H = trace.seconds[:, 0, pass_G].sum(axis=1)
        for record in np.flatnonzero(seconds_H)[::order]:
            name = f"layer {trace.layer[record]} {direction}"
            yield span(name, "layer", began[record, 0], seconds_H[record], process, 0)
    yield from stages(trace, ranks, process, first_thread=1)


def _ranks_to_draw(busy_HR: FloatArray) -> list[int]:
    """Return all ranks, or the busiest ranks of layers and others evenly by their load."""
    total_R = busy_HR.sum(axis=0)
    if len(total_R) <= MAX_RANKS:
        return list(range(len(total_R)))
    busiest = list(dict.fromkeys(busy_HR.argmax(axis=1).tolist()))[:MAX_BUSIEST]
    rest = [rank for rank in np.argsort(total_R, kind="stable").tolist() if rank not in busiest]
    even = np.linspace(0, len(rest) - 1, MAX_RANKS - len(busiest)).round().astype(int)
    return sorted([*busiest, *(rest[index] for index in even)])
