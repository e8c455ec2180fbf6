"""Capacity: the rows that a rank has room for in a microbatch, where memory has a fixed size.

static   exactly the mean of all ranks, and so the rows that a rank can have itself; refused
         where a plan could exceed the mean, whatever the loads (docs/plan.md has the proof)
auto     the same where that is proven; else twice as much at first, and more when ranks come
         near to it: known from notes of the device, agreed upon by all hosts
a number that many, always
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError, LoadError
from ultraep.plan import Plan
from ultraep.topology import Topology

AUTO, STATIC = "auto", "static"
NEEDED = {  # of a config
    "policy": "ultraep",
    "tolerance": 0,
    "min_tokens_per_replica": 1,
    "objective": "balance",
}


def default_config(policy: str | None, capacity: int | str) -> BalanceConfig:
    """How to balance where only the policy is said, or nothing."""
    config = BalanceConfig(policy="ultraep" if policy is None else policy)
    return replace(config, objective="balance") if capacity == STATIC else config


def check_setting(capacity: int | str) -> None:
    """Refuse what is no capacity."""
    if isinstance(capacity, str):
        if capacity not in (AUTO, STATIC):
            raise ConfigError(f"capacity is a number, {AUTO!r} or {STATIC!r}, got {capacity!r}")
    elif capacity < 1:
        raise ConfigError(f"capacity must be at least 1, got {capacity}")


def check_config(capacity: int | str, config: BalanceConfig) -> None:
    """Refuse a static capacity with a planner that may stay above the mean."""
    obstacle = _of_config(config)
    if capacity == STATIC and obstacle:
        raise ConfigError(f"capacity='static' is the mean, and plans may exceed it: {obstacle}")


def check_topology(capacity: int | str, topology: Topology, config: BalanceConfig) -> None:
    """Refuse a static capacity where slots or links do not suffice for the mean."""
    obstacle = _of_topology(topology, config)
    if capacity == STATIC and obstacle:
        raise ConfigError(f"capacity='static' is the mean, and plans may exceed it: {obstacle}")


@dataclass(frozen=True)
class Capacity:
    """The setting of a balancer, and what it means for its topology and its planner."""

    setting: int | str
    topology: Topology
    config: BalanceConfig

    @cached_property
    def proven(self) -> bool:
        """Whether no plan exceeds the mean, rounded up, whatever the loads."""
        return not (_of_config(self.config) or _of_topology(self.topology, self.config))

    def rows_for(self, rows: int, seen: int) -> int:
        """Rows to have room for, if a rank can have so many itself.

        seen: the most that a rank was ever planned to serve, by whichever policy.
        """
        if not isinstance(self.setting, str):
            return self.setting
        if self.setting == STATIC or (self.proven and seen <= rows):
            return rows
        return max(2 * rows, seen + seen // 2)

    def suffices(self, room: int, seen: int) -> bool:
        """Whether room for so many rows is enough; unless proven, for an eighth more than seen."""
        if self.setting != AUTO:
            return True
        return seen <= (room if self.proven else room - room // 8)

    def check(self, plan: Plan) -> None:
        """Raise if a plan exceeds a static capacity."""
        mean, fullest = -(-plan.total // plan.topology.ranks), int(plan.rank_loads.max())
        if self.setting == STATIC and fullest > mean:
            rank = int(plan.rank_loads.argmax())
            raise LoadError(
                f"policy {plan.config.policy!r} gives {fullest} rows to rank {rank}, but "
                f"capacity='static' has room for the mean of {mean}"
            )


def _of_config(config: BalanceConfig) -> str:
    for name, needed in NEEDED.items():
        given = getattr(config, name)
        if given != needed:
            return f"{name}={given!r}, it needs {needed!r}"
    return ""


def _of_topology(topology: Topology, config: BalanceConfig) -> str:
    homes, ranks = int(topology.homes_per_rank.max()), topology.ranks
    if topology.num_domains > 1:
        return f"{topology.num_domains} domains of {topology.domain_size} ranks, it needs 1"
    if ranks > 1 and topology.slots < homes:
        return (
            f"{topology.slots} slots, it needs {homes}, the home experts of the rank that has most"
        )
    if ranks > 1 and config.replica_limit < ranks * topology.slots:
        return f"max_replicas={config.max_replicas}, it needs {ranks * topology.slots}"
    return ""
