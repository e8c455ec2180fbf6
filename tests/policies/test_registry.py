"""Policies that users register."""

import numpy as np
import pytest

import ultraep
from ultraep import BalanceConfig, ConfigError, PlanError, Topology, policies, register_policy

LOADS = np.array([[8, 0], [8, 0]])
TOPOLOGY = Topology(ranks=2, experts=2, slots=1)


@pytest.fixture
def registered(monkeypatch):
    """Registers a policy that returns fixed replicas, for one test."""
    monkeypatch.setattr(policies, "_registry", dict(policies._registry))

    def register(placed, **flags):
        register_policy("mine", **flags)(lambda problem: np.array(placed))
        return BalanceConfig(policy="mine")

    return register


def test_a_policy_is_one_function(registered):
    plan = ultraep.plan(LOADS, TOPOLOGY, registered([[0, 1, 5]]))
    plan.check(LOADS)
    assert plan.rank_loads.tolist() == [11, 5]
    assert "mine" in ultraep.policy_names()


@pytest.mark.usefixtures("registered")
def test_a_policy_receives_the_whole_problem():
    problems = []

    @register_policy("curious", needs_history=True)
    def curious(problem):
        """Look, and do nothing."""
        problems.append(problem)
        return np.empty((0, 3), dtype=np.int64)

    config = BalanceConfig(policy="curious")
    ultraep.plan(LOADS, TOPOLOGY, config, history=[[1, 2], [3, 4]])
    (problem,) = problems
    assert problem.history.tolist() == [4, 6]
    assert problem.expert_loads.tolist() == [16, 0]
    assert problem.topology == TOPOLOGY
    with pytest.raises(ConfigError, match="'curious' needs past loads; pass history="):
        ultraep.plan(LOADS, TOPOLOGY, config)


@pytest.mark.parametrize(
    ("placed", "rule"),
    [
        ([[0, 0, 5]], "home"),
        ([[0, 1, 5], [0, 1, 3]], "duplicate"),
        ([[0, 1, 17]], "quota"),
        ([[0, 1, 0]], "quota"),
        ([[0, 2, 5]], "range"),
        ([[2, 0, 5]], "range"),
        ([[0, 1]], "shape"),
        ([0, 1, 5], "shape"),
        ([[0.0, 1.0, 5.0]], "shape"),
    ],
)
def test_mistakes_are_named(registered, placed, rule):
    with pytest.raises(PlanError) as caught:
        ultraep.plan(LOADS, TOPOLOGY, registered(placed))
    assert caught.value.rule == rule


@pytest.mark.parametrize("within_limits", [True, False])
def test_slots_limit_only_policies_within_limits(registered, within_limits):
    no_slots = Topology(ranks=2, experts=2, slots=0)
    config = registered([[0, 1, 5]], within_limits=within_limits)
    if within_limits:
        with pytest.raises(PlanError, match="1 replicas but 0 slots"):
            ultraep.plan(LOADS, no_slots, config)
    else:
        ultraep.plan(LOADS, no_slots, config).check(LOADS)


def test_invalid_registrations(registered):
    registered([[0, 1, 5]])
    with pytest.raises(ConfigError, match="'mine' is registered already"):
        registered([[0, 1, 6]])
    with pytest.raises(ConfigError, match="unknown policy 'best'; choose from none, ultraep"):
        ultraep.plan(LOADS, TOPOLOGY, BalanceConfig(policy="best"))


@pytest.mark.parametrize(
    ("history", "message"),
    [
        ([[1, 2, 3]], r"2 experts\], got \[1, 3\]"),
        ([-1, 2], r"0\.\.2147483647, got -1\.\.2"),
        ([0.5, 1.0], "integers, got float64"),
        (5, r"got \[\]"),
    ],
)
def test_invalid_history(history, message):
    with pytest.raises(ultraep.LoadError, match=message):
        ultraep.plan(LOADS, TOPOLOGY, history=history)
