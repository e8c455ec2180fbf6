"""Ranks that differ in speed: plans balance rows / speed."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from cases import NAMED, assert_same_plan, configs, problems, timed_configs, with_speeds
from hypothesis import given
from hypothesis import strategies as st

import ultraep
from ultraep import BalanceConfig, ConfigError, Rates, Topology
from ultraep.backends.limits import Limits
from ultraep.backends.reference.heuristics import limits_at
from ultraep.backends.reference.place import domains_of
from ultraep.config import PARTS

SPEEDS = st.lists(st.integers(10, 1000), min_size=1, max_size=6)
BALANCE = BalanceConfig(objective="balance")


def peak(rank_loads, speeds):
    """Return the least threshold that allows these loads."""
    return max(
        -(-int(load) * PARTS // speed) for load, speed in zip(rank_loads, speeds, strict=True)
    )


def one_domain(expert_loads, slots):
    """Return loads and topology; the rows of rank r are `expert_loads[r]`, one list per rank."""
    flat = [rows for own in expert_loads for rows in own]
    homes = [rank for rank, own in enumerate(expert_loads) for _ in own]
    ranks = len(expert_loads)
    topology = Topology(ranks=ranks, experts=len(flat), homes=homes, slots=slots)
    loads = np.zeros((ranks, len(flat)), dtype=np.int64)
    loads[0] = flat
    return loads, topology


def least_peak(total, speeds):
    """Return the best peak by trying every distribution of the rows over the ranks."""
    if len(speeds) == 1:
        return peak([total], speeds)
    ways = itertools.product(range(total + 1), repeat=len(speeds) - 1)
    return min(peak([*way, total - sum(way)], speeds) for way in ways if sum(way) <= total)


@given(problems(), st.one_of(configs, timed_configs), st.integers(10, 10_000))
def test_equal_speeds_plan_like_none(problem, config, speed):
    loads, topology = problem
    equal = replace(config, speeds=[speed] * topology.ranks)
    plan = ultraep.plan(loads, topology, equal)
    assert_same_plan(plan, ultraep.plan(loads, topology, config))
    assert plan.speeds == ()


@given(st.data(), SPEEDS)
def test_no_rank_exceeds_its_share_with_enough_slots(data, speeds):
    rows = st.lists(st.sampled_from([0, 1, 2, 7, 90, 1000]), min_size=1, max_size=3)
    expert_loads = data.draw(st.lists(rows, min_size=len(speeds), max_size=len(speeds)))
    homes = max(map(len, expert_loads))
    slots = min(-(-homes * max(speeds) // min(speeds)), sum(map(len, expert_loads)))
    loads, topology = one_domain(expert_loads, slots)
    config = replace(BALANCE, speeds=speeds)
    plan = ultraep.plan(loads, topology, config, backend="reference")
    plan.check(loads)
    (domain,) = domains_of(loads.sum(axis=0), Limits.of(topology, config))
    assert (plan.rank_loads <= limits_at(domain.mean, domain.weights, domain.scale)).all()
    assert plan.imbalance == pytest.approx(plan.lower_bound)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=4), st.data())
def test_the_best_possible_balance_of_tiny_loads(rows, data):
    speeds = data.draw(
        st.lists(
            st.sampled_from([250, 400, 600, 999, 1000]), min_size=len(rows), max_size=len(rows)
        )
    )
    loads, topology = one_domain([[number] for number in rows], slots=len(rows) - 1)
    plan = ultraep.plan(loads, topology, replace(BALANCE, speeds=speeds), backend="reference")
    if len(set(speeds)) == 1:
        assert plan.rank_loads.max() == -(-sum(rows) // len(rows))
    else:
        assert peak(plan.rank_loads, speeds) == least_peak(sum(rows), speeds)


@given(problems(), st.one_of(configs, timed_configs), st.data())
def test_plans_are_valid_and_respect_the_bound(problem, config, data):
    loads, topology = problem
    plan = ultraep.plan(loads, topology, with_speeds(data.draw, config, topology.ranks))
    plan.check(loads)
    assert plan.imbalance >= plan.lower_bound * (1 - 1e-12)
    if plan.config.objective == "balance" or plan.rates is None:
        assert plan.imbalance <= plan.initial_imbalance + 1e-12 or plan.config.tolerance
    if plan.time is not None:
        assert plan.time <= plan.time_without_replicas


@pytest.mark.parametrize("name", ["zipf", "zipf_shuffled", "zipf_two_slots", "wide"])
def test_one_slow_rank_gets_fewer_rows(name):
    loads, topology = NAMED[name]
    speeds = [1000] * topology.ranks
    speeds[3] = 800
    plan = ultraep.plan(loads, topology, replace(BALANCE, speeds=speeds))
    share = plan.rank_loads[3] / np.delete(plan.rank_loads, 3).mean()
    assert share == pytest.approx(0.8, abs=0.002)
    assert plan.imbalance < 1.001
    rows = ultraep.plan(loads, topology, BALANCE)
    assert rows.rank_loads.max() / 0.8 / rows.rank_loads.mean() == pytest.approx(1.25, abs=0.002)


def test_the_time_of_a_plan_depends_on_speeds():
    loads, topology = one_domain([[100], [0]], slots=1)
    config = BalanceConfig(rates=Rates(row=10, copy=3), speeds=(1000, 500))
    plan = ultraep.plan(loads, topology, config)
    assert plan.rank_loads.tolist() == [67, 33]
    assert plan.time == 670 + 3
    assert plan.time_without_replicas == 1000
    slow = ultraep.plan(loads, topology, replace(config, speeds=(500, 1000)))
    assert slow.rank_loads.tolist() == [33, 67]
    assert slow.time_without_replicas == 2000


def test_large_rates_are_scaled_for_slow_ranks():
    rates = Rates(row=2**31 - 1, copy=2**40, each=0, layer=10)
    config = BalanceConfig(rates=rates, speeds=(100, 1000))
    assert config.rates_for(2) == (2**31 // 10, 2**40 // 10, 0, 1)
    assert replace(config, speeds=(100, 100)).rates_for(2) == rates.numbers


def test_other_policies_ignore_speeds():
    loads, topology = NAMED["zipf"]
    speeds = [900, *[1000] * 15]
    for policy in ("none", "quota"):
        config = BalanceConfig(policy=policy)
        with_them = replace(config, speeds=speeds)
        assert ultraep.plan(loads, topology, with_them) == ultraep.plan(loads, topology, config)


@pytest.mark.parametrize(
    ("speeds", "message"),
    [
        ((1000, 0), "between 10 and 10000, in thousandths of the nominal speed, got 0 for rank 1"),
        ((-5, 1000), "got -5 for rank 0"),
        ((1000, 0.9), "got 0.9 for rank 1"),
        ((True, 1000), "got True for rank 0"),
        ((), "one value for each rank, got none"),
        ("fast", "one for each rank, or 'auto', or None, got 'fast'"),
        (900, "one for each rank, or 'auto', or None, got 900"),
        ((10, 1001), "a factor of 100, got 10 for rank 0 and 1001 for rank 1"),
    ],
)
def test_bad_speeds_are_refused(speeds, message):
    with pytest.raises(ConfigError, match=message):
        BalanceConfig(speeds=speeds)


def test_speeds_must_fit_the_ranks():
    loads, topology = NAMED["zipf"]
    for policy in ("ultraep", "none", "quota"):
        config = BalanceConfig(policy=policy, speeds=(1000, 900))
        with pytest.raises(ConfigError, match="each of the 16 ranks, got 2"):
            ultraep.plan(loads, topology, config)
