"""advise: the best configuration for a job, and what balancing gains in it.

A configuration is a size of the expert-parallel group. If the group spans several fast-link
domains, groups of one domain each are tried too. Every configuration runs on the same loads without
balancing, with 1, 2, ... spare slots, and with forced balance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ultraep.errors import ConfigError
from ultraep_tools.sim.cluster import GIGA
from ultraep_tools.sim.run import Report, Result, no_report, simulate
from ultraep_tools.sim.runtime import IDEAL, NONE, Contender
from ultraep_tools.sim.scenario import Scenario
from ultraep_tools.sim.training import Training

OURS = "ultraep"
MAX_SLOTS = 4
NEAR = 0.005  # share of the best throughput that fewer slots may cost
SMALL_GAIN = 1.01  # least gain that is worth a spare slot
NOTABLE_IMBALANCE = 1.02


@dataclass(frozen=True)
class Configuration:
    """A size of the group: results without balancing, with forced balance, and of policies.

    tried: one result for every policy and number of slots.
    """

    scenario: Scenario
    none: Result
    ideal: Result
    tried: tuple[Result, ...]

    @property
    def balanced(self) -> tuple[Result, ...]:
        """The results of ultraep."""
        return tuple(result for result in self.tried if result.policy == OURS)

    @property
    def best_balanced(self) -> Result | None:
        return self.best_of(OURS)

    def best_of(self, policy: str) -> Result | None:
        """Return the fewest slots near the best; None if no device has memory for a slot."""
        results = [result for result in self.tried if result.policy == policy]
        limit = self.none.out_of_memory
        usable = [result for result in results if result.out_of_memory <= limit]
        if not usable:
            return None
        enough = (1 - NEAR) * max(result.throughput for result in usable)
        return next(result for result in usable if result.throughput >= enough)

    @property
    def avoids_out_of_memory(self) -> bool:
        """Whether the job fits only with balancing."""
        best = self.best_balanced
        return best is not None and not best.out_of_memory and self.none.out_of_memory > 0

    @property
    def advised(self) -> Result:
        """The best balanced result if balancing pays, otherwise the one without balancing."""
        best = self.best_balanced
        pays = best and (self.gain(best) >= SMALL_GAIN or self.avoids_out_of_memory)
        return best if best and pays else self.none

    def gain(self, result: Result) -> float:
        """Return the throughput over no balancing."""
        return result.throughput / self.none.throughput

    def share(self, result: Result) -> float:
        """Return the throughput over forced balance."""
        return result.throughput / self.ideal.throughput

    def record(self, result: Result) -> dict[str, Any]:
        """Return the numbers of a result for JSON."""
        values = asdict(result)
        memory = values.pop("memory") | {"total": result.memory.total}
        return values | {
            "ep": self.scenario.ranks,
            "share_of_ideal": self.share(result),
            "gain_over_none": self.gain(result),
            "memory_gb": {name: size / GIGA for name, size in memory.items()},
        }


@dataclass(frozen=True)
class Advice:
    """The requested configuration, and groups of one fast-link domain each.

    inside: None in one domain, or if `obstacle` says why such groups are not possible.
    """

    requested: Configuration
    inside: Configuration | None
    obstacle: str

    @property
    def configurations(self) -> tuple[Configuration, ...]:
        return (self.requested,) if self.inside is None else (self.inside, self.requested)

    @property
    def best(self) -> Configuration:
        """The configuration that fits into memory and has the most tokens per second."""
        return max(
            self.configurations,
            key=lambda c: (not c.advised.out_of_memory, c.advised.tokens_per_second),
        )

    @property
    def reasons(self) -> tuple[str, ...]:
        """The facts behind the advice, the most important first."""
        notes = [f"groups of one fast-link domain: {self.obstacle}"] if self.obstacle else []
        return (*_reasons(self.best), *notes)


def advise(
    scenario: Scenario,
    others: Sequence[str] = (),
    *,
    report: Report = no_report,
) -> Advice:
    """Try numbers of slots and sizes of the group. The slots of the scenario are ignored.

    others: policies to compare with ultraep.
    """
    inside, obstacle = _inside_domains(scenario)
    chosen = [scenario] if inside is None else [scenario, inside]

    def compare(number: int) -> Configuration:
        def part(done: int, total: int) -> None:
            report(number * total + done, len(chosen) * total)

        return _compare(chosen[number], others, part)

    requested = compare(0)
    return Advice(requested, None if inside is None else compare(1), obstacle)


def _compare(scenario: Scenario, others: Sequence[str], report: Report) -> Configuration:
    slots = range(1, max_slots(scenario) + 1)
    tried = [Contender(policy, slots=count) for policy in (OURS, *others) for count in slots]
    references = [Contender(NONE, slots=0), Contender(IDEAL)]
    none, ideal, *results = simulate(scenario, [*references, *tried], report=report)
    return Configuration(scenario, none, ideal, tuple(results))


def _inside_domains(scenario: Scenario) -> tuple[Scenario | None, str]:
    """Return the scenario with groups of one domain each, or why there is none."""
    topology, job = scenario.topology, scenario.job
    if not 1 < topology.domain_size < scenario.ranks:
        return None, ""
    if isinstance(job, Training):  # the same devices
        job = replace(job, groups=job.groups * topology.num_domains)
    try:
        return replace(scenario, ranks=topology.domain_size, domain=None, job=job), ""
    except ConfigError as error:
        return None, str(error)


def max_slots(scenario: Scenario) -> int:
    """Return the most slots worth trying: replicas need another rank, and memory must fit."""
    if scenario.topology.domain_size == 1:
        return 0
    rows = scenario.rows / scenario.ranks
    counts = range(1, slots_of_one_rank(scenario) + 1)
    return sum(scenario.memory(slots, rows).total <= scenario.cluster.memory for slots in counts)


def slots_of_one_rank(scenario: Scenario) -> int:
    """Return the most slots that a rank could use if it had the memory."""
    return min(MAX_SLOTS, scenario.model.experts // scenario.ranks)


def _reasons(best: Configuration) -> Iterator[str]:
    scenario, none, balanced = best.scenario, best.none, best.best_balanced
    units, topology = scenario.job.units, scenario.topology
    for name, result in (("without", none), ("with", balanced)):
        if result is not None and result.out_of_memory:
            yield f"out of memory {name} balancing: {result.out_of_memory:.0%} of the {units}"
    if topology.domain_size == 1:
        yield "one rank per fast-link domain: replicas have nowhere to go"
    elif balanced is None:
        needed = scenario.memory(1, scenario.rows / scenario.ranks).total / 1e9
        limit = scenario.cluster.memory_gb
        yield f"no spare slot fits: a device would need {needed:,.1f} GB of {limit:g} GB"
    elif max_slots(scenario) < slots_of_one_rank(scenario):
        yield f"memory holds at most {max_slots(scenario)} spare slots"
    if balanced is None:
        return
    ratios = f"{none.imbalance:.2f} without balancing, {balanced.imbalance:.2f} with it"
    yield f"imbalance of EP{scenario.ranks}: {ratios}"
    if balanced.slots > 1:
        first = best.balanced[0].imbalance
        change = f"{first:.2f} with 1 slot, {balanced.imbalance:.2f} with {balanced.slots}"
        yield f"more slots help: imbalance {change}"
    if best.advised is none and none.imbalance > NOTABLE_IMBALANCE:
        tokens = f"{scenario.job.tokens:,} tokens per rank"
        yield f"with {tokens}, replicas would cost about as much time as they save"
    if topology.num_domains > 1 and balanced.imbalance > NOTABLE_IMBALANCE:
        yield (
            f"replicas stay in domains of {topology.domain_size} ranks; `ultraep trace place` "
            "makes domains more equal"
        )
