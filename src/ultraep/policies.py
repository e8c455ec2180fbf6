"""Policies: functions that decide which experts are replicated, and where.

A policy receives a `Problem` and returns `placed_C3`: integers `[C, 3]`, one row per replica with
expert, host rank and quota. Rows that it does not assign stay at home. To add a policy:

    @ultraep.register_policy("mine")
    def mine(problem: ultraep.Problem) -> IntArray: ...
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
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


BUILT_IN = ("none", "ultraep")
# Names of `ultraep.tools.baselines`, which plan offline only.
BASELINES = ("quota", "echo", "llep", "moonep", "eplb", "lplb", "flashlb", "ideal")
RUNNING = "a running balancer takes ultraep, none or a policy that you register"
_registry: dict[str, Policy] = {}
_modules: dict[str, str] = {}  # by the name of the policy that importing them registers
_import_module = cache(importlib.import_module)


def register_policy(
    name: str, *, within_limits: bool = True, needs_history: bool = False
) -> Callable[[Decide], Decide]:
    """Make the decorated function available as `BalanceConfig(policy=name)`.

    within_limits: False for policies that ignore spare slots or move experts freely.
    needs_history: whether the policy uses past loads. The plans of such policies are for
        comparison: a balancer runs neither them nor policies beyond the limits.
    """

    def register(decide: Decide) -> Decide:
        if name in _registry and _registry[name].decide is not decide:
            raise ConfigError(f"a policy named {name!r} is registered already")
        _registry[name] = Policy(name, decide, within_limits, needs_history)
        return decide

    return register


def register_modules(modules: Mapping[str, str]) -> None:
    """Make these policies available; the module of a policy is imported when it is first used."""
    _modules.update(modules)


def get_policy(name: str) -> Policy:
    """Return the policy of that name."""
    if name in _modules:  # also if it is registered: another thread may still be importing it
        _import_module(_modules[name])
    if name in _registry:
        return _registry[name]
    if name in BASELINES:
        raise ConfigError(f"{name} is an offline baseline: import ultraep.tools.baselines first")
    raise ConfigError(f"unknown policy {name!r}; choose from {', '.join(policy_names())}")


def running_policy(name: str) -> Policy:
    """Return the policy of that name for a running balancer; raise if it only plans offline."""
    if name in BASELINES:
        raise ConfigError(
            f"{name} is an offline baseline: compare it with `ultraep trace replay`; {RUNNING}"
        )
    policy = get_policy(name)
    if policy.needs_history:
        raise ConfigError(f"policy {name!r} uses past loads and plans offline only; {RUNNING}")
    if not policy.within_limits:
        raise ConfigError(
            f"policy {name!r} ignores slots and domains and plans offline only; {RUNNING}"
        )
    return policy


def policy_names() -> list[str]:
    """Return the names of all policies: built-in first, then registered ones."""
    return list(dict.fromkeys((*BUILT_IN, *_modules, *_registry)))


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
