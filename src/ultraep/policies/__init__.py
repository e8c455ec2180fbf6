"""Who decides where copies go: one registered function per policy, all behind one call.

A policy sees a `Problem` and answers with `placed_C3`: integers `[C, 3]`, expert, host rank and
quota of every copy. What it leaves out stays at home. To add one:

    @ultraep.register_policy("mine")
    def mine(problem: ultraep.Problem) -> IntArray: ...

`within_limits=False` marks policies that were not made for a fixed number of spare slots, or that
move experts freely; their plans are compared, not run, and not held to the slot and domain limits.
`over_interval` may be given by policies that place by the past: the same decision for many
microbatches that share one past, so that places are found once. The simulator uses it; without
it, it asks for every microbatch anew.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from ultraep.arrays import IntArray
from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError
from ultraep.topology import Topology


@dataclass(frozen=True, slots=True)
class Problem:
    """What a policy decides on. Shapes: R ranks, E experts."""

    loads: IntArray  # [R, E] tokens that every source rank routed to every expert
    expert_loads: IntArray  # [E] their sum over source ranks
    topology: Topology
    config: BalanceConfig
    backend: ModuleType
    history: IntArray | None  # [E] tokens of every expert in the past, for policies that need it


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
_registry: dict[str, Policy] = {}


def register_policy(
    name: str,
    *,
    within_limits: bool = True,
    needs_history: bool = False,
    over_interval: DecideInterval | None = None,
) -> Callable[[Decide], Decide]:
    """Make the decorated function available as `BalanceConfig(policy=name)`."""
    if over_interval is not None and not needs_history:
        raise ConfigError(f"policy {name!r} has no past to keep: over_interval needs needs_history")

    def register(decide: Decide) -> Decide:
        if name in _registry and _registry[name].decide is not decide:
            raise ConfigError(f"a policy named {name!r} is registered already")
        summary = (decide.__doc__ or "").strip().split("\n")[0]
        _registry[name] = Policy(name, decide, summary, within_limits, needs_history, over_interval)
        return decide

    return register


def get_policy(name: str) -> Policy:
    """The policy of that name; built-in ones are imported when first asked for."""
    if name in BUILT_IN:  # also if it is registered: another thread may still be importing it
        importlib.import_module(f"ultraep.policies.{MODULES[name]}")
    if name not in _registry:
        raise ConfigError(f"unknown policy {name!r}; known are {', '.join(policy_names())}")
    return _registry[name]


def policy_names() -> list[str]:
    """Names of all policies: the built-in ones, then those registered since."""
    return [*BUILT_IN, *(name for name in _registry if name not in BUILT_IN)]
