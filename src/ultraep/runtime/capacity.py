"""Capacity: the rows that a rank can serve in a microbatch.

auto       as many as a plan gives it; memory follows the rows. A captured graph has a fixed size:
           what `prepare` or the steps before have allocated
static     the mean of all ranks, so at most the rows that a rank can have itself; refused where a
           plan could exceed the mean (docs/plan.md has the proof). With several domains, the mean
           of the busiest domain, which may get all rows
a number   that number
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ultraep.config import AUTO, BalanceConfig
from ultraep.errors import ConfigError, LoadError
from ultraep.plan import Plan
from ultraep.topology import Topology

STATIC = "static"
SPARE = 4  # one in this many rows is spare, so that memory seldom grows
# The settings of a config for which the proof holds.
PROVEN = {"policy": "ultraep", "tolerance": 0, "min_tokens_per_replica": 1, "objective": "balance"}


def default_config(policy: str | None, capacity: int | str) -> BalanceConfig:
    """Return the config of a balancer that was given at most a policy."""
    config = BalanceConfig(policy="ultraep" if policy is None else policy)
    return replace(config, objective="balance") if capacity == STATIC else config


@dataclass(frozen=True)
class Capacity:
    """The capacity of a balancer; raises ConfigError if "static" is not proven."""

    setting: int | str
    topology: Topology
    config: BalanceConfig

    def __post_init__(self) -> None:
        if self.setting == STATIC and self._obstacle:
            raise ConfigError(
                f"capacity='static' is the mean, and plans may exceed it: {self._obstacle}"
            )

    @property
    def proven(self) -> bool:
        """Whether no plan exceeds the mean, rounded up, whatever the loads are.

        With several domains it is the mean of the busiest one, which is proven for "static" only.
        """
        return not self._obstacle and (self.setting == STATIC or self.topology.num_domains == 1)

    @cached_property
    def _obstacle(self) -> str:
        """Why a plan may exceed the mean; empty if it cannot."""
        topology, config = self.topology, self.config
        for name, needed in PROVEN.items():
            if getattr(config, name) != needed:
                return f"{name}={getattr(config, name)!r}, it needs {needed!r}"
        if config.speeds == AUTO or config.speeds_for(topology.ranks):
            return f"speeds={config.speeds!r}, it needs equal speeds"
        homes, ranks, slots = int(topology.homes_per_rank.max()), topology.ranks, topology.slots
        several = topology.domain_size > 1
        if several and slots < homes:
            return f"{slots} slots, it needs {homes}, the most home experts of a rank"
        if several and config.replica_limit < ranks * slots:
            return f"max_replicas={config.max_replicas}, it needs {ranks * slots}"
        return ""

    def rows_for(self, rows: int, planned: int | None = None) -> int:
        """Return the rows of a rank to provide shared memory for.

        rows: that a rank can have itself.   planned: that a rank must serve now; None: unknown.
        """
        if not isinstance(self.setting, str):
            return self.setting
        if self.setting == STATIC or planned is None:
            return rows * self.topology.num_domains if self.proven else 2 * rows
        return planned + planned // SPARE

    def check(self, plan: Plan) -> None:
        """Raise if a plan exceeds the capacity."""
        size, most = plan.topology.domain_size, int(plan.rank_loads.max())
        if isinstance(self.setting, int) and most > self.setting:
            rank = int(plan.rank_loads.argmax())
            raise LoadError(
                f"a plan with {most} rows on rank {rank}, but the buffers are for {self.setting}: "
                "pass a larger capacity= to the balancer, or none outside of graphs"
            )
        mean = -(-int(plan.rank_loads.reshape(-1, size).sum(axis=1).max()) // size)
        if self.setting == STATIC and most > mean:
            rank = int(plan.rank_loads.argmax())
            raise LoadError(
                f"policy {plan.config.policy!r} gives {most} rows to rank {rank}, but "
                f"capacity='static' allows only the mean of {mean}"
            )
