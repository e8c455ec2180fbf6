"""Across domains: the time of every data plane, and the imbalance that stays between domains.

Replicas stay in the fast-link domain of their home, so loads of domains differ. Placing experts by
history (`ultraep trace place`) makes them more equal. The forecast places by the first half of
recorded loads and looks at the second half.

Shapes: S microbatches, H recorded layers, E experts, D domains.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ultraep.arrays import IntArray
from ultraep.errors import ConfigError
from ultraep.tools.sim.gains import UNBALANCED
from ultraep.tools.sim.planes import PLANES, obstacle, served_shares
from ultraep.tools.sim.run import simulate
from ultraep.tools.sim.runtime import Contender
from ultraep.tools.sim.scenario import Scenario
from ultraep.tools.sim.training import Training
from ultraep.tools.sim.workload import Recorded
from ultraep.workload.placement import busiest_domain, place_experts

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
