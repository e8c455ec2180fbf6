"""The policies we compare with: sound plans, hand-computed examples, published figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from ultraep import BalanceConfig, Plan, Topology, plan, workload
from ultraep.errors import ConfigError
from ultraep.policies import BUILT_IN, get_policy
from ultraep.policies.lplb import Graph, place_on_torus, share_evenly

NEEDS_HISTORY = ("eplb", "lplb")
reproducibly = settings(derandomize=True, database=None, deadline=None, max_examples=40)


def make(
    policy: str, loads: Any, topology: Topology, *, history: Any = None, **config: Any
) -> Plan:
    """Plan with the reference backend; past loads are the current ones unless given."""
    if policy in NEEDS_HISTORY and history is None:
        history = loads
    chosen = BalanceConfig(policy=policy, **config)
    return plan(loads, topology, chosen, backend="reference", history=history)


def copies(policy: str, expert_loads: list[int], topology: Topology, **others: Any) -> Any:
    """Copies (expert, host, quota) when all tokens come from rank 0."""
    loads = np.zeros((topology.ranks, topology.experts), dtype=np.int64)
    loads[0] = expert_loads
    made = make(policy, loads, topology, **others)
    made.check(loads)
    return np.column_stack([made.replicas[:, :2], made.quotas]).tolist()


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, Topology, Any]:
    """Loads, a topology with domains and uneven homes, and past loads."""
    domain, domains = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    ranks, experts = domain * domains, draw(st.integers(1, 10))
    homes = draw(st.lists(st.integers(0, ranks - 1), min_size=experts, max_size=experts))
    slots = draw(st.integers(0, min(2, experts)))
    topology = Topology(ranks=ranks, experts=experts, slots=slots, domain=domain, homes=homes)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    largest = draw(st.sampled_from([0, 1, 5, 100, 20_000]))
    popularity_E = rng.integers(0, largest, experts, endpoint=True)
    loads_RE = rng.integers(0, popularity_E, (ranks, experts), endpoint=True)
    history_E = rng.integers(0, draw(st.sampled_from([0, 3, 1000])), experts, endpoint=True)
    return loads_RE, topology, history_E


@pytest.mark.parametrize("policy", BUILT_IN)
@given(case=cases(), tolerance=st.sampled_from([0.0, 0.01, 0.5]))
@reproducibly
def test_every_policy_makes_sound_plans(policy: str, case: Any, tolerance: float) -> None:
    loads_RE, topology, history_E = case
    made = make(policy, loads_RE, topology, history=history_E, tolerance=tolerance)
    made.check(loads_RE)
    again = make(policy, loads_RE, topology, history=history_E, tolerance=tolerance)
    assert made == again
    if policy != "eplb":
        assert made.imbalance <= made.initial_imbalance


@pytest.mark.parametrize("policy", BUILT_IN)
@pytest.mark.parametrize(("ranks", "slots"), [(1, 0), (1, 2), (4, 0), (4, 2)])
def test_empty_loads_and_single_ranks_need_nothing(policy: str, ranks: int, slots: int) -> None:
    topology = Topology(ranks=ranks, experts=4, slots=slots)
    assert copies(policy, [0, 0, 0, 0], topology) == []
    if ranks == 1:
        assert copies(policy, [5, 0, 2, 1], topology) == []


@pytest.mark.parametrize("policy", ["quota", "echo", "llep"])
@given(case=cases())
@reproducibly
def test_no_copy_below_the_least_number_of_tokens(policy: str, case: Any) -> None:
    loads_RE, topology, _ = case
    made = make(policy, loads_RE, topology, min_tokens_per_replica=7)
    assert (made.quotas >= 7).all()


# Hand-computed examples


def test_quota_stops_one_percent_above_the_mean() -> None:
    # The mean is 50, the first probe at ceil(50.5) = 51: 49 tokens must leave.
    assert copies("quota", [100, 0], Topology(ranks=2, experts=2)) == [[0, 1, 49]]


def test_quota_rejects_a_copy_below_its_fair_share() -> None:
    # Threshold 41, need 79. Expert 0 gives 41 to rank 1; of the 38 left it could give 18 to the
    # last candidate, less than the fair share of 38. Expert 1 gives them all.
    topology = Topology(ranks=3, experts=4, homes=[0, 0, 1, 2])
    assert copies("quota", [60, 60, 0, 0], topology) == [[0, 1, 41], [1, 2, 38]]


def test_quota_keeps_a_token_at_home_and_probes_again() -> None:
    # At threshold 6 each expert may give 4 of its 5 tokens, below the fair share of 9 over 2.
    # At threshold 7 the need is 8 and the fair share 4.
    topology = Topology(ranks=3, experts=5, slots=2, homes=[0, 0, 0, 1, 2])
    assert copies("quota", [5, 5, 5, 0, 0], topology) == [[0, 1, 4], [1, 2, 4]]


def test_quota_falls_back_to_a_search_with_a_floor() -> None:
    # One slot takes at most 2999 of an expert's 3000 tokens, so rank 0 cannot go below 6001.
    topology = Topology(ranks=2, experts=4, homes=[0, 0, 0, 1])
    assert copies("quota", [3000, 3000, 3000, 0], topology) == [[0, 1, 2999]]
    assert copies("quota", [300, 300, 300, 0], topology) == [[0, 1, 299]]
    floor = {"min_tokens_per_replica": 1024}
    assert copies("quota", [300, 300, 300, 0], topology, **floor) == []


def test_quota_adds_the_tolerance_to_the_lower_end() -> None:
    # 50 * 1.5 = 75, and 1 % on top: 76.
    assert copies("quota", [100, 0], Topology(ranks=2, experts=2), tolerance=0.5) == [[0, 1, 24]]


def test_quota_solves_every_domain_for_itself() -> None:
    topology = Topology(ranks=4, experts=4, domain=2)
    assert copies("quota", [100, 0, 0, 200], topology) == [[0, 1, 49], [3, 2, 99]]


def test_echo_fills_the_roomiest_rank_first() -> None:
    # The mean is 4: expert 0 overflows by 5, rank 2 has room for 4 and rank 1 for 1.
    topology = Topology(ranks=3, experts=3)
    assert copies("echo", [9, 3, 0], topology) == [[0, 1, 1], [0, 2, 4]]
    assert copies("echo", [9, 3, 0], topology, tolerance=0.5) == [[0, 2, 4]]


def test_echo_keeps_the_largest_overlaps_of_a_rank() -> None:
    # Rank 2 overlaps expert 0 by 3 tokens and expert 1 by 1.
    assert copies("echo", [7, 5, 0], Topology(ranks=3, experts=3, slots=1)) == [[0, 2, 3]]
    two_slots = Topology(ranks=3, experts=3, slots=2)
    assert copies("echo", [7, 5, 0], two_slots) == [[0, 2, 3], [1, 2, 1]]


def test_echo_takes_the_overflow_from_the_hottest_experts() -> None:
    # Rank 0 is 7 above the mean of 7: expert 2 gives all of its 6 tokens, expert 0 only 1.
    topology = Topology(ranks=2, experts=4, slots=2, homes=[0, 1, 0, 0])
    assert copies("echo", [5, 0, 6, 3], topology) == [[0, 1, 1], [2, 1, 6]]


def test_llep_spills_to_the_least_loaded_rank_without_slots() -> None:
    topology = Topology(ranks=3, experts=3, slots=0)
    assert copies("llep", [9, 3, 0], topology) == [[0, 1, 1], [0, 2, 4]]
    assert copies("llep", [9, 3, 0], topology, tolerance=0.5) == [[0, 2, 3]]


def test_llep_counts_what_is_still_pending() -> None:
    # The mean is 5. Rank 2 has 6 tokens pending when expert 0 spills, so all 4 go to rank 1.
    topology = Topology(ranks=3, experts=4, homes=[0, 1, 2, 2])
    assert copies("llep", [9, 0, 3, 3], topology) == [[0, 1, 4], [2, 1, 1]]


def test_eplb_splits_equally_and_gives_the_remainder_to_the_first_ranks() -> None:
    # Four places for two experts on two ranks: both stand on both.
    topology = Topology(ranks=2, experts=2)
    assert copies("eplb", [7, 1], topology, history=[30, 10]) == [[0, 1, 3], [1, 0, 1]]


def test_eplb_moves_homes() -> None:
    # Expert 0 takes rank 0, expert 1 rank 1, which is still the lighter one when expert 2 comes;
    # only rank 0 has a place left for expert 3.
    topology = Topology(ranks=2, experts=4, slots=0)
    assert copies("eplb", [8, 6, 1, 1], topology) == [[1, 1, 6], [3, 0, 1]]


@pytest.mark.parametrize("policy", NEEDS_HISTORY)
def test_without_past_load_experts_stay_at_home(policy: str) -> None:
    topology = Topology(ranks=2, experts=4)
    assert copies(policy, [8, 6, 1, 1], topology, history=[0, 0, 0, 0]) == []


def test_lplb_shares_one_copy_with_the_next_rank() -> None:
    # Rank 0 gives 4 of its 9 tokens to rank 1, rank 1 both of its own to rank 2: 5, 4 and 3.
    # Rank 2 could take more, but a copy takes no tokens of other experts.
    topology = Topology(ranks=3, experts=3)
    assert copies("lplb", [9, 2, 1], topology) == [[0, 1, 4], [1, 2, 2]]


def test_lplb_copies_what_was_heaviest_to_the_neighbours_in_turn() -> None:
    # A torus of 4 ranks and two slots: the heaviest expert goes one rank on, the next one two.
    topology = Topology(ranks=4, experts=12, slots=2)
    history = [1, 3, 2, 0, 0, 1, 5, 5, 5, 0, 0, 0]
    graph = place_on_torus(np.array(history), topology)
    found = np.column_stack([graph.expert, graph.home, graph.host]).tolist()
    assert found[:4] == [[1, 0, 1], [2, 0, 2], [5, 1, 2], [3, 1, 3]]
    assert found[4:] == [[6, 2, 3], [7, 2, 0], [9, 3, 0], [10, 3, 1]]


def test_lplb_wraps_around_inside_of_a_domain() -> None:
    # Rank 1 ends its domain: the copy goes back to rank 0, not on to rank 2.
    topology = Topology(ranks=4, experts=4, domain=2)
    assert copies("lplb", [0, 8, 0, 4], topology) == [[1, 0, 4], [3, 2, 2]]
    assert copies("lplb", [0, 8, 0, 4], Topology(ranks=4, experts=4, domain=1)) == []


def test_lplb_cannot_halve_an_expert_twice() -> None:
    # With one copy per expert the hot one stays on two ranks, whatever the others have free.
    assert copies("lplb", [8, 0, 0, 0], Topology(ranks=4, experts=4, slots=2)) == [[0, 1, 4]]


@pytest.mark.parametrize("homes", [[0, 0, 0], [2, 2, 2], [3, 3, 1], [1, 2, 2]])
def test_lplb_counts_ranks_without_experts_as_empty(homes: list[int]) -> None:
    topology = Topology(ranks=4, experts=3, slots=1, homes=homes)
    graph = place_on_torus(np.array([5, 4, 3]), topology)
    moved_X = share_evenly(np.array([[8, 8, 8]]), graph, topology)[0]
    rank_R = served(np.array([8, 8, 8]), graph, moved_X, topology)
    assert rank_R.sum() == 24
    assert rank_R.max() == round(fullest_by_program(np.array([8, 8, 8]), graph, topology))


@given(case=cases(), slots=st.integers(0, 5))
@reproducibly
def test_lplb_splits_as_well_as_a_linear_program(case: Any, slots: int) -> None:
    loads_RE, drawn, history_E = case
    topology = Topology(
        ranks=drawn.ranks,
        experts=drawn.experts,
        slots=min(slots, drawn.experts),
        domain=drawn.domain,
        homes=drawn.homes,
    )
    graph = place_on_torus(history_E, topology)
    check_graph(graph, topology)
    moved_RX = share_evenly(loads_RE, graph, topology)  # every source rank as a microbatch
    for loads_E, moved_X in zip(loads_RE, moved_RX, strict=True):
        assert (moved_X >= 0).all()
        assert (moved_X <= loads_E[graph.expert]).all()
        assert (share_evenly(loads_E[None], graph, topology)[0] == moved_X).all()
        fullest = served(loads_E, graph, moved_X, topology).max()
        optimum = fullest_by_program(loads_E, graph, topology)
        steps = min(len(graph.expert), topology.domain_size - 1)
        assert optimum - 1e-6 <= fullest <= optimum + steps / 2 + 1e-6


def check_graph(graph: Graph, topology: Topology) -> None:
    """One copy per expert, as many per rank as there are slots, none outside of the domain."""
    assert len(set(graph.expert.tolist())) == len(graph.expert)
    assert (topology.home_of_expert[graph.expert] == graph.home).all()
    assert (graph.home != graph.host).all()
    assert (graph.home // topology.domain_size == graph.host // topology.domain_size).all()
    for ends in (graph.home, graph.host):
        assert (np.bincount(ends, minlength=topology.ranks) <= topology.slots).all()
    for chosen in graph.classes:
        ranks = np.concatenate([graph.home[chosen], graph.host[chosen]])
        assert len(np.unique(ranks)) == len(ranks)
    colours = np.concatenate([*graph.classes, np.zeros(0, np.int64)])
    assert sorted(colours.tolist()) == list(range(len(graph.expert)))


def served(loads_E: Any, graph: Graph, moved_X: Any, topology: Topology) -> Any:
    """[R] tokens of every rank."""
    rank_R = np.zeros(topology.ranks, dtype=np.int64)
    np.add.at(rank_R, topology.home_of_expert, loads_E)
    np.add.at(rank_R, graph.home, -moved_X)
    np.add.at(rank_R, graph.host, moved_X)
    return rank_R


def fullest_by_program(loads_E: Any, graph: Graph, topology: Topology) -> float:
    """Tokens of the fullest rank by HiGHS; fractions of tokens are allowed."""
    edges = len(graph.expert)
    effect = np.zeros((topology.ranks, edges + 1))  # last: the fullest rank
    effect[graph.home, np.arange(edges)] = -1
    effect[graph.host, np.arange(edges)] = 1
    effect[:, edges] = -1
    at_home_R = np.bincount(topology.home_of_expert, weights=loads_E, minlength=topology.ranks)
    limits = [*((0, int(load)) for load in loads_E[graph.expert]), (0, None)]
    found = linprog([0] * edges + [1], A_ub=effect, b_ub=-at_home_R, bounds=limits)
    assert found.success
    return float(found.fun)


# Published and measured figures: 64 ranks, 256 experts, top-8, 8192 tokens per rank


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("policy", "slots", "ratio", "copies", "imbalance"),
    [
        ("quota", 2, 1.5, (36, 46), (1.009, 1.011)),
        ("quota", 2, 2.0, (36, 46), (1.009, 1.011)),
        ("quota", 1, 1.5, (28, 34), (1.02, 1.03)),
        ("echo", 2, 1.5, (60, 63), (1.0, 1.005)),
        ("echo", 1, 2.0, (40, 46), (1.05, 1.20)),
        ("llep", 2, 2.0, (60, 70), (1.0, 1.001)),
        ("eplb", 2, 1.5, (330, 384), (1.01, 1.04)),
        ("lplb", 2, 1.5, (110, 128), (1.08, 1.10)),
        ("lplb", 1, 2.0, (60, 64), (1.36, 1.39)),
    ],
)
def test_figures_at_64_ranks(
    policy: str,
    slots: int,
    ratio: float,
    copies: tuple[int, int],
    imbalance: tuple[float, float],
    seed: int,
) -> None:
    loads = workload.zipf(64, 256, ratio=ratio, seed=seed)
    made = make(policy, loads, Topology(ranks=64, experts=256, slots=slots))
    assert copies[0] <= made.num_replicas <= copies[1]
    assert imbalance[0] <= made.imbalance <= imbalance[1]


# Errors


@pytest.mark.parametrize("policy", NEEDS_HISTORY)
def test_missing_history_is_an_error(policy: str) -> None:
    with pytest.raises(ConfigError, match="pass history="):
        plan([[1]], Topology(ranks=1, experts=1), BalanceConfig(policy=policy))


@pytest.mark.parametrize("policy", ["quota", "echo", "llep", "eplb", "lplb"])
def test_a_limit_on_copies_is_refused(policy: str) -> None:
    with pytest.raises(ConfigError, match=f"{policy}.*max_replicas=3.*leave it at None"):
        copies(policy, [4, 0], Topology(ranks=2, experts=2), max_replicas=3)


@pytest.mark.parametrize("policy", NEEDS_HISTORY)
def test_a_least_number_of_tokens_is_refused(policy: str) -> None:
    with pytest.raises(ConfigError, match=f"{policy}.*min_tokens_per_replica=9.*leave it at 1"):
        copies(policy, [4, 0], Topology(ranks=2, experts=2), min_tokens_per_replica=9)


def test_what_the_policies_declare() -> None:
    free = {name for name in BUILT_IN if not get_policy(name).within_limits}
    assert free == {"llep", "eplb", "ideal"}
    assert {name for name in BUILT_IN if get_policy(name).needs_history} == set(NEEDS_HISTORY)
