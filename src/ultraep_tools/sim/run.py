"""simulate: the throughput of every policy in a scenario.

Layers are independent of each other until the job combines them, so they are distributed over
processes. The results do not depend on the number of processes.

A timeline shows one microbatch in Perfetto or chrome://tracing. A policy is a process. Its first
thread shows the passes of the layers, the other threads are ranks. All ranks synchronise at
dispatch, at the experts and at combine; a rank with less work than the busiest one shows a gap.
Layers run forward in order, then backward in reverse. The timeline is drawn from trace records with
the stages of the runtime.

Shapes: S microbatches, H layers with experts, R ranks, G stages.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ultraep.arrays import IntArray
from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError
from ultraep.plan import DEFAULT_CONFIG
from ultraep.trace.read import Trace
from ultraep.trace.schema import SIMULATED, Header, of_backward
from ultraep_tools.export import Event, named, span, stages, threads, timeline
from ultraep_tools.sim.costs import FloatArray
from ultraep_tools.sim.layer import LayerClock, LayerTimes
from ultraep_tools.sim.planning import Replicas, plan_layer
from ultraep_tools.sim.runtime import IDEAL, NONE, Contender
from ultraep_tools.sim.scenario import Memory, Scenario
from ultraep_tools.sim.workload import share_out

Report = Callable[[int, int], None]  # called with layers done, all layers


@dataclass(frozen=True)
class Result:
    """The result of one contender."""

    label: str
    policy: str
    priced_as: str  # the policy whose costs were used
    slots: int
    throughput: float
    unit: str
    tokens_per_second: float  # per device
    imbalance: float
    worst_imbalance: float
    copies: float  # replicas per layer and microbatch
    seconds: float  # of a microbatch through all layers, forward and backward
    stages: dict[str, float]  # seconds of a microbatch by stage, over all layers
    memory: Memory
    out_of_memory: float  # share of the microbatches in which a device runs out of memory
    by_microbatch: FloatArray  # [S] seconds through all layers
    imbalance_by_layer: FloatArray  # [H]


def simulate(
    scenario: Scenario,
    contenders: Sequence[Contender | str],
    *,
    processes: int = 1,
    report: Report | None = None,
) -> list[Result]:
    """Simulate all contenders on the same loads and return their results in the same order."""
    chosen = [c if isinstance(c, Contender) else Contender.of(c) for c in contenders]
    if not chosen:
        raise ConfigError("nothing to simulate: name at least one policy")
    if processes < 1:
        raise ConfigError(f"processes must be at least 1, got {processes}")
    layers = scenario.model.expert_layers
    times: list[list[LayerTimes]] = []
    for layer_times in _time_layers(scenario, chosen, layers, processes):
        times.append(layer_times)
        if report:
            report(len(times), len(layers))
    return [
        _result(scenario, contender, own)
        for contender, own in zip(chosen, zip(*times, strict=True), strict=True)
    ]


def _time_layers(
    scenario: Scenario, contenders: list[Contender], layers: range, processes: int
) -> Iterator[list[LayerTimes]]:
    time = partial(time_layer, scenario, contenders)
    if processes == 1 or len(layers) == 1:
        yield from map(time, layers)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(processes, len(layers)), mp_context=context)
    try:
        yield from pool.map(time, layers, chunksize=1)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def time_layer(scenario: Scenario, contenders: Sequence[Contender], layer: int) -> list[LayerTimes]:
    """Return the times of one layer in all microbatches, by contender."""
    return [
        clock.times(replicas) for clock, replicas in plan_and_clock(scenario, contenders, layer)
    ]


def plan_and_clock(
    scenario: Scenario, contenders: Sequence[Contender], layer: int
) -> Iterator[tuple[LayerClock, Replicas]]:
    """Yield the clock and the replicas of one layer in all microbatches, by contender."""
    job, interval = scenario.job, scenario.interval
    drawn_SE = scenario.workload.expert_loads(
        layer, np.arange(interval + scenario.microbatches), scenario.rows
    )
    past_E, loads_SE = drawn_SE[:interval].sum(axis=0), drawn_SE[interval:]
    # `ideal` is forced balance: every expert gets the same load.
    even_SE = share_out(np.ones(loads_SE.shape), scenario.rows, scenario.model.top_k)
    for contender in contenders:
        topology = replace(scenario.topology, slots=_slots(scenario, contender))
        config, loads = _config(scenario, contender), loads_SE
        if contender.policy == IDEAL:
            loads = even_SE
        replicas = plan_layer(loads, topology, config, interval=interval, past_E=past_E)
        clock = LayerClock(
            costs=scenario.costs,
            topology=topology,
            runtime=contender.checked_runtime(),
            tokens=job.tokens,
            context=job.context,
            recompute=job.recompute,
            training=job.trains,
            speeds=scenario.cluster.speeds_of(scenario.ranks),
            even=contender.policy == IDEAL,
            plane=scenario.plane,
        )
        yield clock, replicas


def _slots(scenario: Scenario, contender: Contender) -> int:
    return scenario.slots if contender.slots is None else contender.slots


def _config(scenario: Scenario, contender: Contender) -> BalanceConfig:
    tolerance = contender.tolerance
    if contender.policy == "ultraep":
        config = scenario.config
        return config if tolerance is None else replace(config, tolerance=tolerance)
    # The scenario's tolerance is for ultraep: other policies interpret it differently.
    policy = NONE if contender.policy == IDEAL else contender.policy
    return BalanceConfig(policy=policy, tolerance=tolerance or 0.0)


def _result(scenario: Scenario, contender: Contender, layers: Sequence[LayerTimes]) -> Result:
    job, runtime, slots = scenario.job, contender.checked_runtime(), _slots(scenario, contender)
    # A device holds its spare slots once for all layers, unless replicas stay in every layer.
    held = {"nothing": 0, "placed": -(-scenario.model.moe_layers // job.pipeline)}
    held_slots = slots * held.get(runtime.relay, 1)
    busiest_S = np.max([times.rank_rows for times in layers], axis=0)
    totals = [scenario.memory(held_slots, float(rows)).total for rows in busiest_S]
    by_microbatch = np.sum([t.forward_seconds + t.backward_seconds for t in layers], axis=0)
    throughput, tokens = job.throughput(scenario.costs, scenario.ranks, layers)
    imbalance_HS = np.array([times.imbalance for times in layers])
    by_layer = [times.forward | times.backward for times in layers]
    return Result(
        label=contender.label,
        policy=contender.policy,
        priced_as=runtime.name,
        slots=slots,
        throughput=throughput,
        unit=job.throughput_unit,
        tokens_per_second=tokens,
        imbalance=float(imbalance_HS.mean()),
        worst_imbalance=float(imbalance_HS.max()),
        copies=float(np.mean([times.replicas for times in layers])),
        seconds=float(by_microbatch.mean()),
        stages={
            name: float(sum(seconds[name].mean() for seconds in by_layer))
            for name in SIMULATED
            if name in by_layer[0]
        },
        memory=scenario.memory(held_slots, float(busiest_S.max())),
        out_of_memory=float(np.mean(np.array(totals) > scenario.cluster.memory)),
        by_microbatch=by_microbatch,
        imbalance_by_layer=np.array([times.imbalance.mean() for times in layers]),
    )


# -- timeline ------------------------------------------------------------------------------------

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
