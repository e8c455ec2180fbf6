"""Policies: functions that decide which experts are replicated, and where.

A policy receives a `Problem` and returns `placed_C3`: integers `[C, 3]`, one row per replica with
expert, host rank and quota. Rows that it does not assign stay at home. To add a policy:

    @ultraep.register_policy("mine")
    def mine(problem: ultraep.Problem) -> IntArray: ...
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from ultraep.arrays import IntArray
from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError
from ultraep.topology import Topology

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Problem:
    """The input of a policy. Shapes: R ranks, E experts."""

    loads: IntArray  # [R, E] rows that every source rank routed to every expert
    expert_loads: IntArray  # [E] their sum over source ranks
    topology: Topology
    config: BalanceConfig
    backend: ModuleType
    history: IntArray | None  # [E] past rows of every expert, for policies that need them


Decide = Callable[[Problem], IntArray]
DecideInterval = Callable[[Problem, IntArray], IntArray]  # [S, E] loads -> [C, 4], microbatch first


@dataclass(frozen=True, slots=True)
class Policy:
    """A registered policy."""

    name: str
    decide: Decide
    summary: str
    within_limits: bool
    needs_history: bool
    over_interval: DecideInterval | None = None


PEERS = ("echo", "llep", "moonep", "eplb", "lplb", "flashlb")  # of other projects
MODULES = {
    "none": "own",
    "ultraep": "own",
    "quota": "quota",
    **{name: f"peers.{name}" for name in PEERS},
    "ideal": "own",
}
BUILT_IN = tuple(MODULES)
IGNORE_SPEEDS = ("quota", *PEERS)
_registry: dict[str, Policy] = {}
_import_module = cache(importlib.import_module)


def register_policy(
    name: str,
    *,
    within_limits: bool = True,
    needs_history: bool = False,
    over_interval: DecideInterval | None = None,
) -> Callable[[Decide], Decide]:
    """Make the decorated function available as `BalanceConfig(policy=name)`.

    within_limits: False for policies that ignore spare slots or move experts freely. Their plans
        are for comparison: a balancer does not run them.
    needs_history: whether the policy uses past loads.
    over_interval: decides for many microbatches with the same past, in one call. The simulator
        uses it; without it, it calls the policy for every microbatch.
    """
    if over_interval is not None and not needs_history:
        raise ConfigError(f"policy {name!r}: over_interval needs needs_history=True")

    def register(decide: Decide) -> Decide:
        if name in _registry and _registry[name].decide is not decide:
            raise ConfigError(f"a policy named {name!r} is registered already")
        summary = (decide.__doc__ or "").strip().split("\n")[0]
        _registry[name] = Policy(name, decide, summary, within_limits, needs_history, over_interval)
        return decide

    return register


def get_policy(name: str) -> Policy:
    """Return the policy of that name. Built-in policies are imported on first use."""
    if name in BUILT_IN:  # also if it is registered: another thread may still be importing it
        _import_module(f"ultraep.policies.{MODULES[name]}")
    if name not in _registry:
        raise ConfigError(f"unknown policy {name!r}; choose from {', '.join(policy_names())}")
    return _registry[name]


def warn_if_speeds_ignored(config: BalanceConfig) -> None:
    """Log a warning if the config has speeds and its policy balances rows."""
    if config.speeds is not None and config.policy in IGNORE_SPEEDS:
        logger.warning(
            "policy %r ignores speeds: it balances rows, not rows / speed", config.policy
        )


def policy_names() -> list[str]:
    """Return the names of all policies: built-in first, then registered ones."""
    return [*BUILT_IN, *(name for name in _registry if name not in BUILT_IN)]
