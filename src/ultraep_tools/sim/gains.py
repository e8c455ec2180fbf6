"""Gains: throughput over no balancing, its range, and the tokens from which it is reached.

The range covers microbatches and other seeds. The break-even comes from runs with few and many
tokens per rank.

Across domains: the time of every data plane, and the imbalance that stays between domains. Replicas
stay in the fast-link domain of their home, so loads of domains differ. Placing experts by history
(`ultraep trace place`) makes them more equal. The forecast places by the first half of recorded
loads and looks at the second half.

Shapes: S microbatches, H recorded layers, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ultraep.arrays import IntArray
from ultraep.errors import ConfigError
from ultraep.topology import Topology
from ultraep_tools.placement import busiest_domain, place_experts
from ultraep_tools.sim.planes import PLANES, obstacle, served_shares
from ultraep_tools.sim.run import Result, simulate, time_layer
from ultraep_tools.sim.runtime import Contender
from ultraep_tools.sim.scenario import Scenario
from ultraep_tools.sim.serving import Serving
from ultraep_tools.sim.training import Training
from ultraep_tools.sim.workload import Recorded, Skew, fit_skew, mean_imbalance

Curve = tuple[tuple[int, float], ...]  # tokens per rank and microbatch, gain

UNBALANCED = Contender("none", "none", slots=0)
SEEDS = 3  # runs of a drawn workload
PROBE_TOKENS = tuple(2**power for power in range(6, 15))
PROBE_MICROBATCHES = 8


@dataclass(frozen=True)
class Gain:
    """Throughput over no balancing. The range covers microbatches and seeds."""

    overall: float
    low: float
    high: float
    microbatches: tuple[float, float]  # 10th and 90th percentile
    draws: tuple[float, ...]  # one per seed; a recorded trace has one


@dataclass(frozen=True)
class BreakEven:
    """Tokens per rank and microbatch from which a gain is reached."""

    gain: float
    tokens: float | None  # None: the most tokens tried do not reach the gain
    always: bool  # `tokens` are the fewest that were tried


def gain_of(scenario: Scenario, none: Result, balanced: Result, draws: tuple[float, ...]) -> Gain:
    """Return the gain and its range over microbatches and seeds.

    The gains of microbatches are ratios of their seconds, scaled so that their mean is the overall
    gain, which pipelines and queues make a little smaller.
    """
    overall = balanced.throughput / none.throughput
    plain = scenario.job.plain_seconds(scenario.costs, scenario.ranks)
    none_S, own_S = none.by_microbatch + plain, balanced.by_microbatch + plain
    gain_S = (none_S / own_S) * (overall * own_S.mean() / none_S.mean())
    low, high = (float(value) for value in np.percentile(gain_S, (10, 90)))
    gains = (overall, low, high, *draws)
    return Gain(overall, min(gains), max(gains), (low, high), draws)


def gains_of_seeds(scenario: Scenario, balanced: Contender, processes: int) -> Iterator[float]:
    """Yield the gain on loads of other seeds. A recorded trace has none."""
    skew, model, job = scenario.workload, scenario.model, scenario.job
    if not isinstance(skew, Skew):
        return
    topology, layers = Topology(ranks=scenario.ranks, experts=model.experts), model.expert_layers
    imbalance = mean_imbalance(skew, topology, layers)
    lengths = {"topic_length": skew.topic_length, "drift_length": skew.drift_length}
    for number in range(1, SEEDS):
        seed, drawn_job = skew.seed + number, job
        if isinstance(job, Serving):  # other arrivals, too
            drawn_job = replace(job, seed=job.seed + number)
        try:
            drawn = fit_skew(
                imbalance, topology, model.top_k, layers, noise=skew.noise, seed=seed, **lengths
            )
        except ConfigError:  # this seed cannot quite reach the imbalance
            drawn = replace(skew, seed=seed)
        other = replace(scenario, workload=drawn, job=drawn_job)
        none, own = simulate(other, [UNBALANCED, balanced], processes=processes)
        yield own.throughput / none.throughput


def gains_by_tokens(scenario: Scenario, balanced: Contender) -> Iterator[tuple[int, float]]:
    """Yield tokens per rank and the gain with them, on few microbatches."""
    for tokens in PROBE_TOKENS:
        job = replace(scenario.job, tokens=tokens)
        if isinstance(job, Training):
            microbatches = max(PROBE_MICROBATCHES // job.groups, 1)
            short: Training | Serving = replace(job, steps=1, microbatches=microbatches)
        else:
            short = replace(job, iterations=PROBE_MICROBATCHES)
        probe = replace(scenario, job=short, interval=1)
        times = [time_layer(probe, [UNBALANCED, balanced], n) for n in scenario.model.expert_layers]
        none, own = (
            sum(float((t.forward_seconds + t.backward_seconds).mean()) for t in layers)
            for layers in zip(*times, strict=True)
        )
        plain = job.plain_seconds(scenario.costs, scenario.ranks)
        yield tokens, (none + plain) / (own + plain)


def break_even(curve: Curve, gain: float) -> BreakEven:
    """Return the tokens from which a gain is reached and kept, between the points of a curve.

    >>> break_even(((64, 0.75), (256, 1.25)), 1.0)
    BreakEven(gain=1.0, tokens=128.0, always=False)
    """
    below = [index for index, (_, reached) in enumerate(curve) if reached < gain]
    if not below:
        return BreakEven(gain, float(curve[0][0]), always=True)
    if below[-1] == len(curve) - 1:
        return BreakEven(gain, None, always=False)
    (few, less), (many, more) = curve[below[-1] : below[-1] + 2]
    part = (gain - less) / (more - less)
    return BreakEven(gain, float(few * (many / few) ** part), always=False)


# -- across domains -------------------------------------------------------------------------------

PROBES = 16  # microbatches whose crossing rows are counted, at most


@dataclass(frozen=True)
class PlaneTime:
    """Times of one data plane. With an obstacle, it is not possible and the numbers are 0."""

    plane: str
    ranks: int  # of the expert-parallel group
    obstacle: str = ""
    crossing: float = 0.0  # rows per token that cross between domains
    unbalanced_seconds: float = 0.0  # of a microbatch through all layers with experts
    seconds: float = 0.0  # the same, balanced
    tokens_per_second: float = 0.0  # per device, balanced


@dataclass(frozen=True)
class BetweenDomains:
    """Rows of the busiest domain over the mean domain, mean over layers and microbatches.

    placed, gain: with experts placed by history, and the throughput over experts in blocks. None
        for synthetic loads, and for a trace of one microbatch.
    """

    domains: int
    busiest: float
    placed: float | None = None
    gain: float | None = None


def num_compared(scenario: Scenario) -> int:
    """Return the number of results of `compare_planes`."""
    return len(PLANES) + (1 < scenario.topology.domain_size < scenario.ranks)


def compare_planes(
    scenario: Scenario, balanced: Contender, processes: int = 1
) -> Iterator[PlaneTime]:
    """Yield every data plane, and `mapped` in groups of one domain each if there are several."""
    for name in PLANES:
        yield _plane_time(scenario, name, balanced, processes)
    topology, job = scenario.topology, scenario.job
    if not 1 < topology.domain_size < scenario.ranks:
        return
    if isinstance(job, Training):  # the same devices
        job = replace(job, groups=job.groups * topology.num_domains)
    try:
        inside = replace(scenario, ranks=topology.domain_size, domain=None, job=job)
    except ConfigError as error:
        yield PlaneTime("mapped", topology.domain_size, str(error))
        return
    yield _plane_time(inside, "mapped", balanced, processes)


def _plane_time(scenario: Scenario, name: str, balanced: Contender, processes: int) -> PlaneTime:
    reason = obstacle(name, scenario.topology)
    if reason:
        return PlaneTime(name, scenario.ranks, reason)
    chosen = replace(scenario, data_plane=name)
    none, own = simulate(chosen, [UNBALANCED, balanced], processes=processes)
    if own.out_of_memory:
        text = f"out of memory in {own.out_of_memory:.0%} of the {scenario.job.units}"
        return PlaneTime(name, scenario.ranks, text)
    return PlaneTime(
        name,
        scenario.ranks,
        crossing=crossing_rows(chosen),
        unbalanced_seconds=none.seconds,
        seconds=own.seconds,
        tokens_per_second=own.tokens_per_second,
    )


def crossing_rows(scenario: Scenario) -> float:
    """Return the rows per token that leave a domain with the plane of the scenario."""
    topology, model = scenario.topology, scenario.model
    domains = topology.num_domains
    if not scenario.plane.crosses_once:
        return model.top_k * (domains - 1) / domains
    served = [
        served_shares(loads_SE, topology, model.top_k).sum(axis=1).mean()
        for loads_SE in _loads_by_layer(scenario)
    ]
    return float(np.mean(served)) * (domains - 1) / domains


def _loads_by_layer(scenario: Scenario) -> Iterator[IntArray]:
    microbatches = np.arange(min(PROBES, scenario.microbatches))
    for layer in scenario.model.expert_layers:
        yield scenario.workload.expert_loads(layer, microbatches, scenario.rows)


def imbalance_between(
    scenario: Scenario, balanced: Contender, processes: int = 1
) -> BetweenDomains | None:
    """Return the imbalance between domains, and what a placement would change."""
    topology, recorded = scenario.topology, scenario.workload
    domains = topology.num_domains
    if domains == 1:
        return None
    if not isinstance(recorded, Recorded) or len(recorded.loads) < 2:
        blocks = topology.experts_by_rank
        busiest = [busiest_domain(loads, blocks, domains) for loads in _loads_by_layer(scenario)]
        return BetweenDomains(domains, float(np.mean(busiest)))
    first_SHE, second_SHE = np.array_split(recorded.loads, 2)
    placed_SHE = np.empty_like(second_SHE)
    for layer in range(second_SHE.shape[1]):
        order = place_experts(first_SHE[:, layer], scenario.ranks, topology.domain_size)
        placed_SHE[:, layer] = second_SHE[:, layer, order]
    throughputs, busiest = [], []
    for loads_SHE in (second_SHE, placed_SHE):
        workload = Recorded(loads_SHE, recorded.top_k)
        (result,) = simulate(replace(scenario, workload=workload), [balanced], processes=processes)
        throughputs.append(result.throughput)
        of_layers = loads_SHE.reshape(-1, loads_SHE.shape[2])
        busiest.append(busiest_domain(of_layers, topology.experts_by_rank, domains))
    recorded_ratio, placed_ratio = busiest
    gain = throughputs[1] / throughputs[0]
    return BetweenDomains(domains, recorded_ratio, placed_ratio, gain)
