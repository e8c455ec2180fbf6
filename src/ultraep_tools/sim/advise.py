"""advise: the best configuration for a job, and what balancing gains in it.

A configuration is a size of the expert-parallel group with the data plane that a balancer would
take. If the group spans several fast-link domains, groups of one domain each are tried too. Every
configuration runs on the same loads without balancing, with 1, 2, ... spare slots, and with forced
balance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ultraep.errors import ConfigError
from ultraep.topology import Topology
from ultraep_tools.sim.run import Comparison, Report, Result, simulate
from ultraep_tools.sim.runtime import NONE, Contender
from ultraep_tools.sim.scenario import Scenario
from ultraep_tools.sim.serving import Serving
from ultraep_tools.sim.training import Training
from ultraep_tools.sim.workload import Skew, fit_skew, mean_imbalance

MAX_SLOTS = 4
UNBALANCED = Contender(NONE, NONE, slots=0)
NEAR = 0.005  # share of the best throughput that fewer slots may cost
SMALL_GAIN = 1.01  # least gain that is worth a spare slot
SEEDS = 3  # runs of drawn loads
NOTABLE_IMBALANCE = 1.02


class Configuration(Comparison):
    """A size of the group, without balancing and with 1, 2, ... spare slots."""

    @property
    def balanced(self) -> tuple[Result, ...]:
        return tuple(result for result in self.results if result.slots)

    @property
    def best_balanced(self) -> Result | None:
        """The fewest slots near the best; None if no device has memory for a slot."""
        limit = self.none.out_of_memory
        usable = [result for result in self.balanced if result.out_of_memory <= limit]
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


@dataclass(frozen=True)
class Advice:
    """The requested configuration, and groups of one fast-link domain each.

    inside: None in one domain, or if `obstacle` says why such groups are not possible.
    gains: of the requested configuration over no balancing, one per seed.
    """

    requested: Configuration
    inside: Configuration | None
    obstacle: str
    gains: tuple[float, ...]

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


def advise(scenario: Scenario, *, processes: int = 1, report: Report | None = None) -> Advice:
    """Try numbers of slots and sizes of the group. The slots of the scenario are ignored.

    report: called with the number of simulated layers and of all layers.
    """
    inside, obstacle = _inside_domains(scenario)
    seeds = SEEDS - 1 if isinstance(scenario.workload, Skew) else 0
    progress = _Progress(report, 1 + (inside is not None) + seeds)

    def compare(chosen: Scenario) -> Configuration:
        slots = [_with_slots(count) for count in range(1, max_slots(chosen) + 1)]
        part = progress.next_part()
        return Configuration.of(chosen, [UNBALANCED, *slots], processes=processes, report=part)

    requested = compare(scenario)
    within = None if inside is None else compare(inside)
    best, gains = requested.best_balanced, []
    if best is not None:
        gains.append(requested.gain(best))
        for other in _other_seeds(scenario):
            pair = [UNBALANCED, _with_slots(best.slots)]
            none, own = simulate(other, pair, processes=processes, report=progress.next_part())
            gains.append(own.throughput / none.throughput)
    return Advice(requested, within, obstacle, tuple(gains))


class _Progress:
    """Join the progress of several simulations of the same layers."""

    def __init__(self, report: Report | None, parts: int) -> None:
        self.report, self.parts, self.begun = report, parts, 0

    def next_part(self) -> Report:
        before = self.begun
        self.begun += 1

        def layers(done: int, total: int) -> None:
            if self.report:
                self.report(before * total + done, self.parts * total)

        return layers


def _with_slots(count: int) -> Contender:
    return Contender("ultraep", f"{count}", slots=count)


def _inside_domains(scenario: Scenario) -> tuple[Scenario | None, str]:
    """Return the scenario with groups of one domain each, or why there is none."""
    topology, job = scenario.topology, scenario.job
    if not 1 < topology.domain_size < scenario.ranks:
        return None, ""
    if isinstance(job, Training):  # the same devices
        job = replace(job, groups=job.groups * topology.num_domains)
    try:
        ranks = topology.domain_size
        return replace(scenario, ranks=ranks, domain=None, data_plane="auto", job=job), ""
    except ConfigError as error:
        return None, str(error)


def _other_seeds(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the scenario with loads of other seeds. A recorded trace has none."""
    skew, model, job = scenario.workload, scenario.model, scenario.job
    if not isinstance(skew, Skew):
        return
    topology, layers = Topology(ranks=scenario.ranks, experts=model.experts), model.expert_layers
    imbalance = mean_imbalance(skew, topology, layers)
    for number in range(1, SEEDS):
        seed, drawn_job = skew.seed + number, job
        if isinstance(job, Serving):  # other arrivals, too
            drawn_job = replace(job, seed=job.seed + number)
        try:
            drawn = fit_skew(imbalance, topology, model.top_k, layers, noise=skew.noise, seed=seed)
        except ConfigError:  # this seed cannot quite reach the imbalance
            drawn = replace(skew, seed=seed)
        yield replace(scenario, workload=drawn, job=drawn_job)


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
    if best.advised is none and none.imbalance > NOTABLE_IMBALANCE:
        tokens = f"{scenario.job.tokens:,} tokens per rank"
        yield f"with {tokens}, replicas would cost about as much time as they save"
    if topology.num_domains > 1 and balanced.imbalance > NOTABLE_IMBALANCE:
        yield (
            f"replicas stay in domains of {topology.domain_size} ranks; `ultraep trace place` "
            "makes domains more equal"
        )
