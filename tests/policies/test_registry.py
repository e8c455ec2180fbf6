"""A policy of one's own is one registered function."""

import numpy as np
import pytest

import ultraep
from ultraep import BalanceConfig, ConfigError, PlanError, Topology, policies, register_policy

LOADS = np.array([[8, 0], [8, 0]])
TOPOLOGY = Topology(ranks=2, experts=2, slots=1)


@pytest.fixture
def registered(monkeypatch):
    """Registers a policy for one test."""
    monkeypatch.setattr(policies, "_registry", dict(policies._registry))

    def register(copies, **flags):
        register_policy("mine", **flags)(lambda problem: np.array(copies))
        return BalanceConfig(policy="mine")

    return register


def test_one_function_is_enough(registered):
    plan = ultraep.plan(LOADS, TOPOLOGY, registered([[0, 1, 5]]))
    plan.check(LOADS)
    assert plan.rank_loads.tolist() == [11, 5]
    assert "mine" in ultraep.policy_names()


def test_it_sees_the_whole_problem(monkeypatch):
    monkeypatch.setattr(policies, "_registry", dict(policies._registry))
    seen = []

    @register_policy("curious", needs_history=True)
    def curious(problem):
        """Look, and do nothing."""
        seen.append(problem)
        return np.empty((0, 3), dtype=np.int64)

    config = BalanceConfig(policy="curious")
    ultraep.plan(LOADS, TOPOLOGY, config, history=[[1, 2], [3, 4]])
    (problem,) = seen
    assert problem.history.tolist() == [4, 6]
    assert problem.expert_loads.tolist() == [16, 0]
    assert problem.topology == TOPOLOGY
    assert policies.get_policy("curious").summary == "Look, and do nothing."
    with pytest.raises(ConfigError, match="'curious' needs past loads; pass history="):
        ultraep.plan(LOADS, TOPOLOGY, config)


@pytest.mark.parametrize(
    ("copies", "rule"),
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
def test_its_mistakes_are_named(registered, copies, rule):
    with pytest.raises(PlanError) as caught:
        ultraep.plan(LOADS, TOPOLOGY, registered(copies))
    assert caught.value.rule == rule


def test_its_limits_are_held_unless_it_says_otherwise(registered):
    none = Topology(ranks=2, experts=2, slots=0)
    with pytest.raises(PlanError, match="1 replicas but 0 slots"):
        ultraep.plan(LOADS, none, registered([[0, 1, 5]]))


def test_it_may_say_otherwise(registered):
    none = Topology(ranks=2, experts=2, slots=0)
    ultraep.plan(LOADS, none, registered([[0, 1, 5]], within_limits=False)).check(LOADS)


def test_an_interval_needs_a_past(registered):
    with pytest.raises(ConfigError, match="'mine' has no past to keep"):
        registered([[0, 1, 5]], over_interval=lambda problem, loads: np.empty((0, 4), np.int64))


def test_names_are_taken_once(registered):
    registered([[0, 1, 5]])
    with pytest.raises(ConfigError, match="'mine' is registered already"):
        registered([[0, 1, 6]])


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="unknown policy 'best'; known are none, ultraep"):
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
def test_bad_history_is_refused(history, message):
    with pytest.raises(ultraep.LoadError, match=message):
        ultraep.plan(LOADS, TOPOLOGY, history=history)
