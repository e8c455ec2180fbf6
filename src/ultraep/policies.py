"""Policies: functions that decide which experts are replicated, and where.

A policy receives a `Problem` and returns `placed_C3`: integers `[C, 3]`, one row per replica with
expert, host rank and quota. Rows that it does not assign stay at home. To add a policy:

    @ultraep.register_policy("mine")
    def mine(problem: ultraep.Problem) -> IntArray: ...

A package can declare its policies as entry points of the group `ultraep.policies`: the name of the
policy, and the module that registers it. The module is imported when the policy is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

import numpy as np

from ultraep.arrays import IntArray
from ultraep.backends.limits import Limits
from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError
from ultraep.topology import Topology


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


@dataclass(frozen=True, slots=True)
class Policy:
    """A registered policy."""

    name: str
    decide: Decide
    within_limits: bool
    needs_history: bool
    offline: bool


BUILT_IN = ("none", "ultraep")
ENTRY_POINTS = "ultraep.policies"  # name of a policy = the module that registers it
RUNNING = "a running balancer takes ultraep, none or a policy that you register"
_registry: dict[str, Policy] = {}


def register_policy(
    name: str,
    *,
    within_limits: bool = True,
    needs_history: bool = False,
    offline: bool = False,
) -> Callable[[Decide], Decide]:
    """Make the decorated function available as `BalanceConfig(policy=name)`.

    within_limits: False for policies that ignore spare slots or move experts freely.
    needs_history: whether the policy uses past loads.
    offline: whether the policy is only for comparison. A running balancer refuses it, and also
        policies with `needs_history` or without `within_limits`.
    """

    def register(decide: Decide) -> Decide:
        if name in _registry and _registry[name].decide is not decide:
            raise ConfigError(f"a policy named {name!r} is registered already")
        _registry[name] = Policy(name, decide, within_limits, needs_history, offline)
        return decide

    return register


@cache
def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def get_policy(name: str) -> Policy:
    """Return the policy of that name; import the module of an installed one."""
    if name in _installed():  # also if it is registered: another thread may still be importing it
        _installed()[name].load()
    if name in _registry:
        return _registry[name]
    raise ConfigError(f"unknown policy {name!r}; choose from {', '.join(policy_names())}")


def running_policy(name: str) -> Policy:
    """Return the policy of that name for a running balancer; raise if it only plans offline."""
    policy = get_policy(name)
    reasons = {
        "is an offline baseline": policy.offline,
        "uses past loads and plans offline only": policy.needs_history,
        "ignores slots and domains and plans offline only": not policy.within_limits,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(
                f"policy {name!r} {reason}: compare it with `ultraep trace replay`; {RUNNING}"
            )
    return policy


def policy_names() -> list[str]:
    """Return the names of all policies: built-in first, then installed and registered ones."""
    return list(dict.fromkeys((*BUILT_IN, *_installed(), *_registry)))


@register_policy("none")
def none(_: Problem) -> IntArray:
    """No replicas: every row goes to the home of its expert."""
    return np.empty((0, 3), dtype=np.int64)


@register_policy("ultraep")
def ultraep(problem: Problem) -> IntArray:
    """Alias planning: the emptiest rank takes its exact deficit from the busiest rank.

    `backends/reference/place.py` implements the algorithm; `docs/plan.md` explains it.
    """
    limits = Limits.of(problem.topology, problem.config)
    placed_C3: IntArray = problem.backend.place(problem.expert_loads, limits)
    return placed_C3
