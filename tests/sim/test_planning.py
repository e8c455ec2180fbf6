"""Plans of the simulator are those of the runtime."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultraep import (
    BalanceConfig,
    Plan,
    PlanError,
    Problem,
    Topology,
    plan,
    policies,
    register_policy,
)
from ultraep.hops import hops
from ultraep.tools.sim.planning import (
    CopySets,
    copies_of_expert,
    plan_layer,
    received_by_rank,
    sends_by_rank,
    sum_by_rank,
)

from .small import copies_of

EXACT = ("none", "ultraep", "quota", "echo", "llep", "moonep")
BY_PAST = ("eplb", "lplb", "flashlb")
reproducibly = settings(derandomize=True, database=None, deadline=None, max_examples=60)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, Topology]:
    """[S, R, E] loads, and a topology with domains and uneven homes."""
    domain, domains = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    ranks, experts = domain * domains, draw(st.integers(1, 10))
    homes = draw(st.lists(st.integers(0, ranks - 1), min_size=experts, max_size=experts))
    slots = draw(st.integers(0, min(3, experts)))
    topology = Topology(ranks=ranks, experts=experts, slots=slots, domain=domain, homes=homes)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    largest = draw(st.sampled_from([0, 1, 5, 100, 20_000]))
    popularity_SE = rng.integers(0, largest, (draw(st.integers(1, 4)), experts), endpoint=True)
    loads_SRE = rng.integers(
        0, popularity_SE[:, None], (len(popularity_SE), ranks, experts), "i8", True
    )
    return loads_SRE, topology


def planned(loads_SRE: Any, topology: Topology, policy: str, interval: int = 1) -> CopySets:
    past_E = np.zeros(topology.experts, dtype=np.int64)
    config = BalanceConfig(policy=policy)
    return plan_layer(loads_SRE.sum(axis=1), topology, config, interval=interval, past_E=past_E)


def of_runtime(loads_SRE: Any, topology: Topology, policy: str) -> list[Plan]:
    return [plan(loads_RE, topology, BalanceConfig(policy=policy)) for loads_RE in loads_SRE]


def check_same(copies: CopySets, plans: list[Plan]) -> None:
    """Same copies with the same rows, and with them the same rank loads."""
    topology = plans[0].topology
    found = np.column_stack([copies.microbatch, copies.expert, copies.host, copies.rows])
    wanted = [
        [number, expert, host, quota]
        for number, made in enumerate(plans)
        for (expert, host, _), quota in zip(made.replicas.tolist(), made.quotas, strict=True)
    ]
    assert sorted(found.tolist()) == sorted(wanted)
    rank_SR = copies.rank_loads(topology)
    assert rank_SR.tolist() == [made.rank_loads.tolist() for made in plans]


@pytest.mark.parametrize("policy", EXACT)
@given(case=cases())
@reproducibly
def test_plans_are_those_of_the_runtime(policy: str, case: Any) -> None:
    loads_SRE, topology = case
    check_same(planned(loads_SRE, topology, policy), of_runtime(loads_SRE, topology, policy))


@pytest.mark.parametrize("policy", BY_PAST)
@given(case=cases(), interval=st.integers(1, 3), quiet=st.booleans())
@reproducibly
def test_places_are_by_the_interval_before(
    policy: str, case: Any, interval: int, quiet: bool
) -> None:
    loads_SRE, topology = case
    loads_SE = loads_SRE.sum(axis=1)
    past_E = np.arange(topology.experts)[::-1] * (0 if quiet else 100)
    config = BalanceConfig(policy=policy)
    copies = plan_layer(loads_SE, topology, config, interval=interval, past_E=past_E)
    plans = []
    for number, loads_RE in enumerate(loads_SRE):
        begin = number // interval * interval
        history = loads_SE[begin - interval : begin] if begin else past_E
        plans.append(plan(loads_RE, topology, config, history=history))
    check_same(copies, plans)


# Policies of one's own


@pytest.fixture
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "_registry", dict(policies._registry))


TWO = Topology(ranks=2, experts=2)
LOADS_SRE = np.array([[[3, 1], [2, 1]], [[1, 6], [1, 5]], [[4, 0], [4, 0]], [[0, 2], [2, 1]]])


def half_of_the_former_hottest(problem: Problem) -> Any:
    """Half of the expert that was the hottest goes to the other rank."""
    assert problem.loads.shape == (2, 2)
    assert problem.loads.sum(axis=0).tolist() == problem.expert_loads.tolist()
    assert problem.history is not None
    expert = int(problem.history.argmax())
    quota = int(problem.expert_loads[expert]) // 2
    return np.array([[expert, 1 - expert, quota]] if quota else [], np.int64).reshape(-1, 3)


@pytest.mark.usefixtures("empty_registry")
def test_a_policy_of_ones_own_is_asked_with_the_past_it_keeps() -> None:
    register_policy("mine", needs_history=True)(half_of_the_former_hottest)
    config, past_E = BalanceConfig(policy="mine"), np.array([0, 9])
    loads_SE = LOADS_SRE.sum(axis=1)
    copies = plan_layer(loads_SE, TWO, config, interval=2, past_E=past_E)
    pasts = [past_E, past_E, loads_SE[:2], loads_SE[:2]]
    pairs = zip(LOADS_SRE, pasts, strict=True)
    check_same(copies, [plan(loads, TWO, config, history=past) for loads, past in pairs])
    found = np.column_stack([copies.microbatch, copies.expert, copies.rows]).tolist()
    assert found == [[0, 1, 1], [1, 1, 5], [3, 1, 1]]


@pytest.mark.usefixtures("empty_registry")
def test_a_policy_may_decide_for_an_interval_at_once() -> None:
    seen = []

    def over_interval(problem: Problem, loads_SE: Any) -> Any:
        seen.append((problem.history, loads_SE))
        return np.array([[len(loads_SE) - 1, 1, 0, 1]])

    register_policy("mine", needs_history=True, over_interval=over_interval)(
        half_of_the_former_hottest
    )
    loads_SE, past_E = LOADS_SRE.sum(axis=1)[[0, 1, 3]], np.array([0, 9])
    config = BalanceConfig(policy="mine")
    copies = plan_layer(loads_SE, TWO, config, interval=2, past_E=past_E)
    assert [past.tolist() for past, _ in seen] == [[0, 9], loads_SE[:2].sum(axis=0).tolist()]
    assert [now.tolist() for _, now in seen] == [loads_SE[:2].tolist(), loads_SE[2:].tolist()]
    assert np.column_stack([copies.microbatch, copies.host, copies.rows]).tolist() == [
        [1, 0, 1],
        [2, 0, 1],
    ]


@pytest.mark.usefixtures("empty_registry")
@pytest.mark.parametrize(
    ("copies", "rule"),
    [
        ([[0, 1, 0, 99]], "quota"),
        ([[0, 1, 1, 1]], "home"),
        ([[0, 1, 0, 1], [0, 1, 0, 1]], "duplicate"),
        ([[0, 2, 0, 1]], "range"),
        ([[4, 1, 0, 1]], "range"),
        ([[1, 0, 1]], "shape"),
    ],
)
def test_mistakes_over_an_interval_are_named(copies: Any, rule: str) -> None:
    register_policy(
        "mine", needs_history=True, over_interval=lambda problem, loads_SE: np.array(copies)
    )(half_of_the_former_hottest)
    config = BalanceConfig(policy="mine")
    with pytest.raises(PlanError) as caught:
        plan_layer(LOADS_SRE.sum(axis=1), TWO, config, interval=9, past_E=np.array([0, 9]))
    assert caught.value.rule == rule


@pytest.mark.parametrize("policy", ["ultraep", "quota", "echo", "llep"])
@given(case=cases())
@reproducibly
def test_experts_travel_as_the_runtime_sends_them(policy: str, case: Any) -> None:
    loads_SRE, topology = case
    copies = planned(loads_SRE, topology, policy)
    direct, chain = (sends_by_rank(copies, topology, chain=chain) for chain in (False, True))
    received = received_by_rank(copies, topology)
    of_expert = copies_of_expert(copies, topology)
    for number, made in enumerate(of_runtime(loads_SRE, topology, policy)):
        for mode, sends in (("direct", direct), ("chain", chain)):
            way = hops(made, mode)
            assert counted([hop.sender for hop in way], topology.ranks) == sends[number].tolist()
        assert counted([hop.receiver for hop in way], topology.ranks) == received[number].tolist()
        assert counted([hop.expert for hop in way], topology.experts) == of_expert[number].tolist()


def counted(places: list[int], size: int) -> list[int]:
    counts = Counter(places)
    return [counts[place] for place in range(size)]


# By hand: rank 0 has expert 0 for ranks 1 and 2, rank 1 has expert 1 for rank 3


def by_hand() -> tuple[CopySets, Topology]:
    topology = Topology(ranks=4, experts=4, slots=1)
    moved = [(1, 0, 1, 4), (1, 0, 2, 5), (1, 1, 3, 2)]
    return copies_of([[6, 6, 6, 6], [14, 6, 2, 2]], moved, topology), topology


def test_sends_by_hand() -> None:
    # In a chain rank 2 comes first and passes expert 0 on: rank 1 has one of its own to send.
    copies, topology = by_hand()
    assert sends_by_rank(copies, topology, chain=False).tolist() == [[0] * 4, [2, 1, 0, 0]]
    assert sends_by_rank(copies, topology, chain=True).tolist() == [[0] * 4, [1, 1, 1, 0]]
    assert copies_of_expert(copies, topology).tolist() == [[0] * 4, [2, 1, 0, 0]]
    assert received_by_rank(copies, topology).tolist() == [[0] * 4, [0, 1, 1, 1]]


def test_sums_keep_fractions_and_ranks_without_experts() -> None:
    topology = Topology(ranks=4, experts=3, homes=[3, 0, 3])
    copies = copies_of([[9, 9, 9]], [(0, 0, 1, 2), (0, 2, 1, 2)], topology)
    home, moved = np.array([[0.5, 0.25, 1.0]]), np.array([0.125, 2.0])
    assert sum_by_rank(copies, home, moved, topology).tolist() == [[0.25, 2.125, 0.0, 1.5]]
