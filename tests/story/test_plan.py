"""Properties of every plan, for any loads, topology and settings."""

import dataclasses

import numpy as np
import pytest
import torch
from cases import NAMED, configs, one_hot, problems, timed_configs, with_speeds
from hypothesis import assume, given
from hypothesis import strategies as st

import ultraep
from ultraep import BalanceConfig, ConfigError, PlanError, Rates, Topology, workload
from ultraep.backends.limits import Limits
from ultraep.backends.reference.heuristics import alias
from ultraep.backends.reference.place import domains_of, place, replicas_of
from ultraep.backends.reference.search import (
    LIMITED,
    attempt_at,
    attempts_to_make,
    shared_threshold,
    solve,
)
from ultraep.config import MAX_THRESHOLD


def dense_split(plan):
    """Return rows by `[source rank, expert, host rank]`."""
    ranks, experts = plan.loads.shape
    split_RER = np.zeros((ranks, experts, ranks), dtype=np.int64)
    split_RER[:, plan.replicas[:, 0], plan.replicas[:, 1]] = plan.split.T
    at_home = plan.loads - split_RER.sum(axis=2)
    split_RER[:, np.arange(experts), plan.topology.home_of_expert] += at_home
    return split_RER


@given(problems(), configs)
def test_every_plan(problem, config):
    """Rules hold, rows are conserved, limits hold, and the imbalance never grows."""
    loads, topology = problem
    plan = ultraep.plan(loads, topology, config)
    plan.check(loads)
    split, quota = dense_split(plan), plan.dense_quota()
    assert split.min(initial=0) >= 0
    np.testing.assert_array_equal(split.sum(axis=2), loads)  # every source sends all it routed
    np.testing.assert_array_equal(split.sum(axis=0), quota)  # every quota is met exactly
    np.testing.assert_array_equal(quota.sum(axis=1), loads.sum(axis=0))
    np.testing.assert_array_equal(quota.sum(axis=0), plan.rank_loads)
    assert (plan.quotas >= config.min_tokens_per_replica).all()
    if config.max_replicas is not None:
        in_domain = np.bincount(plan.replicas[:, 1] // topology.domain, minlength=1)
        assert in_domain.max() <= config.max_replicas
    assert plan.lower_bound <= plan.imbalance <= plan.initial_imbalance


@given(problems(max_slots=0))
def test_without_slots_there_are_no_replicas(problem):
    loads, topology = problem
    plan = ultraep.plan(loads, topology)
    assert plan.num_replicas == 0
    assert plan.lower_bound == plan.imbalance == plan.initial_imbalance


@given(problems(), st.sampled_from([0.01, 0.1, 0.5]))
def test_the_tolerance_holds_if_exact_balance_is_possible(problem, tolerance):
    loads, topology = problem
    exact = ultraep.plan(loads, topology)
    relaxed = ultraep.plan(loads, topology, BalanceConfig(tolerance=tolerance))
    target = max(exact.imbalance, exact.lower_bound * (1 + tolerance))
    assert relaxed.imbalance <= target + topology.ranks / max(1, loads.sum())


def time_of(plan, rates):
    transfers = max(plan.max_ingress, plan.max_egress)
    peak = int(plan.rank_loads.max())
    return rates.time(peak=peak, transfers=transfers, replicas=plan.num_replicas)


@given(problems(), timed_configs)
def test_neither_no_replicas_nor_the_best_balance_is_faster(problem, config):
    loads, topology = problem
    assume(topology.domain == topology.ranks)
    config = dataclasses.replace(config, tolerance=0.0)
    plan = ultraep.plan(loads, topology, config)
    plan.check(loads)
    for change in ({"policy": "none"}, {"objective": "balance"}):
        other = ultraep.plan(loads, topology, dataclasses.replace(config, **change))
        assert time_of(plan, config.rates) <= time_of(other, config.rates)


@given(problems(), timed_configs, st.data())
def test_the_quickest_of_all_attempts_is_planned(problem, config, data):
    """The planner leaves out attempts that cannot be quicker."""
    loads, topology = problem
    if data.draw(st.booleans()):
        config = with_speeds(data.draw, config, topology.ranks)
    expert_loads, limits = loads.sum(axis=0), Limits.of(topology, config)
    domains = domains_of(expert_loads, limits)
    exact = [solve(d, shared_threshold(domains, config.tolerance_parts)) for d in domains]
    none = [alias(d, MAX_THRESHOLD) for d in domains]

    def transfers(attempts):
        return max(a.transfers for a in attempts)

    def cost(attempts):
        replicas = sum(len(a.replicas) for a in attempts)
        met = attempts is not exact and attempts is not none
        peak = max(a.threshold if met else a.peak for a in attempts)
        unit = domains[0].unit
        time = config.rates.time(
            peak=peak, unit=unit, transfers=transfers(attempts), replicas=replicas
        )
        return time, replicas

    few_links = config.rates.copy > 0
    attempts = [
        [attempt_at(domain, threshold, links) for domain in domains]
        for threshold, links in zip(
            *attempts_to_make(domains, config.tolerance_parts, few_links), strict=True
        )
    ]
    limited = attempts[:LIMITED] if few_links else []
    fewer = [a for a in limited if transfers(a) < transfers(exact)]
    met = [a for a in fewer + attempts[LIMITED:] if all(one.peak <= one.threshold for one in a)]
    expected = replicas_of(min([exact, *met, none], key=cost), limits)
    np.testing.assert_array_equal(place(expert_loads, limits), expected)


def test_without_rates_time_is_balance():
    loads, topology = NAMED["zipf"]
    by_time, by_balance = BalanceConfig(), BalanceConfig(objective="balance")
    assert by_time.objective == "time"
    assert ultraep.plan(loads, topology, by_time) == ultraep.plan(loads, topology, by_balance)
    with_rates = BalanceConfig(objective="balance", rates=Rates(row=1, copy=10**9))
    assert ultraep.plan(loads, topology, with_rates) == ultraep.plan(loads, topology, by_balance)


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"row": 0}, "row must be an integer of at least 1, got 0"),
        ({"row": 2**31}, "row must be at most 2147483647, got 2147483648"),
        ({"row": 1, "copy": -1}, "copy must be an integer of at least 0, got -1"),
        ({"row": 1, "each": 1.5}, "each must be an integer of at least 0, got 1.5"),
        ({"row": 1, "layer": 2**41}, "layer must be at most 1099511627776"),
    ],
)
def test_rates_are_checked(rates, message):
    with pytest.raises(ConfigError, match=message):
        Rates(**rates)


