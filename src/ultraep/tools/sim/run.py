"""simulate: a cluster, a model, a workload, a job -> what every policy would bring.

Layers are independent of each other until the job puts them together, so they are dealt out
to processes; a layer's figures do not depend on who works them out.

Shapes: S microbatches, H layers with experts, P pipeline parts.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError
from ultraep.tools.sim.layer import LayerClock, LayerTimes
from ultraep.tools.sim.memory import Memory, memory_of
from ultraep.tools.sim.planning import CopySets, plan_layer
from ultraep.tools.sim.runtime import IDEAL, NONE
from ultraep.tools.sim.scenario import Contender, Scenario
from ultraep.tools.sim.serving import Serving, make_iteration, rate_at_limit
from ultraep.tools.sim.training import (
    Training,
    optimizer_seconds,
    part_of_layer,
    pipeline_seconds,
    plain_seconds,
)
from ultraep.tools.sim.workload import share_out
from ultraep.trace.schema import SIMULATED

FloatArray = NDArray[np.float64]
Report = Callable[[int, int], None]  # layers done, layers in all


@dataclass(frozen=True)
class Result:
    """What a policy brought."""

    label: str
    policy: str
    priced_as: str  # the policy whose costs these are
    slots: int
    throughput: float
    unit: str
    tokens_per_second: float  # of one device
    imbalance: float
    worst_imbalance: float
    copies: float
    seconds: float  # of a microbatch through all layers, forward and backward
    stages: dict[str, float]  # seconds of a microbatch, by stage, over all layers
    memory: Memory
    out_of_memory: float  # share of the microbatches in which a device would not have enough
    by_microbatch: FloatArray  # [S] seconds through all layers
    imbalance_by_layer: FloatArray  # [H]


def simulate(
    scenario: Scenario,
    contenders: Sequence[Contender | str],
    *,
    processes: int = 1,
    report: Report | None = None,
) -> list[Result]:
    """Every contender on the same loads, in the order given."""
    wanted = [c if isinstance(c, Contender) else Contender.of(c) for c in contenders]
    if not wanted:
        raise ConfigError("nothing to simulate: name at least one policy")
    for contender in wanted:
        _ = contender.carried_out  # what cannot be priced is refused before anything is planned
    if processes < 1:
        raise ConfigError(f"processes must be at least 1, got {processes}")
    layers = range(scenario.model.dense_layers, scenario.model.layers)
    times: list[list[LayerTimes]] = []
    for of_layer in _spread(scenario, wanted, list(layers), processes):
        times.append(of_layer)
        if report:
            report(len(times), len(layers))
    by_contender = [list(group) for group in zip(*times, strict=True)]
    return [
        put_together(scenario, contender, own)
        for contender, own in zip(wanted, by_contender, strict=True)
    ]


def _spread(
    scenario: Scenario, wanted: list[Contender], layers: list[int], processes: int
) -> Iterator[list[LayerTimes]]:
    if processes == 1 or len(layers) == 1:
        yield from (time_layer(scenario, wanted, layer) for layer in layers)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(processes, len(layers)), mp_context=context)
    try:
        yield from pool.map(partial(time_layer, scenario, wanted), layers, chunksize=1)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def time_layer(scenario: Scenario, wanted: list[Contender], layer: int) -> list[LayerTimes]:
    """One layer of all microbatches, under every contender."""
    return [clock.times(copies) for clock, copies in plan_and_clock(scenario, wanted, layer)]


def plan_and_clock(
    scenario: Scenario, wanted: Sequence[Contender], layer: int
) -> Iterator[tuple[LayerClock, CopySets]]:
    """The copies of one layer in all microbatches, and the clock for them, by contender."""
    drawn = np.arange(scenario.microbatches + scenario.interval)
    loads_SE = scenario.workload.expert_loads(layer, drawn, scenario.rows)
    past_E, now_SE = loads_SE[: scenario.interval].sum(axis=0), loads_SE[scenario.interval :]
    for contender in wanted:
        yield _plan_and_clock(scenario, contender, now_SE, past_E)


def _plan_and_clock(
    scenario: Scenario, contender: Contender, loads_SE: IntArray, past_E: IntArray
) -> tuple[LayerClock, CopySets]:
    topology = replace(scenario.topology, slots=contender.slots_in(scenario))
    config, job = _config(scenario, contender), scenario.job
    if contender.policy == IDEAL:  # what frameworks call forced balance: every expert gets the same
        loads_SE = share_out(np.ones(loads_SE.shape), scenario.rows, scenario.model.top_k)
    copies = plan_layer(loads_SE, topology, config, interval=scenario.interval, past_E=past_E)
    clock = LayerClock(
        costs=scenario.costs,
        topology=topology,
        runtime=contender.carried_out,
        tokens=job.tokens,
        context=job.context,
        recompute=job.recompute,
        training=job.trains,
    )
    return clock, copies


def _config(scenario: Scenario, contender: Contender) -> BalanceConfig:
    tolerance = contender.tolerance
    if contender.policy == "ultraep":
        config = scenario.config
        return config if tolerance is None else replace(config, tolerance=tolerance)
    policy = NONE if contender.policy == IDEAL else contender.policy
    return BalanceConfig(policy=policy, tolerance=tolerance or 0.0)  # theirs has its own meaning


# -- putting layers together ---------------------------------------------------------------------


def put_together(scenario: Scenario, contender: Contender, layers: list[LayerTimes]) -> Result:
    """What the job makes of the times of all layers."""
    slots = contender.slots_in(scenario)
    held = slots * _layers_of_slot(scenario, contender)
    fullest_S = np.max([times.rank_rows for times in layers], axis=0)
    peaks = [
        memory_of(scenario.model, scenario.ranks, held, scenario.job, float(rows))
        for rows in (fullest_S.max(), *fullest_S)
    ]
    short = np.mean([peak.total > scenario.cluster.memory for peak in peaks[1:]])
    by_microbatch = np.sum([t.forward_seconds + t.backward_seconds for t in layers], axis=0)
    throughput, unit, tokens = _throughput(scenario, layers)
    return Result(
        label=contender.label,
        policy=contender.policy,
        priced_as=contender.carried_out.name,
        slots=slots,
        throughput=throughput,
        unit=unit,
        tokens_per_second=tokens,
        imbalance=float(np.mean([times.imbalance for times in layers])),
        worst_imbalance=float(np.max([times.imbalance for times in layers])),
        copies=float(np.mean([times.copies for times in layers])),
        seconds=float(by_microbatch.mean()),
        stages=_stages(layers),
        memory=peaks[0],
        out_of_memory=float(short),
        by_microbatch=by_microbatch,
        imbalance_by_layer=np.array([times.imbalance.mean() for times in layers]),
    )


def _layers_of_slot(scenario: Scenario, contender: Contender) -> int:
    """How often a device holds a spare slot: once for all layers, unless its copies stay."""
    relay = contender.carried_out.relay
    if relay == "nothing":
        return 0
    return -(-scenario.model.moe_layers // scenario.job.pipeline) if relay == "placed" else 1


def _stages(layers: list[LayerTimes]) -> dict[str, float]:
    by_layer = [times.forward | times.backward for times in layers]
    return {
        name: float(sum(stages[name].mean() for stages in by_layer))
        for name in SIMULATED
        if name in by_layer[0]
    }


def _throughput(scenario: Scenario, layers: list[LayerTimes]) -> tuple[float, str, float]:
    job = scenario.job
    if isinstance(job, Training):
        tokens = _training_tokens(scenario, job, layers)
        operations = scenario.model.training_operations(min(job.sequence, job.tokens))
        return tokens * operations / 1e12, "TFLOP/s per device", tokens
    rate = _serving_rate(scenario, job, layers)
    return rate, "requests/s", rate * job.requests.mean_tokens / scenario.ranks


def _training_tokens(scenario: Scenario, training: Training, layers: list[LayerTimes]) -> float:
    """Tokens per second and device."""
    costs = scenario.costs
    parts = part_of_layer(scenario.model, training.pipeline)[scenario.model.dense_layers :]
    plain_forward, plain_backward = plain_seconds(costs, training)
    forward_SP = np.tile(plain_forward, (scenario.microbatches, 1))
    backward_SP = np.tile(plain_backward, (scenario.microbatches, 1))
    for part, times in zip(parts, layers, strict=True):
        forward_SP[:, part] += times.forward_seconds
        backward_SP[:, part] += times.backward_seconds
    shape = (training.steps, training.microbatches, training.groups, training.pipeline)
    forward, backward = forward_SP.reshape(shape), backward_SP.reshape(shape)
    seconds = training.steps * optimizer_seconds(costs, training, scenario.ranks)
    for step in range(training.steps):
        seconds += max(
            pipeline_seconds(forward[step, :, group], backward[step, :, group])
            for group in range(training.groups)
        )
    return training.steps * training.microbatches * training.tokens / training.pipeline / seconds


def _serving_rate(scenario: Scenario, serving: Serving, layers: list[LayerTimes]) -> float:
    experts_S = np.sum(
        [times.forward_seconds - times.forward["attention"] for times in layers], axis=0
    )
    fixed = ("loads", "plan", "replicate", "reroute")
    fixed_S = np.sum([t.forward[name] for t in layers for name in fixed], axis=0)
    iteration = make_iteration(scenario.costs, serving, experts_S - fixed_S, float(fixed_S.mean()))
    return rate_at_limit(iteration, serving, scenario.ranks)
