"""Differential fuzzing of the planner: backends agree, and plans of all policies keep their rules.

Every plan is checked by `Plan.check`, against its limits, and against the lower bound of any plan.
A share of them is planned again by the reference, and by the Triton kernels in the interpreter.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from cases import assert_same_plan

import ultraep
from ultraep import BalanceConfig, Plan, Rates, Topology, backends, policies
from ultraep.backends.limits import Limits
from ultraep.plan import peak_of

SCALES = (0.3, 3, 30, 3000, 10**6)
SKEWS = (0.0, 0.5, 1.0, 2.0, 4.0)
SPEEDS = ((800, 900, 950, 1000), (999, 1000), (100, 1000, 10_000), (997,))
BLOCK = 10  # plans with one topology and config
SLOW = ("flashlb", "llep", "lplb")
QUICK = tuple(name for name in policies.policy_names() if name not in ("ultraep", *SLOW))
POLICIES = 100 * ("ultraep",) + 3 * QUICK + SLOW
AGAIN, KERNELS = 50, 2000  # one of so many plans is planned by the reference, by kernels


@dataclass
class Counts:
    """What was planned, and how it compares with the lower bound."""

    plans: int = 0
    by_reference: int = 0
    by_kernels: int = 0
    policies: Counter[str] = field(default_factory=Counter)
    timed: int = 0
    with_speeds: int = 0
    with_domains: int = 0
    exact: int = 0  # plans of ultraep without a tolerance, for balance
    at_bound: int = 0  # of them, plans that reach the lower bound
    compared: int = 0  # plans of ultraep for time, compared with the plan for balance
    slower: int = 0  # of them, plans that take longer by their rates
    worst: float = 0.0  # the largest ratio of the two times

    def lines(self) -> list[str]:
        """Return the counts for the log."""
        names = ", ".join(f"{name} {count:,}" for name, count in sorted(self.policies.items()))
        return [
            f"plans by policy: {names}",
            f"{self.with_domains:,} with several domains, {self.with_speeds:,} with speeds, "
            f"{self.timed:,} for time with rates",
            f"{self.by_reference:,} planned again by the reference, {self.by_kernels:,} by kernels "
            "in Triton's interpreter: all equal",
            f"{self.at_bound:,} of {self.exact:,} plans for exact balance reach the lower bound",
            f"{self.slower:,} of {self.compared:,} plans for time are slower than the plan for "
            f"balance, at worst {self.worst:.2f} times",
        ]


@dataclass(frozen=True)
class Setting:
    """A topology and a config, and the mean load of every expert on a source rank."""

    topology: Topology
    config: BalanceConfig
    means: Any


@lru_cache(maxsize=1)
def drawn_setting(seed: int, block: int) -> Setting:
    rng = np.random.default_rng([seed, block])
    domain = int(rng.integers(1, 9))
    ranks = domain * int(rng.integers(1, 8 // domain + 1))
    homes = None
    if rng.random() < 0.5:
        experts = int(rng.integers(1, 25))
        homes = rng.integers(0, ranks, experts).tolist()
    else:
        experts = ranks * int(rng.integers(1, 6))
    slots = int(rng.integers(0, min(3, experts) + 1))
    topology = Topology(ranks=ranks, experts=experts, slots=slots, domain=domain, homes=homes)
    popularity = np.exp(rng.normal(0, rng.choice(SKEWS), experts))
    means = popularity * rng.choice(SCALES) / popularity.mean()
    means = np.minimum(means, 2**31 / (4 * ranks * experts))
    return Setting(topology, drawn_config(rng, ranks), means)


def drawn_config(rng: np.random.Generator, ranks: int) -> BalanceConfig:
    rates, speeds = None, None
    if rng.random() < 0.4:
        rates = Rates(
            row=int(rng.choice([1, 100, 100_000, 2**31 - 1])),
            copy=int(rng.choice([0, 10, 10**6, 2**40])),
            each=int(rng.choice([0, 1, 10**5, 2**40])),
            layer=int(rng.choice([0, 100, 10**7, 2**40])),
        )
    if rng.random() < 0.3:
        speeds = rng.choice(SPEEDS[rng.integers(len(SPEEDS))], ranks).tolist()
    policy = str(rng.choice(POLICIES))
    ours = policy == "ultraep"  # others refuse limits
    return BalanceConfig(
        policy=policy,
        tolerance=float(rng.choice([0.0, 0.0, 0.01, 0.1, 0.7, 1.0])),
        min_tokens_per_replica=int(rng.choice([1, 1, 2, 50])) if ours else 1,
        max_replicas=[None, None, 0, 1, 3][rng.integers(5)] if ours else None,
        locality=bool(rng.integers(2)),
        objective=str(rng.choice(["time", "balance"])),
        rates=rates,
        speeds=speeds,
    )


def check_plan(seed: int, number: int, counts: Counts) -> None:
    """Plan one random problem; raise `AssertionError` or an error of ours if a rule is broken."""
    setting = drawn_setting(seed, number // BLOCK)
    topology, config = setting.topology, setting.config
    rng = np.random.default_rng([seed, number, 1])
    loads = rng.poisson(setting.means, (topology.ranks, topology.experts))
    policy = policies.get_policy(config.policy)
    past = rng.poisson(setting.means) if policy.needs_history else None
    plan = ultraep.plan(loads, topology, config, history=past, backend="cpu")
    plan.check(loads)
    _check_limits(plan, policy.within_limits)
    _check_bound(plan, policy.within_limits, counts)
    _check_time(plan, counts)
    _count(plan, counts)
    if number % AGAIN == 0:
        again = ultraep.plan(loads, topology, config, history=past, backend="reference")
        assert_same_plan(again, plan)
        bounds = _bound(plan, "reference"), _bound(plan, "cpu")
        assert bounds[0] == bounds[1], f"lower bounds {bounds}"
        counts.by_reference += 1
    if number % KERNELS == 0 and _kernels_plan(config, topology):
        assert_same_plan(_by_kernels(loads, topology, config), plan)
        counts.by_kernels += 1


def _check_limits(plan: Plan, within_limits: bool) -> None:
    topology, config = plan.topology, plan.config
    if within_limits:
        assert plan.within_limits
    if config.policy != "ultraep":
        return
    assert plan.quotas.min(initial=config.min_tokens_per_replica) >= config.min_tokens_per_replica
    domains = np.bincount(plan.replicas[:, 1] // topology.domain_size, minlength=1)
    assert domains.max() <= config.replica_limit


def _check_bound(plan: Plan, within_limits: bool, counts: Counts) -> None:
    config = plan.config
    peak, _ = peak_of(plan.rank_loads, plan.speeds)
    before, _ = peak_of(plan.initial_rank_loads, plan.speeds)
    if within_limits and config.policy != "ideal":
        unlimited = config.policy != "ultraep"  # others ignore max_replicas
        limited = replace(config, max_replicas=None) if unlimited else config
        bound = _bound(plan, "cpu", limited)
        assert peak >= bound, f"peak {peak}, below the lower bound {bound}"
    if config.policy == "ultraep":
        assert peak <= before, f"peak {peak}, without replicas {before}"
        exact = not config.tolerance and plan.rates is None and config.max_replicas is None
        if exact and config.min_tokens_per_replica == 1:
            counts.exact += 1
            counts.at_bound += peak == bound


def _bound(plan: Plan, backend: str, config: BalanceConfig | None = None) -> int:
    limits = Limits.of(plan.topology, config or plan.config)
    return int(backends.select(backend).lower_bound(plan.loads.sum(axis=0), limits))


def _check_time(plan: Plan, counts: Counts) -> None:
    """A plan for time is at most as slow as no replicas; count how often balance is faster."""
    if plan.rates is None or plan.config.policy != "ultraep":
        return
    assert plan.time is not None
    assert plan.time_without_replicas is not None
    assert plan.time <= plan.time_without_replicas
    for_balance = replace(plan.config, objective="balance")
    other = ultraep.plan(plan.loads, plan.topology, for_balance, backend="cpu")
    transfers = max(other.max_ingress, other.max_egress)
    time = other._time(plan.rates, other.rank_loads, transfers, other.num_replicas)
    counts.compared += 1
    counts.slower += plan.time > time
    counts.worst = max(counts.worst, plan.time / max(time, 1))


def _count(plan: Plan, counts: Counts) -> None:
    counts.plans += 1
    counts.policies[plan.config.policy] += 1
    counts.timed += plan.rates is not None
    counts.with_speeds += bool(plan.speeds)
    counts.with_domains += plan.topology.num_domains > 1


def _kernels_plan(config: BalanceConfig, topology: Topology) -> bool:
    return config.policy == "ultraep" and topology.can_replicate


def _by_kernels(loads: Any, topology: Topology, config: BalanceConfig) -> Plan:
    import torch

    from ultraep.runtime.device_planner import DevicePlanner

    control = DevicePlanner(topology, config, rows=0, rank=0, device=torch.device("cpu"))
    return control.plan(torch.from_numpy(loads)).to_host()
