"""Scenario: what is simulated. Contender: a policy that takes part in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ultraep.config import BalanceConfig, Rates
from ultraep.errors import ConfigError
from ultraep.loads import MAX_TOTAL
from ultraep.tools.sim.cluster import Cluster
from ultraep.tools.sim.costs import Costs, Reached, measured_rates, rates_by
from ultraep.tools.sim.memory import weight_bytes
from ultraep.tools.sim.model import Model
from ultraep.tools.sim.presets import check_least
from ultraep.tools.sim.runtime import Runtime, price, runtime_of
from ultraep.tools.sim.serving import Serving
from ultraep.tools.sim.training import Training, part_of_layer
from ultraep.tools.sim.workload import Workload
from ultraep.topology import Topology

MOST_MICROBATCHES = 1 << 20  # that are simulated, each of every layer


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is simulated.

    ranks: of the expert-parallel group.
    interval: microbatches for which policies that place by the past keep their places.
    objective: of ultraep's plans: "time" or "balance".   prices: the rates of those by time; None:
        those that cluster and model have.
    """

    cluster: Cluster
    model: Model
    workload: Workload
    job: Training | Serving
    ranks: int
    slots: int = 1
    tolerance: float = 0.01
    min_tokens_per_replica: int = 1
    interval: int = 100
    domain: int | None = None
    rates: Reached = field(default_factory=measured_rates)
    objective: str = "balance"
    prices: Rates | None = None

    def __post_init__(self) -> None:
        check_least(self, "ranks", 1)
        check_least(self, "interval microbatches", 1, MOST_MICROBATCHES)
        check_least(self, "rows", 1, MAX_TOTAL)
        model, cluster = self.model, self.cluster
        if model.experts % self.ranks:
            raise ConfigError(
                f"{model.experts} experts of {model.name} do not divide evenly "
                f"over {self.ranks} ranks"
            )
        if self.devices > cluster.devices:
            raise ConfigError(
                f"{self.devices} devices are needed, cluster {cluster.name} has {cluster.devices}"
            )
        if self.workload.experts != model.experts:
            raise ConfigError(
                f"the workload has {self.workload.experts} experts, "
                f"model {model.name} has {model.experts}"
            )
        self._check_weights()
        part_of_layer(model, self.job.pipeline)
        _ = self.config
        _ = self.topology

    def _check_weights(self) -> None:
        cluster, trains = self.cluster, self.job.trains
        needed = weight_bytes(self.model, self.ranks, self.job)
        if needed > cluster.memory:
            raise ConfigError(
                f"{needed / 1e9:.0f} GB of weights{' and optimizer state' if trains else ''} per "
                f"device do not fit into the {cluster.memory_gb:g} GB of cluster "
                f"{cluster.name}: use more ranks{', a pipeline or groups' if trains else ''}"
            )

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.ranks * self.job.pipeline * self.job.groups

    @property
    def topology(self) -> Topology:
        """Ranks, domains, homes and slots."""
        domain = self.cluster.domain_of(self.ranks) if self.domain is None else self.domain
        return Topology(
            ranks=self.ranks, experts=self.model.experts, slots=self.slots, domain=domain
        )

    @property
    def config(self) -> BalanceConfig:
        """How ultraep plans."""
        rates, job = self.prices, self.job
        if rates is None and self.objective == "time":
            rates = rates_by(self.costs, ranks=self.ranks, tokens=job.tokens, training=job.trains)
        return BalanceConfig(
            tolerance=self.tolerance,
            min_tokens_per_replica=self.min_tokens_per_replica,
            objective=self.objective,
            rates=rates,
        )

    @property
    def costs(self) -> Costs:
        """Seconds of single things."""
        return Costs(self.cluster, self.model, self.rates)

    @property
    def microbatches(self) -> int:
        """Microbatches, or iterations, of a layer."""
        return self.job.simulated

    @property
    def rows(self) -> int:
        """Rows of a microbatch over all ranks."""
        return self.ranks * self.job.tokens * self.model.top_k


@dataclass(frozen=True)
class Contender:
    """A policy, as it takes part: by name, with settings of its own where they differ.

    runtime: what carrying out its plans costs, if not what is known of this policy.
    """

    policy: str
    label: str
    slots: int | None = None
    tolerance: float | None = None
    runtime: Runtime | None = None

    @staticmethod
    def of(name: str) -> Contender:
        """A policy with the settings of the scenario: its name, or NAME=RUNTIME.

        The second is for policies without known costs: "echo=ultraep" plans as `echo` does, and
        its plans cost as much as plans of `ultraep`.
        """
        policy, equals, priced_as = name.partition("=")
        if equals and not priced_as:
            raise ConfigError(f"NAME=OTHER needs two policies, got {name!r}")
        runtime = runtime_of(priced_as) if priced_as else None
        contender = Contender(policy, name, runtime=runtime)
        _ = contender.carried_out
        return contender

    def slots_in(self, scenario: Scenario) -> int:
        """Spare slots of every rank."""
        return scenario.slots if self.slots is None else self.slots

    @property
    def carried_out(self) -> Runtime:
        """What carrying out its plans costs; `ConfigError` where that is not known."""
        return price(self.policy, self.runtime)
