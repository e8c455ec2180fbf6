"""Plans of the simulator are those of the runtime."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultraep import BalanceConfig, Plan, Topology, plan
from ultraep.replicate import hops
from ultraep.sim.planning import (
    Copies,
    copies_of_expert,
    plan_layer,
    received_by_rank,
    sends_by_rank,
    sum_by_rank,
)

from .small import copies_of

EXACT = ("none", "ultraep", "quota", "echo", "llep")
BY_PAST = ("eplb", "lplb")
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


def planned(loads_SRE: Any, topology: Topology, policy: str, interval: int = 1) -> Copies:
    past_E = np.zeros(topology.experts, dtype=np.int64)
    config = BalanceConfig(policy=policy)
    return plan_layer(loads_SRE.sum(axis=1), topology, config, interval=interval, past_E=past_E)


def of_runtime(loads_SRE: Any, topology: Topology, policy: str) -> list[Plan]:
    return [plan(loads_RE, topology, BalanceConfig(policy=policy)) for loads_RE in loads_SRE]


def check_same(copies: Copies, plans: list[Plan]) -> None:
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


@pytest.mark.parametrize("policy", EXACT + BY_PAST)
@given(case=cases())
@reproducibly
def test_no_row_is_lost(policy: str, case: Any) -> None:
    loads_SRE, topology = case
    copies = planned(loads_SRE, topology, policy, interval=2)
    assert (copies.rows > 0).all()
    assert (copies.at_home >= 0).all()
    assert (copies.host != topology.home_of_expert[copies.expert]).all()
    total_S = loads_SRE.sum(axis=(1, 2))
    assert copies.rank_loads(topology).sum(axis=1).tolist() == total_S.tolist()
    arrived = np.bincount(copies.microbatch, copies.rows, len(total_S))
    assert (copies.at_home.sum(axis=1) + arrived).tolist() == total_S.tolist()


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


def by_hand() -> tuple[Copies, Topology]:
    topology = Topology(ranks=4, experts=4, slots=1)
    moved = [(1, 0, 1, 4), (1, 0, 2, 5), (1, 1, 3, 2)]
    return copies_of([[6, 6, 6, 6], [14, 6, 2, 2]], moved, topology), topology


def test_rows_by_hand() -> None:
    copies, topology = by_hand()
    assert copies.at_home.tolist() == [[6, 6, 6, 6], [5, 4, 2, 2]]
    assert copies.rank_loads(topology).tolist() == [[6, 6, 6, 6], [5, 8, 7, 4]]


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
