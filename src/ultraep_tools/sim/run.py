"""simulate: the throughput of every policy in a scenario.

Layers are independent of each other until the job combines them, so they are distributed over
processes. The results do not depend on the number of processes.

Shapes: S microbatches, H layers with experts.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np

from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError
from ultraep.trace.schema import SIMULATED
from ultraep_tools.imports import import_in_child
from ultraep_tools.sim.cluster import GIGA
from ultraep_tools.sim.costs import FloatArray
from ultraep_tools.sim.layer import LayerClock, LayerTimes
from ultraep_tools.sim.planning import plan_layer
from ultraep_tools.sim.runtime import IDEAL, NONE, Contender
from ultraep_tools.sim.scenario import Memory, Scenario
from ultraep_tools.sim.workload import share_out

RECORDED = (  # in JSON
    *("policy", "priced_as", "throughput", "unit", "tokens_per_second", "imbalance"),
    *("worst_imbalance", "copies", "slots", "seconds", "stages", "out_of_memory"),
)
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


@dataclass(frozen=True)
class Comparison:
    """Results of contenders, of no balancing and of forced balance, on the same loads."""

    scenario: Scenario
    results: tuple[Result, ...]
    none: Result
    ideal: Result

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        contenders: Sequence[Contender],
        *,
        processes: int = 1,
        report: Report | None = None,
    ) -> Self:
        """Simulate the contenders, no balancing and forced balance."""
        references = (Contender.of(NONE), Contender.of(IDEAL))
        by_label: dict[str, Contender] = {}
        for contender in (*contenders, *references):
            by_label.setdefault(contender.label, contender)
        results = simulate(scenario, list(by_label.values()), processes=processes, report=report)
        result_of = dict(zip(by_label, results, strict=True))
        chosen = tuple(result_of[contender.label] for contender in contenders)
        return cls(scenario, chosen, result_of[NONE], result_of[IDEAL])

    def gain(self, result: Result) -> float:
        """Return the throughput over no balancing."""
        return result.throughput / self.none.throughput

    def share(self, result: Result) -> float:
        """Return the throughput over forced balance."""
        return result.throughput / self.ideal.throughput

    def record(self, result: Result) -> dict[str, Any]:
        """Return the numbers of a result for JSON."""
        memory = asdict(result.memory) | {"total": result.memory.total}
        return {
            **{name: getattr(result, name) for name in RECORDED},
            "share_of_ideal": self.share(result),
            "gain_over_none": self.gain(result),
            "memory_gb": {name: size / GIGA for name, size in memory.items()},
            "imbalance_by_layer": result.imbalance_by_layer.tolist(),
        }


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
    pool = ProcessPoolExecutor(
        min(processes, len(layers)), mp_context=context, initializer=import_in_child
    )
    try:
        yield from pool.map(time, layers, chunksize=1)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


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
            runtime=contender.checked_runtime(),
            tokens=job.tokens,
            context=job.context,
            recompute=job.recompute,
            training=job.trains,
            plane=scenario.plane,
        )
        times.append(clock.times(replicas))
    return times


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
