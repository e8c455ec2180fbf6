"""Scenario: what is simulated. Contender: a policy that takes part in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ultraep.config import BalanceConfig, Rates
from ultraep.errors import ConfigError
from ultraep.loads import MAX_TOTAL
from ultraep.tools.sim.cluster import Cluster
from ultraep.tools.sim.costs import Costs, Reached, measured_rates
from ultraep.tools.sim.memory import weight_bytes
from ultraep.tools.sim.model import Model
from ultraep.tools.sim.rates import rates_by
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
        model = self.model
        if self.ranks < 1:
            raise ConfigError(f"ranks must be at least 1, got {self.ranks}")
        if model.experts % self.ranks:
            raise ConfigError(
                f"{model.experts} experts of {model.name} do not divide evenly "
                f"over {self.ranks} ranks"
            )
        if self.devices > self.cluster.devices:
            raise ConfigError(
                f"{self.devices} devices are needed, cluster {self.cluster.name} has "
                f"{self.cluster.devices}"
            )
        if self.workload.experts != model.experts:
            raise ConfigError(
                f"the workload has {self.workload.experts} experts, "
                f"model {model.name} has {model.experts}"
            )
        if self.interval < 1:
            raise ConfigError(f"interval must be at least 1, got {self.interval}")
        self._check_sizes()
        needed = weight_bytes(model, self.ranks, self.job)
        training = isinstance(self.job, Training)
        if needed > self.cluster.memory:
            raise ConfigError(
                f"{needed / 1e9:.0f} GB of weights{' and optimizer state' if training else ''} per "
                f"device do not fit into the {self.cluster.memory_gb:g} GB of cluster "
                f"{self.cluster.name}: use more ranks{', a pipeline or groups' if training else ''}"
            )
        if isinstance(self.job, Training):
            part_of_layer(model, self.job.pipeline)
        _ = self.config
        _ = self.topology

    def _check_sizes(self) -> None:
        """Refuse what could not be counted or held."""
        for name, value, most in (
            ("microbatches of all steps and groups", self.microbatches, MOST_MICROBATCHES),
            ("interval", self.interval, MOST_MICROBATCHES),
            ("rows of a microbatch: ranks, tokens and top_k multiplied", self.rows, MAX_TOTAL),
        ):
            if value > most:
                raise ConfigError(f"{name}: at most {most}, got {value}")

    @property
    def devices(self) -> int:
        """Devices in all."""
        job = self.job
        many = job.pipeline * job.groups if isinstance(job, Training) else 1
        return self.ranks * many

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
        rates, training = self.prices, isinstance(self.job, Training)
        if rates is None and self.objective == "time":
            size = {"ranks": self.ranks, "tokens": self.job.tokens}
            rates = rates_by(self.costs, training=training, **size)
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
        job = self.job
        return job.in_all if isinstance(job, Training) else job.iterations

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
        its plans cost what those of `ultraep` do.
        """
        policy, equals, priced_as = name.partition("=")
        if equals and not priced_as:
            raise ConfigError(f"NAME=OTHER needs two policies, got {name!r}")
        runtime = runtime_of(priced_as) if priced_as else None
        found = Contender(policy, name, runtime=runtime)
        _ = found.carried_out
        return found

    @property
    def carried_out(self) -> Runtime:
        """What carrying out its plans costs; `ConfigError` where that is not known."""
        return price(self.policy, self.runtime)
