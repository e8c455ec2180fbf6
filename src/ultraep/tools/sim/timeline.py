"""One microbatch as a timeline for Perfetto or chrome://tracing: every policy, rank by rank.

A policy is a process. Its first thread shows the passes of the layers, the others are ranks. All
ranks meet when rows are dispatched, when experts begin and when outputs are combined; a rank that
has less to do than the busiest one shows a gap until then. Layers are drawn as the microbatch runs
through them: forward in their order, then backward in reverse, as if there were no more of them.
What is drawn are records of a trace, with the stages of the runtime.

Shapes: S microbatches, H layers, R ranks, G stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.errors import ConfigError
from ultraep.plan import DEFAULT_CONFIG
from ultraep.tools.sim.layer import LayerClock
from ultraep.tools.sim.planning import CopySets
from ultraep.tools.sim.run import plan_and_clock
from ultraep.tools.sim.scenario import Contender, Scenario
from ultraep.trace.export import Event, named, span, stages, threads, timeline
from ultraep.trace.read import Trace
from ultraep.trace.schema import SIMULATED, Header, of_backward

FloatArray = NDArray[np.float64]

MOST_RANKS = 16  # threads of a policy
MOST_FULLEST = 8  # of them for ranks that are the fullest of a layer
# The stage forward that keeps the ranks busy for as long.
BUSY_LIKE = {"combine back": "combine", "dispatch back": "dispatch"}
BACK_G = of_backward(SIMULATED)


def median_microbatch(by_microbatch: FloatArray) -> int:
    """The microbatch whose time is the median one; the shorter of two in the middle."""
    order = np.argsort(by_microbatch, kind="stable")
    return int(order[(len(order) - 1) // 2])


def make_timeline(
    scenario: Scenario, contenders: Sequence[Contender], *, microbatch: int, layers: int = 4
) -> dict[str, Any]:
    """The first layers with experts of one microbatch, in the format of Chrome's tracing."""
    if layers < 1:
        raise ConfigError(f"a timeline needs at least one layer, got {layers}")
    first, last = scenario.model.dense_layers, scenario.model.layers
    numbers = np.arange(first, min(first + layers, last))
    by_layer = [list(plan_and_clock(scenario, contenders, layer)) for layer in numbers.tolist()]
    events: list[Event] = []
    for process, own in enumerate(zip(contenders, *by_layer, strict=True), start=1):
        contender, *clocked = own
        events += _process(process, simulated_trace(contender, clocked, numbers, microbatch))
    others = {"microbatch": microbatch, "layers": f"{numbers[0]} to {numbers[-1]}"}
    others |= {"ranks": _which_ranks(scenario.ranks), "cluster": scenario.cluster.name}
    return timeline(events, **others, model=scenario.model.name)


def _which_ranks(ranks: int) -> str:
    if ranks <= MOST_RANKS:
        return f"all {ranks}"
    return (
        f"{MOST_RANKS} of {ranks} for each policy: the fullest of a layer, the emptiest, "
        "and evenly between"
    )


def simulated_trace(
    contender: Contender,
    clocked: Sequence[tuple[LayerClock, CopySets]],
    layers: IntArray,
    microbatch: int,
) -> Trace:
    """Records of one microbatch in these layers, each with its clock: their key and their times."""
    by_layer = [_layer(clock, copies, microbatch) for clock, copies in clocked]
    seconds, waited = (np.stack(part) for part in zip(*by_layer, strict=True))
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


def _layer(clock: LayerClock, copies: CopySets, microbatch: int) -> tuple[FloatArray, FloatArray]:
    """[R, G] seconds of the stages until the last rank ends, and the part spent waiting."""
    times, busy = clock.times(copies), clock.by_rank(copies)
    seconds_RG = np.zeros((clock.topology.ranks, len(SIMULATED)))
    waited_RG = np.zeros_like(seconds_RG)
    for name, seconds_S in (times.forward | times.backward).items():
        stage = SIMULATED.index(name)
        seconds_RG[:, stage] = seconds_S[microbatch]
        busy_SR = busy.get(BUSY_LIKE.get(name, name))
        if busy_SR is not None:
            waited_RG[:, stage] = seconds_S[microbatch] - busy_SR[microbatch]
    if "recompute" in times.backward:
        waited_RG[:, SIMULATED.index("recompute")] = waited_RG[:, ~BACK_G].sum(axis=1)
    return seconds_RG, waited_RG


def _process(process: int, trace: Trace) -> Iterator[Event]:
    """Everything of one policy."""
    busy_HR = (trace.seconds - trace.waited)[:, :, SIMULATED.index("experts")]
    ranks = _ranks_to_draw(busy_HR)
    yield named("process_name", trace.header.policy, process)
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    yield named("thread_name", "layers", process)
    yield from threads(ranks, process, first_thread=1)
    yield from _passes(trace, process)
    yield from stages(trace, ranks, process, first_thread=1)


def _passes(trace: Trace, process: int) -> Iterator[Event]:
    """Forward through the layers, then backward in reverse."""
    ways = (("forward", trace.began, ~BACK_G, 1), ("backward", trace.back_began, BACK_G, -1))
    for way, began, pass_G, order in ways:
        seconds_H = trace.seconds[:, 0, pass_G].sum(axis=1)
        for record in np.flatnonzero(seconds_H)[::order]:
            name = f"layer {trace.layer[record]} {way}"
            yield span(name, "layer", began[record, 0], seconds_H[record], process, 0)


def _ranks_to_draw(busy_HR: FloatArray) -> list[int]:
    """All ranks, or the fullest of layers, the emptiest of all, and others evenly between."""
    total_R = busy_HR.sum(axis=0)
    if len(total_R) <= MOST_RANKS:
        return list(range(len(total_R)))
    fullest = list(dict.fromkeys(busy_HR.argmax(axis=1).tolist()))[:MOST_FULLEST]
    order = [rank for rank in np.argsort(total_R, kind="stable").tolist() if rank not in fullest]
    places = np.linspace(0, len(order) - 1, MOST_RANKS - len(fullest)).round().astype(int)
    return sorted([*fullest, *(order[place] for place in places)])