def test_the_largest_rates_still_fit_64_bits():
    most = Rates(row=2**31 - 1, copy=2**40, each=2**40, layer=2**40)
    assert most.time(peak=2**31 - 1, transfers=2**20, replicas=2**20) < 2**63
    config = BalanceConfig(rates=most)
    with pytest.raises(ConfigError, match="at most 1048576 spare slots, got 1048577"):
        config.rates_for(2**20 + 1)


def test_a_replica_serves_its_own_rank_first():
    loads = np.array([[30, 0], [30, 0]])
    topology = Topology(ranks=2, experts=2, slots=1)
    near = ultraep.plan(loads, topology)
    far = ultraep.plan(loads, topology, BalanceConfig(locality=False))
    assert near.split.tolist() == [[0, 30]]
    assert near.remote_tokens == 0
    assert far.remote_tokens == 0  # the home serves the first 30 tokens, which are its own
    lopsided = np.array([[10, 0], [50, 0]])
    assert ultraep.plan(lopsided, topology).remote_tokens == 20


def test_replicas_stay_in_their_domain():
    loads = np.zeros((4, 4), dtype=int)
    loads[:, 0] = 100
    one_domain = ultraep.plan(loads, Topology(ranks=4, experts=4, slots=1))
    two_domains = ultraep.plan(loads, Topology(ranks=4, experts=4, slots=1, domain=2))
    assert one_domain.rank_loads.tolist() == [100, 100, 100, 100]
    assert two_domains.rank_loads.tolist() == [200, 200, 0, 0]
    assert two_domains.lower_bound == two_domains.imbalance == 2.0


def test_tensors_lists_and_views_give_the_same_plan():
    loads = np.random.default_rng(0).integers(0, 100, (4, 8))
    topology = Topology(ranks=4, experts=8, slots=1)
    expected = ultraep.plan(loads, topology)
    assert ultraep.plan(torch.from_numpy(loads), topology) == expected
    assert ultraep.plan(torch.from_numpy(loads).int(), topology) == expected
    assert ultraep.plan(loads.tolist(), topology) == expected
    for dtype in (np.uint8, np.int16, np.uint32, np.uint64):
        assert ultraep.plan(loads.astype(dtype), topology) == expected
    assert ultraep.plan(np.asfortranarray(loads), topology) == expected
    assert ultraep.plan(loads.repeat(2, axis=1)[:, ::2], topology) == expected


def test_a_plan_copies_the_loads():
    loads = np.full((2, 2), 5)
    plan = ultraep.plan(loads, Topology(ranks=2, experts=2))
    loads[:] = 0
    assert plan.total == 20
    with pytest.raises(ValueError, match="read-only"):
        plan.loads[0, 0] = 1


@pytest.mark.parametrize("name", NAMED)
def test_equal_plans_have_equal_digests(name):
    loads, topology = NAMED[name]
    plan, again = (ultraep.plan(loads, topology) for _ in range(2))
    assert plan == again
    assert plan.digest() == again.digest()
    assert hash(plan) == hash(again)


