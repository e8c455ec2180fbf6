"""Policies: functions that decide which experts are replicated, and where.

A policy receives a `Problem` and returns `placed_C3`: integers `[C, 3]`, one row per replica with
expert, host rank and quota. Rows that it does not assign stay at home. To add a policy:

    @ultraep.register_policy("mine")
    def mine(problem: ultraep.Problem) -> IntArray: ...

A package can declare its policies as entry points of the group `ultraep.policies`: the name of the
policy, and the module that registers it. The module is imported when the policy is first used.

A plan keeps these rules, by the short name that `PlanError.rule` holds:

    shape            arrays fit the topology and each other
    range            experts, hosts and slots exist
    home             no replica is on the home rank of its expert
    duplicate        no rank has two replicas of one expert
    order            replicas are sorted by expert, then host
    slots            no rank uses more spare slots than it has, or one slot twice
    domain           every replica is in the fast-link domain of its home
    quota            every replica serves at least one row, all together at most the expert's load
    split            the sources send each replica its quota, and no source sends rows it lacks
    loads            the plan was computed for these loads
    rank loads       the rank loads are the sums of the rows served there

Shapes: R ranks, E experts, C replicas; `replicas` of a plan has columns expert, host, spare slot.
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
from ultraep.errors import ConfigError, PlanError
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
    name: str
    decide: Decide
    within_limits: bool
    needs_history: bool
    offline: bool


BUILT_IN = ("none", "ultraep")
ENTRY_POINTS = "ultraep.policies"  # name of a policy = the module that registers it
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
    offline: whether the policy is only for comparison: a running balancer refuses it. Policies with
        `needs_history` or without `within_limits` are.
    """

    def register(decide: Decide) -> Decide:
        if name in _registry and _registry[name].decide is not decide:
            raise ConfigError(f"a policy named {name!r} is registered already")
        only_offline = offline or needs_history or not within_limits
        _registry[name] = Policy(name, decide, within_limits, needs_history, only_offline)
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
    if policy.offline:
        raise ConfigError(
            f"policy {name!r} plans offline only, for comparison: use `ultraep trace replay`; a "
            "running balancer takes ultraep, none or a policy that you register"
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


# -- rules ----------------------------------------------------------------------------------------


def check_loads(planned_RE: IntArray, loads_RE: IntArray) -> None:
    """Raise `PlanError` unless the plan was made for these loads."""
    for source, expert in np.argwhere(planned_RE != loads_RE)[:1]:
        raise PlanError(
            "loads",
            f"source rank {source} routes {loads_RE[source, expert]} rows to expert {expert}, "
            f"but {planned_RE[source, expert]} in the plan",
        )


def check_shape(placed_C3: IntArray) -> None:
    """Raise `PlanError` unless the replicas are int64 `[C, 3]`."""
    if placed_C3.ndim != 2 or placed_C3.shape[1] != 3 or placed_C3.dtype != np.int64:
        raise PlanError(
            "shape", f"replicas must be int64 [C, 3], got {placed_C3.dtype} {placed_C3.shape}"
        )


def check_replicas(
    placed_C3: IntArray, loads_RE: IntArray, topology: Topology, *, limited: bool
) -> None:
    """Raise `PlanError` if replicas (expert, host, quota) break a rule.

    limited: also check slots and domains.
    """
    experts, hosts, quotas = placed_C3.T
    _check_range("expert", experts, topology.experts)
    _check_range("host", hosts, topology.ranks)
    homes = topology.home_of_expert[experts]
    _fail_at(homes == hosts, placed_C3, "home", "is on the home rank of its expert")
    step = np.diff(experts * topology.ranks + hosts)
    _fail_at(step == 0, placed_C3, "duplicate", "is the second replica of its expert there")
    _fail_at(step < 0, placed_C3, "order", "must come after the replica that follows it")
    _fail_at(quotas < 1, placed_C3, "quota", "serves no rows")
    loads_E = loads_RE.sum(axis=0)
    _fail_at(quotas > loads_E[experts], placed_C3, "quota", "serves more rows than its expert has")
    served = np.zeros(topology.experts, dtype=np.int64)
    np.add.at(served, experts, quotas)
    for expert in np.flatnonzero(served > loads_E)[:1]:
        raise PlanError(
            "quota",
            f"replicas of expert {expert} serve {served[expert]} rows, but its load is "
            f"{loads_E[expert]}",
        )
    if limited:
        size = topology.domain_size
        _fail_at(
            homes // size != hosts // size,
            placed_C3,
            "domain",
            "is outside of the domain of its home",
        )
        held = np.bincount(hosts, minlength=topology.ranks)
        if held.max() > topology.slots:
            raise PlanError(
                "slots",
                f"rank {held.argmax()} has {held.max()} replicas but {topology.slots} slots",
            )


def check_slots(replicas_C3: IntArray, topology: Topology, *, limited: bool) -> None:
    """Raise `PlanError` unless every replica has its own slot."""
    hosts, slots = replicas_C3[:, 1], replicas_C3[:, 2]
    most = topology.slots if limited else topology.experts
    _check_range("slot", slots, most)
    places = hosts * most + slots
    if len(np.unique(places)) != len(places):
        raise PlanError("slots", "two replicas share one slot")


def check_split(split_CR: IntArray, placed_C3: IntArray, loads_RE: IntArray) -> None:
    """Raise `PlanError` unless the sources send each replica its quota, from their own rows."""
    experts, _, quotas = placed_C3.T
    expected = (len(placed_C3), len(loads_RE))
    if split_CR.shape != expected:
        raise PlanError("shape", f"split must be {expected}, got {split_CR.shape}")
    if split_CR.min(initial=0) < 0:
        raise PlanError("split", f"a source sends {split_CR.min()} rows")
    received = split_CR.sum(axis=1)
    for index in np.flatnonzero(received != quotas)[:1]:
        raise PlanError(
            "split", f"replica {index} gets {received[index]} rows, its quota is {quotas[index]}"
        )
    sent = np.zeros_like(loads_RE)
    np.add.at(sent.T, experts, split_CR)
    for source, expert in np.argwhere(sent > loads_RE)[:1]:
        raise PlanError(
            "split",
            f"source rank {source} sends {sent[source, expert]} rows to replicas of expert "
            f"{expert}, but has {loads_RE[source, expert]}",
        )


def _check_range(name: str, values: IntArray, end: int) -> None:
    if len(values) and (values.min() < 0 or values.max() >= end):
        raise PlanError("range", f"{name} {values.min()}..{values.max()} is not in 0..{end - 1}")


def _fail_at(broken: np.ndarray, placed_C3: IntArray, rule: str, what: str) -> None:
    for index in np.flatnonzero(broken)[:1]:
        expert, host, quota = placed_C3[index].tolist()
        raise PlanError(
            rule, f"the replica of expert {expert} on rank {host} ({quota} rows) {what}"
        )
