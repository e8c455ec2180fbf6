"""Policies of other projects, and policies that users register."""

from typing import Any

import numpy as np
import pytest
from cases import small_problems
from hypothesis import given, settings
from hypothesis import strategies as st

import ultraep
from ultraep import (
    BalanceConfig,
    ConfigError,
    Plan,
    PlanError,
    Topology,
    plan,
    policies,
    register_policy,
)
from ultraep.policies import BUILT_IN
from ultraep_tools.baselines import BASELINES

NEEDS_HISTORY = ("eplb", "lplb")
PEERS = ("quota", *NEEDS_HISTORY)
reproducibly = settings(derandomize=True, database=None, deadline=None, max_examples=40)


def make(
    policy: str, loads: Any, topology: Topology, *, history: Any = None, **config: Any
) -> Plan:
    """Plan with the reference backend. By default past loads equal the current ones."""
    if policy in NEEDS_HISTORY and history is None:
        history = loads
    chosen = BalanceConfig(policy=policy, **config)
    return plan(loads, topology, chosen, backend="reference", history=history)


def replicas(policy: str, expert_loads: list[int], topology: Topology, **settings: Any) -> Any:
    """Replicas (expert, host, quota) when all rows come from rank 0."""
    loads = np.zeros((topology.ranks, topology.experts), dtype=np.int64)
    loads[0] = expert_loads
    result = make(policy, loads, topology, **settings)
    result.check(loads)
    return np.column_stack([result.replicas[:, :2], result.quotas]).tolist()


def ranks(count: int, experts: int | None = None, **sizes: Any) -> Topology:
    return Topology(ranks=count, experts=count if experts is None else experts, **sizes)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, Topology, Any]:
    (loads_RE,), topology = draw(small_problems())
    most, rng = draw(st.sampled_from([0, 3, 1000])), np.random.default_rng(draw(st.integers(0, 99)))
    return loads_RE, topology, rng.integers(0, most, topology.experts, endpoint=True)


@pytest.mark.parametrize("policy", [*BUILT_IN, *BASELINES])
@given(case=cases(), tolerance=st.sampled_from([0.0, 0.01, 0.5]))
@reproducibly
def test_every_policy_makes_valid_plans(policy: str, case: Any, tolerance: float) -> None:
    loads_RE, topology, history_E = case
    result = make(policy, loads_RE, topology, history=history_E, tolerance=tolerance)
    result.check(loads_RE)
    assert result == make(policy, loads_RE, topology, history=history_E, tolerance=tolerance)
    if policy not in NEEDS_HISTORY:
        assert result.imbalance <= result.initial_imbalance


# Examples by hand of what the originals lack, above all domains and uneven homes;
# `test_golden_peers.py` compares the rest.


def example(policy: str, loads: Any, topology: Topology, placed: Any, **settings: Any) -> Any:
    return policy, loads, topology, placed, settings


TWO = ranks(2)
EXAMPLES = {
    # Threshold 41, excess 79. Expert 0 gives 41 to rank 1; of the other 38 the last candidate could
    # take 18, less than the fair share of 38. Expert 1 gives them all.
    "quota rejects a replica below its fair share": example(
        "quota", [60, 60, 0, 0], ranks(3, 4, homes=[0, 0, 1, 2]), [[0, 1, 41], [1, 2, 38]]
    ),
    # 50 * 1.5 = 75, and 1 % more: 76.
    "quota adds the tolerance": example("quota", [100, 0], TWO, [[0, 1, 24]], tolerance=0.5),
    "quota plans every domain": example(
        "quota", [100, 0, 0, 200], ranks(4, domain=2), [[0, 1, 49], [3, 2, 99]]
    ),
    "eplb without a past": example("eplb", [8, 6, 1, 1], ranks(2, 4), [], history=[0] * 4),
    # The first expert of each rank has its replica on the other one.
    "lplb without a past": example("lplb", [8, 6, 1, 1], ranks(2, 4), [[0, 1, 6]], history=[0] * 4),
    # Rank 1 ends its domain: its replica is on rank 0, not on rank 2.
    "lplb wraps around in a domain": example(
        "lplb", [0, 8, 0, 4], ranks(4, domain=2), [[1, 0, 4], [3, 2, 2]]
    ),
    "lplb in domains of one rank": example("lplb", [0, 8, 0, 4], ranks(4, domain=1), []),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_by_hand(name: str) -> None:
    policy, loads, topology, placed, settings = EXAMPLES[name]
    assert replicas(policy, loads, topology, **settings) == placed


@pytest.mark.parametrize("policy", PEERS)
def test_limits_that_a_policy_cannot_honour_are_refused(policy: str) -> None:
    with pytest.raises(ConfigError, match=f"{policy}.*max_replicas=3.*leave it at None"):
        replicas(policy, [4, 0], TWO, max_replicas=3)
    if policy != "quota":
        with pytest.raises(ConfigError, match=f"{policy}.*min_tokens_per_replica=9.*leave it at 1"):
            replicas(policy, [4, 0], TWO, min_tokens_per_replica=9)
    if policy in NEEDS_HISTORY:
        with pytest.raises(ConfigError, match="pass history="):
            plan([[1]], ranks(1), BalanceConfig(policy=policy))


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