def test_different_plans_have_different_digests():
    loads, topology = NAMED["zipf"]
    changes = ({}, {"policy": "none"}, {"tolerance": 0.1}, {"locality": False})
    plans = [ultraep.plan(loads, topology, BalanceConfig(**change)) for change in changes]
    plans.append(ultraep.plan(loads, dataclasses.replace(topology, domain=8)))
    plans.append(ultraep.plan(loads[::-1], topology))
    assert len({plan.digest() for plan in plans}) == len(plans)
    assert plans[0] != "a plan"


def _broken(plan, **changes):
    arrays = {
        name: getattr(plan, name).copy() for name in ("replicas", "quotas", "split", "rank_loads")
    }
    for name, change in changes.items():
        arrays[name] = change(arrays[name])
    return dataclasses.replace(plan, **arrays)


def _set(index, value):
    def change(array):
        array[index] = value
        return array

    return change


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("range", {"replicas": _set((0, 0), 999)}),
        ("range", {"replicas": _set((0, 1), -1)}),
        ("range", {"replicas": _set((0, 2), 1)}),
        ("quota", {"quotas": _set(0, 0)}),
        ("quota", {"quotas": _set(0, 10**6)}),
        ("split", {"split": _set((0, 0), -1)}),
        ("split", {"split": lambda s: s + np.eye(*s.shape, dtype=int)}),
        ("rank loads", {"rank_loads": lambda r: r + 1}),
        ("shape", {"split": lambda s: s[:, 1:]}),
        ("shape", {"quotas": lambda q: q[1:]}),
        ("shape", {"replicas": lambda r: r[:, :2]}),
        ("duplicate", {"replicas": lambda r: np.repeat(r[:1], len(r), axis=0)}),
        (
            "order",
            {
                "replicas": lambda r: r[::-1],
                "quotas": lambda q: q[::-1],
                "split": lambda s: s[::-1],
            },
        ),
    ],
)
def test_check_names_the_broken_rule(rule, changes):
    loads = workload.zipf(16, 64, ratio=3.0, tokens=512, shuffled=True)
    topology = Topology(ranks=16, experts=64, slots=1)
    plan = ultraep.plan(loads, topology)
    plan.check(loads)
    with pytest.raises(PlanError) as caught:
        _broken(plan, **changes).check(loads)
    assert caught.value.rule == rule


def test_check_names_a_replica_at_home_or_outside_its_domain():
    loads = one_hot(4, 4, tokens=100)
    plan = ultraep.plan(loads, Topology(ranks=4, experts=4, slots=1, domain=2))
    assert plan.replicas.tolist() == [[0, 1, 0]]
    for host, rule in ((0, "home"), (3, "domain")):
        with pytest.raises(PlanError) as caught:
            _broken(plan, replicas=_set((0, 1), host)).check(loads)
        assert caught.value.rule == rule


def test_check_names_slots_used_twice_or_too_many():
    loads = np.array([[100, 50, 0, 0], [100, 50, 0, 0]])
    plan = dataclasses.replace(
        ultraep.plan(loads, Topology(ranks=2, experts=4, slots=2)),
        replicas=np.array([[0, 1, 0], [1, 1, 0]]),
        quotas=np.array([50, 50]),
        split=np.array([[0, 50], [0, 50]]),
    )
    with pytest.raises(PlanError, match="share one slot"):
        plan.check(loads)
    one_slot = dataclasses.replace(plan, topology=Topology(ranks=2, experts=4, slots=1))
    with pytest.raises(PlanError, match="rank 1 has 2 replicas but 1 slots"):
        one_slot.check(loads)


def test_check_refuses_other_loads():
    loads, topology = NAMED["zipf"]
    plan = ultraep.plan(loads, topology)
    with pytest.raises(PlanError, match="source rank 0 routes") as caught:
        plan.check(loads + np.eye(*loads.shape, dtype=int))
    assert caught.value.rule == "loads"


def test_figures_of_a_plan():
    loads = np.array([[8, 0, 1, 1], [8, 0, 1, 1]])
    plan = ultraep.plan(loads, Topology(ranks=2, experts=4, slots=1))
    assert plan.initial_rank_loads.tolist() == [16, 4]
    assert plan.rank_loads.tolist() == [10, 10]
    assert plan.replicas.tolist() == [[0, 1, 0]]
    assert plan.quotas.tolist() == [6]
    assert plan.dense_quota().tolist() == [[10, 6], [0, 0], [0, 2], [0, 2]]
    assert (plan.num_replicas, plan.max_fanout, plan.max_ingress, plan.max_egress) == (1, 1, 1, 1)
    assert (plan.initial_imbalance, plan.imbalance, plan.lower_bound) == (1.6, 1.0, 1.0)
    assert plan.remote_tokens == 4  # two of rank 1 to expert 0, two of rank 0 to experts 2 and 3
    assert repr(plan) == (
        "Plan(ultraep, 2 ranks, 4 experts: imbalance 1.600 -> 1.000 with 1 replicas)"
    )
