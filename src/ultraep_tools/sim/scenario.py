"""Scenario: what is simulated. Memory: bytes of its busiest device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError
from ultraep.loads import MAX_TOTAL
from ultraep.topology import Topology
from ultraep_tools.sim.cluster import Cluster
from ultraep_tools.sim.costs import Costs, MeasuredRates, measured_rates, rates_by
from ultraep_tools.sim.model import Model
from ultraep_tools.sim.presets import check_range
from ultraep_tools.sim.serving import Serving
from ultraep_tools.sim.training import Training, stage_of_layer
from ultraep_tools.sim.workload import Workload

MAX_MICROBATCHES = 1 << 20  # simulated, per layer


@dataclass(frozen=True)
class Memory:
    """Bytes of the device that needs most.

    Fragmentation, allocator caches, the KV cache and buffers of communication libraries are not
    included.
    """

    weights: float  # with gradients and optimizer state
    slots: float
    kept: float  # activations stored for backward
    rows: float  # rows, hidden activations and outputs of the current layer on the busiest rank

    @property
    def total(self) -> float:
        return self.weights + self.slots + self.kept + self.rows


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A cluster, a model, a workload and a job."""

    cluster: Cluster
    model: Model
    workload: Workload
    job: Training | Serving
    ranks: int  # of the expert-parallel group
    slots: int = 1
    tolerance: float = 0.01
    interval: int = 100  # microbatches for which policies that use past loads keep a placement
    domain: int | None = None  # None: from the cluster
    rates: MeasuredRates = field(default_factory=measured_rates)
    objective: str = "balance"  # of ultraep's plans: "time" or "balance"

    def __post_init__(self) -> None:
        check_range(self, "ranks", 1)
        check_range(self, "interval microbatches", 1, MAX_MICROBATCHES)
        check_range(self, "rows", 1, MAX_TOTAL)
        model, cluster, trains = self.model, self.cluster, self.job.trains
        if model.experts % self.ranks:
            raise ConfigError(
                f"{model.experts} experts of {model.name} do not divide evenly over {self.ranks} "
                f"ranks; choose --ep that divides {model.experts}"
            )
        if self.devices > cluster.devices:
            raise ConfigError(
                f"the job needs {self.devices} devices, but cluster {cluster.name} has "
                f"{cluster.devices}; use fewer ranks or groups, or a larger cluster"
            )
        if self.workload.experts != model.experts:
            raise ConfigError(
                f"the workload has {self.workload.experts} experts, but model {model.name} has "
                f"{model.experts}; use loads of this model, or another model"
            )
        weights = self.job.weight_bytes(model, self.ranks)
        if weights > cluster.memory:
            raise ConfigError(
                f"{weights / 1e9:.0f} GB of weights{' and optimizer state' if trains else ''} per "
                f"device do not fit into the {cluster.memory_gb:g} GB of cluster "
                f"{cluster.name}: use more ranks{', a pipeline or groups' if trains else ''}"
            )
        stage_of_layer(model, self.job.pipeline)
        _ = self.config  # validates its settings

    @property
    def devices(self) -> int:
        return self.ranks * self.job.pipeline * self.job.groups

    @property
    def facts(self) -> dict[str, Any]:
        """Names and sizes, as the commands print them with --json."""
        return {
            "cluster": self.cluster.name,
            "model": self.model.name,
            "job": self.job.name,
            "devices": self.devices,
            "domain": self.topology.domain_size,
            "objective": self.objective,
        }

    @property
    def topology(self) -> Topology:
        domain = self.cluster.domain_of(self.ranks) if self.domain is None else self.domain
        return Topology(
            ranks=self.ranks, experts=self.model.experts, slots=self.slots, domain=domain
        )

    @property
    def config(self) -> BalanceConfig:
        rates, job = None, self.job
        if self.objective == "time":
            rates = rates_by(self.costs, ranks=self.ranks, tokens=job.tokens, training=job.trains)
        return BalanceConfig(tolerance=self.tolerance, objective=self.objective, rates=rates)

    @property
    def costs(self) -> Costs:
        return Costs(self.cluster, self.model, self.rates)

    @property
    def microbatches(self) -> int:
        """Simulated microbatches, or iterations, per layer."""
        return self.job.simulated

    @property
    def rows(self) -> int:
        """Rows of a microbatch over all ranks."""
        return self.ranks * self.job.tokens * self.model.top_k

    def memory(self, slots: int, rows: float) -> Memory:
        model, job = self.model, self.job
        return Memory(
            weights=job.weight_bytes(model, self.ranks),
            slots=float(slots * model.slot_bytes(training=job.trains)),
            kept=job.activation_bytes(model),
            rows=rows * model.row_bytes,
        )
