"""The policies we compare with: sound plans, hand-computed examples, published figures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from ultraep import BalanceConfig, Plan, Topology, plan, workload
from ultraep.errors import ConfigError
from ultraep.policies import BUILT_IN, get_policy
from ultraep.policies.peers.lplb import Places, graph_of, place_on_graph, split

NEEDS_HISTORY = ("eplb", "lplb", "flashlb")
PEERS = ("quota", "echo", "llep", "moonep", *NEEDS_HISTORY)
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
    if policy not in NEEDS_HISTORY:
        assert made.imbalance <= made.initial_imbalance


@pytest.mark.parametrize("policy", BUILT_IN)
@pytest.mark.parametrize(("ranks", "slots"), [(1, 0), (1, 2), (4, 0), (4, 2)])
def test_empty_loads_and_single_ranks_need_nothing(policy: str, ranks: int, slots: int) -> None:
    topology = Topology(ranks=ranks, experts=4, slots=slots)
    assert copies(policy, [0, 0, 0, 0], topology) == []
    if ranks == 1:
        assert copies(policy, [5, 0, 2, 1], topology) == []


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


def test_quota_heeds_its_floor_in_the_slow_search_only() -> None:
    floor = {"min_tokens_per_replica": 1024}
    assert copies("quota", [100, 0], Topology(ranks=2, experts=2), **floor) == [[0, 1, 49]]


def test_quota_adds_the_tolerance_to_the_lower_end() -> None:
    # 50 * 1.5 = 75, and 1 % on top: 76.
    assert copies("quota", [100, 0], Topology(ranks=2, experts=2), tolerance=0.5) == [[0, 1, 24]]


def test_quota_solves_every_domain_for_itself() -> None:
    topology = Topology(ranks=4, experts=4, domain=2)
    assert copies("quota", [100, 0, 0, 200], topology) == [[0, 1, 49], [3, 2, 99]]


def test_echo_fills_the_roomiest_rank_first() -> None:
    # The mean is 4: expert 0 overflows by 5, rank 2 has room for 4 and rank 1 for 1.
    one_slot, two_slots = (Topology(ranks=3, experts=3, slots=slots) for slots in (1, 2))
    assert copies("echo", [9, 3, 0], one_slot) == [[0, 1, 1], [0, 2, 4]]
    assert copies("echo", [9, 3, 0], two_slots) == [[0, 1, 1], [0, 2, 4]]


def test_echo_keeps_the_smallest_copies_of_a_home_within_its_budget() -> None:
    # Rank 0 keeps 4 of its tokens and may keep 6; bin packing knows no threshold.
    one_slot, two_slots = (Topology(ranks=3, experts=3, slots=slots) for slots in (1, 2))
    assert copies("echo", [9, 3, 0], two_slots, tolerance=0.5) == [[0, 2, 4]]
    assert copies("echo", [9, 3, 0], one_slot, tolerance=0.5) == [[0, 1, 1], [0, 2, 4]]


def test_echo_drops_nothing_when_a_rank_stays_above_its_threshold() -> None:
    # The mean is 6. Of the three spills of rank 0, two find a slot on rank 2: it keeps 8.
    topology = Topology(ranks=4, experts=9, slots=2, homes=[0] * 6 + [1, 2, 3])
    loads = [2] * 6 + [7, 0, 5]
    assert copies("echo", loads, topology, tolerance=0.2) == [[3, 2, 2], [4, 2, 2], [6, 3, 1]]
    assert copies("echo", loads, topology, tolerance=0.4) == [[3, 2, 2], [4, 2, 2]]


def test_echo_keeps_the_largest_overlaps_of_a_rank() -> None:
    # Rank 2 overlaps expert 0 by 3 tokens and expert 1 by 1.
    assert copies("echo", [7, 5, 0], Topology(ranks=3, experts=3, slots=1)) == [[0, 2, 3]]
    two_slots = Topology(ranks=3, experts=3, slots=2)
    assert copies("echo", [7, 5, 0], two_slots) == [[0, 2, 3], [1, 2, 1]]


def test_echo_packs_what_is_left_of_an_expert_again() -> None:
    # The mean is 70, shelves are 10 apart. Rank 3 takes 60 of the 70 that expert 0 spills; the 10
    # that are left queue behind the 30 of expert 1, which rank 2 takes.
    topology = Topology(ranks=4, experts=4)
    assert copies("echo", [140, 100, 30, 10], topology) == [[0, 3, 60], [1, 2, 30]]


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


def test_llep_sends_what_no_rank_may_take_above_the_cap() -> None:
    # The cap is 4, no piece of 4 reaches the floor of 5: all 8 go to the least loaded.
    topology = Topology(ranks=3, experts=3)
    assert copies("llep", [12, 0, 0], topology, min_tokens_per_replica=5) == [[0, 1, 8]]


def test_llep_walks_once_when_nothing_can_stay() -> None:
    # The cap is 4. Beside expert 1 there is no room for expert 0 on its home.
    topology = Topology(ranks=3, experts=4, homes=[0, 0, 1, 2])
    assert copies("llep", [6, 6, 0, 0], topology) == [[0, 1, 4], [0, 2, 2], [1, 2, 2]]


def test_moonep_fills_ranks_that_gave_too_much() -> None:
    # The mean is 4. Rank 0 fills rank 2 and then lacks a token, which rank 1 has above.
    assert copies("moonep", [6, 5, 1], Topology(ranks=3, experts=3)) == [[0, 2, 3], [1, 0, 1]]


def test_moonep_leaves_the_remainder_where_most_is() -> None:
    assert copies("moonep", [3, 4], Topology(ranks=2, experts=2)) == []
    assert copies("moonep", [4, 0, 0], Topology(ranks=3, experts=3)) == [[0, 1, 1], [0, 2, 1]]


@given(case=cases())
@reproducibly
def test_moonep_is_exact_and_every_host_has_one_donor(case: Any) -> None:
    loads_RE, topology, _ = case
    made = make("moonep", loads_RE, topology)
    by_domain = made.rank_loads.reshape(topology.num_domains, -1)
    assert (by_domain.max(axis=1) - by_domain.min(axis=1) <= 1).all()
    homes = topology.home_of_expert[made.replicas[:, 0]]
    for host in range(topology.ranks):
        assert len(set(homes[made.replicas[:, 1] == host].tolist())) <= 1
    assert not made.leaves_domain


def test_eplb_may_put_two_instances_on_one_rank() -> None:
    # Expert 0 has three of the four places, two of them on rank 0; the remainder goes there.
    topology = Topology(ranks=2, experts=2)
    assert copies("eplb", [7, 1], topology, history=[30, 10]) == [[0, 1, 2]]


@pytest.mark.parametrize("policy", ["eplb", "lplb"])
def test_homes_move(policy: str) -> None:
    # Expert 0 takes rank 0, expert 1 rank 1, which is still the lighter one when expert 2 comes;
    # only rank 0 has a place left for expert 3.
    topology = Topology(ranks=2, experts=4, slots=0)
    assert copies(policy, [8, 6, 1, 1], topology) == [[1, 1, 6], [3, 0, 1]]


@pytest.mark.parametrize("policy", ["eplb", "flashlb"])
def test_without_past_load_experts_stay_at_home(policy: str) -> None:
    topology = Topology(ranks=2, experts=4)
    assert copies(policy, [8, 6, 1, 1], topology, history=[0, 0, 0, 0]) == []


def test_lplb_moves_no_homes_without_past_load() -> None:
    # The first expert of each rank has its copy on the other one.
    topology = Topology(ranks=2, experts=4)
    assert copies("lplb", [8, 6, 1, 1], topology, history=[0, 0, 0, 0]) == [[0, 1, 6]]


def test_flashlb_is_flatter_than_the_greedy() -> None:
    # The example that was published with it: 232 tokens on the fullest rank under EPLB.
    loads = np.zeros((8, 8), dtype=np.int64)
    loads[0] = [600, 560, 120, 120, 20, 10, 10, 10]
    fullest = {name: int(made_for(name, loads).rank_loads.max()) for name in ("eplb", "flashlb")}
    assert fullest == {"eplb": 232, "flashlb": 200}


def made_for(policy: str, loads_RE: Any) -> Plan:
    return make(policy, loads_RE, Topology(ranks=len(loads_RE), experts=loads_RE.shape[1]))


def test_flashlb_leaves_out_what_finds_no_rank() -> None:
    # Two ranks hold two instances of an expert at most: two slots are enough for all of them.
    topology = Topology(ranks=2, experts=2, slots=2)
    assert copies("flashlb", [8, 2], topology) == [[0, 1, 4], [1, 0, 1]]


def test_lplb_copies_from_the_next_rank() -> None:
    # Rank 0 gives 4 of its 9 tokens to rank 2, rank 2 its own to rank 1: 5, 3 and 4.
    # Rank 1 could take more, but a copy takes no tokens of other experts.
    topology = Topology(ranks=3, experts=3)
    assert copies("lplb", [9, 2, 1], topology) == [[0, 2, 4], [2, 1, 1]]


def test_lplb_copies_what_was_heaviest_to_the_neighbours_in_turn() -> None:
    # A torus of 2 x 2: the heaviest expert of a rank goes along the columns, the next along rows.
    topology = Topology(ranks=4, experts=12, slots=2)
    history = [9, 1, 0, 9, 2, 0, 8, 3, 0, 8, 4, 0]
    places = place_on_graph(np.array(history), topology, graph_of(4, 2))
    assert places.home_of_expert.tolist() == [0, 1, 1, 1, 0, 0, 2, 3, 3, 3, 2, 2]
    found = np.column_stack([places.expert, places.host[places.edge]]).tolist()
    assert found == [[6, 0], [1, 0], [9, 1], [4, 1], [0, 2], [7, 2], [3, 3], [10, 3]]


def test_lplb_wraps_around_inside_of_a_domain() -> None:
    # Rank 1 ends its domain: its copy stands on rank 0, not on rank 2.
    topology = Topology(ranks=4, experts=4, domain=2)
    assert copies("lplb", [0, 8, 0, 4], topology) == [[1, 0, 4], [3, 2, 2]]
    assert copies("lplb", [0, 8, 0, 4], Topology(ranks=4, experts=4, domain=1)) == []


def test_lplb_cannot_halve_an_expert_twice() -> None:
    # With one copy per expert the hot one stays on two ranks, whatever the others have free.
    assert copies("lplb", [8, 0, 0, 0], Topology(ranks=4, experts=4, slots=2)) == [[0, 2, 4]]


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
    places = place_on_graph(history_E, topology, graph_of(topology.domain_size, topology.slots))
    check_places(places, topology)
    moved_RX = split(loads_RE, places, topology)  # every source rank as a microbatch
    for loads_E, moved_X in zip(loads_RE, moved_RX, strict=True):
        assert (moved_X >= 0).all()
        assert (moved_X <= loads_E[places.expert]).all()
        assert (split(loads_E[None], places, topology)[0] == moved_X).all()
        by_domain = served(loads_E, places, moved_X, topology).reshape(topology.num_domains, -1)
        optimum = [peak_by_program(loads_E, places, topology, d) for d in range(len(by_domain))]
        assert by_domain.max(axis=1).tolist() == optimum


def check_places(places: Places, topology: Topology) -> None:
    """One copy per expert, as many per rank as there are slots, none outside of the domain."""
    assert len(set(places.expert.tolist())) == len(places.expert)
    host_X = places.host[places.edge]
    assert (places.home_of_expert[places.expert] == places.source[places.edge]).all()
    assert (places.source != places.host).all()
    assert (places.source // topology.domain_size == places.host // topology.domain_size).all()
    for ends in (places.source[places.edge], host_X):
        assert (np.bincount(ends, minlength=topology.ranks) <= topology.slots).all()
    moved_R = np.bincount(places.home_of_expert, minlength=topology.ranks)
    assert moved_R.tolist() == topology.homes_per_rank.tolist()


def served(loads_E: Any, places: Places, moved_X: Any, topology: Topology) -> Any:
    """[R] tokens of every rank."""
    rank_R = np.zeros(topology.ranks, dtype=np.int64)
    np.add.at(rank_R, places.home_of_expert, loads_E)
    np.add.at(rank_R, places.source[places.edge], -moved_X)
    np.add.at(rank_R, places.host[places.edge], moved_X)
    return rank_R


def peak_by_program(loads_E: Any, places: Places, topology: Topology, domain: int) -> int:
    """Tokens of a domain's fullest rank by HiGHS, rounded up to whole tokens."""
    copies, size = len(places.expert), topology.domain_size
    effect = np.zeros((topology.ranks, copies + 1))  # last: the fullest rank
    effect[places.source[places.edge], np.arange(copies)] = -1
    effect[places.host[places.edge], np.arange(copies)] = 1
    effect[:, copies] = -1
    at_home_R = np.bincount(places.home_of_expert, weights=loads_E, minlength=topology.ranks)
    own = slice(domain * size, domain * size + size)
    limits = [*((0, int(load)) for load in loads_E[places.expert]), (0, None)]
    found = linprog([0] * copies + [1], A_ub=effect[own], b_ub=-at_home_R[own], bounds=limits)
    assert found.success
    return math.ceil(found.fun - 1e-6)


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
        ("lplb", 2, 1.5, (255, 290), (1.005, 1.01)),
        ("lplb", 1, 2.0, (195, 240), (1.29, 1.30)),
        ("flashlb", 2, 1.5, (0, 384), (1.004, 1.008)),
        ("moonep", 2, 2.0, (60, 70), (1.0, 1.0)),
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


@pytest.mark.parametrize("policy", PEERS)
def test_a_limit_on_copies_is_refused(policy: str) -> None:
    with pytest.raises(ConfigError, match=f"{policy}.*max_replicas=3.*leave it at None"):
        copies(policy, [4, 0], Topology(ranks=2, experts=2), max_replicas=3)


@pytest.mark.parametrize("policy", ["echo", "moonep", *NEEDS_HISTORY])
def test_a_least_number_of_tokens_is_refused(policy: str) -> None:
    with pytest.raises(ConfigError, match=f"{policy}.*min_tokens_per_replica=9.*leave it at 1"):
        copies(policy, [4, 0], Topology(ranks=2, experts=2), min_tokens_per_replica=9)


def test_what_the_policies_declare() -> None:
    free = {name for name in BUILT_IN if not get_policy(name).within_limits}
    assert free == {"llep", "moonep", "eplb", "lplb", "flashlb", "ideal"}
    assert {name for name in BUILT_IN if get_policy(name).needs_history} == set(NEEDS_HISTORY)
