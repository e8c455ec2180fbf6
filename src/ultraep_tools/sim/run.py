"""simulate: the throughput of every policy in a scenario.

Shapes: S microbatches, H layers with experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError
from ultraep.trace.schema import STAGES
from ultraep_tools.sim.layer import LayerClock, LayerTimes
from ultraep_tools.sim.planning import plan_layer
from ultraep_tools.sim.runtime import IDEAL, NONE, Contender, runtime_of
from ultraep_tools.sim.scenario import Memory, Scenario
from ultraep_tools.sim.workload import share_out

Report = Callable[[int, int], None]  # called with layers done, all layers


def no_report(done: int, total: int) -> None:
    """Ignore the progress."""


@dataclass(frozen=True)
class Result:
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
    imbalance_by_layer: list[float]


def simulate(
    scenario: Scenario,
    contenders: Sequence[Contender | str],
    *,
    report: Report = no_report,
) -> list[Result]:
    """Simulate all contenders on the same loads and return their results in the same order."""
    chosen = [c if isinstance(c, Contender) else Contender(c) for c in contenders]
    if not chosen:
        raise ConfigError("nothing to simulate: name at least one policy")
    layers = scenario.model.expert_layers
    times: list[list[LayerTimes]] = []
    for layer in layers:
        times.append(time_layer(scenario, chosen, layer))
        report(len(times), len(layers))
    return [
        _result(scenario, contender, own)
        for contender, own in zip(chosen, zip(*times, strict=True), strict=True)
    ]


def time_layer(scenario: Scenario, contenders: Sequence[Contender], layer: int) -> list[LayerTimes]:
    """Return the times of one layer in all microbatches, by contender."""
    job, interval = scenario.job, scenario.interval
    drawn_SE = scenario.workload.expert_loads(
        layer, np.arange(interval + scenario.microbatches), scenario.rows
    )
    past_E, loads_SE = drawn_SE[:interval].sum(axis=0), drawn_SE[interval:]
    # `ideal` is forced balance: every expert gets the same load.
    even_SE = share_out(np.ones(loads_SE.shape), scenario.rows, scenario.model.top_k)
    times = []
    for contender in contenders:
        topology = replace(scenario.topology, slots=_slots(scenario, contender))
        config, loads = _config(scenario, contender), loads_SE
        if contender.policy == IDEAL:
            loads = even_SE
        replicas = plan_layer(loads, topology, config, interval=interval, past_E=past_E)
        clock = LayerClock(
            costs=scenario.costs,
            topology=topology,
            runtime=contender.runtime or runtime_of(contender.policy),
            tokens=job.tokens,
            context=job.context,
            recompute=job.recompute,
            training=job.trains,
        )
        times.append(clock.times(replicas))
    return times


def _slots(scenario: Scenario, contender: Contender) -> int:
    return scenario.slots if contender.slots is None else contender.slots


def _config(scenario: Scenario, contender: Contender) -> BalanceConfig:
    if contender.policy == "ultraep":
        return scenario.config
    # The scenario's tolerance is for ultraep: other policies interpret it differently.
    return BalanceConfig(policy=NONE if contender.policy == IDEAL else contender.policy)


def _result(scenario: Scenario, contender: Contender, layers: Sequence[LayerTimes]) -> Result:
    job, slots = scenario.job, _slots(scenario, contender)
    runtime = contender.runtime or runtime_of(contender.policy)
    # A device holds its spare slots once for all layers, unless replicas stay in every layer.
    held = {"nothing": 0, "placed": -(-scenario.model.moe_layers // job.pipeline)}
    held_slots = slots * held.get(runtime.relay, 1)
    busiest_S = np.max([times.rank_rows for times in layers], axis=0)
    totals = [scenario.memory(held_slots, float(rows)).total for rows in busiest_S]
    seconds_S = np.sum([t.forward_seconds + t.backward_seconds for t in layers], axis=0)
    throughput, tokens = job.throughput(scenario.costs, scenario.ranks, layers)
    imbalance_HS = np.array([times.imbalance for times in layers])
    by_layer = [times.forward | times.backward for times in layers]
    return Result(
        policy=contender.policy,
        priced_as=runtime.name,
        slots=slots,
        throughput=throughput,
        unit=job.throughput_unit,
        tokens_per_second=tokens,
        imbalance=float(imbalance_HS.mean()),
        worst_imbalance=float(imbalance_HS.max()),
        copies=float(np.mean([times.replicas for times in layers])),
        seconds=float(seconds_S.mean()),
        stages={
            name: float(sum(seconds[name].mean() for seconds in by_layer))
            for name in ("attention", *STAGES, "attention back")
            if name in by_layer[0]
        },
        memory=scenario.memory(held_slots, float(busiest_S.max())),
        out_of_memory=float(np.mean(np.array(totals) > scenario.cluster.memory)),
        imbalance_by_layer=[float(times.imbalance.mean()) for times in layers],
    )
