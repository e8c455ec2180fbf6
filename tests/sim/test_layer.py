"""Seconds of one layer: by hand where possible, otherwise by properties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultraep import BalanceConfig, Topology, plan
from ultraep.hops import choose
from ultraep.tools.sim.layer import CHUNKS, LayerClock, LayerTimes
from ultraep.tools.sim.planning import Replicas, plan_layer
from ultraep.trace.schema import SIMULATED, STAGES, of_backward

from .small import MICRO, replicas_of, small_costs, small_runtime

PAIR = Topology(ranks=2, experts=4, slots=1)
LOADS = [[12, 4, 2, 2]]  # 5 tokens on each of two ranks, top-2: 16 rows on rank 0, 4 on rank 1
MOVED = [(0, 0, 1, 5)]  # 5 rows of expert 0 on rank 1: 11 and 9
CONTROL = ["loads", "plan", "replicate", "reroute"]
FORWARD = ["attention", *CONTROL, "dispatch", "experts", "combine"]


def clock(topology: Topology = PAIR, **changes: Any) -> LayerClock:
    """5 tokens per rank, 6 tokens before each of them; no recompute."""
    chosen: Any = {"runtime": small_runtime(), "costs": small_costs(), "topology": topology}
    chosen |= {"tokens": 5, "context": 6.0, "recompute": False}
    return LayerClock(**chosen | changes)


def pair_times(**changes: Any) -> LayerTimes:
    return clock(**changes).times(replicas_of(LOADS, MOVED, PAIR))


def micro(stages: dict[str, Any]) -> dict[str, float]:
    """Microseconds of the only microbatch."""
    return {name: float(seconds[0]) / MICRO for name, seconds in stages.items()}


# A row has 16 bytes, an expert 192. A link moves 10 bytes per microsecond and has 3 us latency.


def test_forward_by_hand() -> None:
    stages = micro(pair_times().forward)
    assert list(stages) == FORWARD
    assert stages["attention"] == pytest.approx(5 * (2 * 272 + 6 * 32) / 1000 + 16 * 16 * 5 / 100)
    assert stages["plan"] == 0
    assert stages["loads"] == pytest.approx(8 * 4 * 2 / 10 + 3)  # counts of 4 experts and 2 ranks
    assert (stages["replicate"], stages["reroute"]) == (pytest.approx(192 / 10), 0)
    # Half of the 11 rows come from the rank itself.
    assert stages["dispatch"] == stages["combine"] == pytest.approx(11 * 16 / 2 / 10 + 3)
    # Rank 0: experts with 7 and 4 rows; rank 1: three with 2, 2 and 5. Bytes of weights and rows,
    # then 3 * 16 bytes of every row.
    first = 2 * 192 + 64 * 11 + 48 * 11
    second = 3 * 192 + 64 * 9 + 48 * 9
    assert stages["experts"] == pytest.approx(max(first, second) / 100)


def test_backward_by_hand() -> None:
    stages = micro(pair_times().backward)
    attention = 5 * (2 * 2 * 272 + 2.5 * 6 * 32) / 1000 + 2 * 16 * 16 * 5 / 100
    assert stages["attention back"] == pytest.approx(attention)
    assert stages["combine back"] == stages["dispatch back"] == pytest.approx(11.8)
    second = 3 * 768 + 128 * 9 + 2 * 48 * 9
    assert stages["experts back"] == pytest.approx(second / 100)
    assert stages["weights again"] == pytest.approx(19.2)  # sent as in forward
    # 384 bytes of gradients take 38.4 us and overlap a third of the products.
    assert stages["reduce"] == pytest.approx(38.4 - second / 300, abs=1e-9)
    assert "recompute" not in stages


def test_sums_figures_and_names_of_stages() -> None:
    times = pair_times(recompute=True)
    assert times.forward_seconds == pytest.approx(sum(times.forward.values()))
    assert times.backward_seconds == pytest.approx(sum(times.backward.values()))
    assert times.backward["recompute"] == pytest.approx(times.forward_seconds)
    assert (times.rank_rows, times.imbalance, times.replicas) == ([11], [1.1], [1])
    assert {*times.forward, *times.backward, "verify"} == set(SIMULATED)
    assert set(SIMULATED) - set(STAGES) == {"attention", "attention back"}
    assert not any(of_backward(tuple(times.forward)))
    assert all(of_backward(tuple(times.backward)))
    prefill = pair_times(training=False)
    assert (prefill.backward, prefill.backward_seconds) == ({}, 0)


def test_a_rank_with_few_rows_still_sends_its_own() -> None:
    replicas = replicas_of(LOADS, [], PAIR)  # 16 rows and 4; each rank sends 10
    busy = clock().by_rank(replicas)["dispatch"][0] / MICRO
    assert busy == pytest.approx([16 * 16 / 2 / 10 + 3, 10 * 16 / 2 / 10 + 3])


@pytest.mark.parametrize(
    ("domain", "micros"),
    [(2, 20 * 16 / 2 / 1 + 7), (4, 20 * 16 * 3 / 4 / 10 + 3)],  # half of the rows leave the domain
)
def test_rows_that_leave_the_domain_use_the_network(domain: int, micros: float) -> None:
    topology = Topology(ranks=4, experts=4, domain=domain)
    times = clock(topology).times(replicas_of([[20, 8, 6, 6]], [], topology))
    assert micro(times.forward)["dispatch"] == pytest.approx(micros)


# Weights


def test_weights_sent_beside_rows_cost_what_they_add_to_the_busiest_port() -> None:
    # Rank 0 sends 10 rows and an expert, 80 + 192 bytes; rank 1 receives 9 rows and the expert,
    # 72 + 192. Dispatch alone takes 88 bytes.
    beside = small_runtime(overlaps_dispatch=True)
    assert micro(pair_times(runtime=beside).forward)["replicate"] == pytest.approx(
        (80 + 192 - 88) / 10
    )
    busy = replicas_of([[60, 20, 2, 2]], MOVED, PAIR)  # a long dispatch hides the weights
    assert micro(clock(runtime=beside).times(busy).forward)["replicate"] == 0


@pytest.mark.parametrize(
    ("runtime", "loads", "plan", "replicate", "reroute"),
    [
        # Rerouting hides the schedule.
        ({"plan_us": None, "overlaps_dispatch": True, "layer_us": 0.5}, 9.4, 5.5, 18.4 + 1, 10),
        # Sending weights hides rerouting.
        ({"plan_us": 70.0, "layer_us": 30.0}, 9.4, 100, 19.2 + 1, 0),
        ({"relay": "placed", "layer_us": 30.0}, 0, 30, 0, 10),
        ({"relay": "nothing", "layer_us": 30.0}, 0, 0, 0, 0),
    ],
)
def test_control_costs_of_runtimes(
    runtime: Any, loads: float, plan: float, replicate: float, reroute: float
) -> None:
    times: Any = {"plan_us": [5.0, 5.0], "schedule_us": [2.0, 2.0], "hop_us": 1.0}
    costs = small_costs(reroute_us=10 * 6553.6, **times)  # 10 us for the 10 rows of a rank
    stages = micro(pair_times(costs=costs, runtime=small_runtime(**runtime)).forward)
    assert [stages[name] for name in CONTROL] == pytest.approx([loads, plan, replicate, reroute])


@pytest.mark.parametrize(
    ("recompute", "runtime", "micros"),
    [
        (False, {"reuses_weights": True}, 19.2),
        (True, {"reuses_weights": False}, 19.2),
        (True, {"reuses_weights": True}, 0),
        (False, {"relay": "placed"}, 0),
    ],
)
def test_backward_sends_weights_again_unless_recompute_kept_them(
    recompute: bool, runtime: Any, micros: float
) -> None:
    times = pair_times(runtime=small_runtime(**runtime), recompute=recompute)
    assert micro(times.backward)["weights again"] == pytest.approx(micros)


@pytest.mark.parametrize(
    ("relay", "fan", "sent", "hops"),
    [
        ("direct", 1, 1, 1),
        ("direct", 7, 7, 1),
        ("chain", 1, 1, 1),
        ("chain", 7, 1 + 6 / CHUNKS, 7),
        ("tree", 3, 3, 1),
        ("tree", 4, 2, 2),
        ("tree", 7, 3, 2),
        ("auto", 1, 1, 1),
        ("auto", 7, 1 + 6 / CHUNKS, 7),
    ],
)
def test_one_expert_on_many_ranks(relay: str, fan: int, sent: float, hops: int) -> None:
    topology = Topology(ranks=8, experts=8, slots=2)
    placed = [(0, 0, host, 9) for host in range(1, fan + 1)]
    star = replicas_of([[80] + [10] * 7], placed, topology)
    costs, runtime = small_costs(hop_us=100.0), small_runtime(relay=relay)
    times = clock(topology, costs=costs, runtime=runtime).times(star)
    assert micro(times.forward)["replicate"] == pytest.approx(sent * 19.2 + hops * 100)


@given(seed=st.integers(0, 10**6), ranks=st.sampled_from([4, 8]))
@settings(derandomize=True, database=None, deadline=None, max_examples=100)
def test_auto_chooses_like_the_runtime(seed: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    topology = Topology(ranks=ranks, experts=2 * ranks, slots=2)
    popularity_E = (rng.pareto(1.0, 2 * ranks) * 50).astype(int) + 1
    loads_RE = rng.integers(0, popularity_E, (ranks, 2 * ranks))
    loads_SE = loads_RE.sum(axis=0)[None]
    replicas = plan_layer(loads_SE, topology, BalanceConfig(), interval=1, past_E=loads_SE[0])
    seconds = {}
    for relay in ("direct", "chain", "auto"):
        times = clock(topology, runtime=small_runtime(relay=relay)).times(replicas)
        seconds[relay] = times.forward["replicate"]
    assert seconds["auto"] == seconds[choose(plan(loads_RE, topology), CHUNKS)]
    assert seconds["auto"] == min(seconds["direct"], seconds["chain"])


# Gradients


def test_gradients_overlap_the_last_product_or_attention() -> None:
    stages = micro(pair_times().backward)
    slow = 384 / ((40 + stages["attention back"]) * MICRO) / 1e9  # 40 us longer than attention
    under = small_runtime(reduce_under="attention", reduce_gb_s=slow)
    assert micro(pair_times(runtime=under).backward)["reduce"] == pytest.approx(40)
    quick = small_runtime(reduce_under="attention", reduce_gb_s=1.0, backward_us=9.0)
    assert micro(pair_times(runtime=quick).backward)["reduce"] == pytest.approx(9)


def reduced(replicas: Replicas, **entries: Any) -> float:
    """Gradients that the busiest home receives, in gradients of one expert."""
    runtime = small_runtime(reduce_gb_s=1e-9, **entries)
    backward = clock(replicas.topology, runtime=runtime).times(replicas).backward
    exposed = float(backward["reduce"][0])
    return (exposed + float(backward["experts back"][0]) / 3) / 384 if exposed else 0.0


def test_the_home_with_most_replicas_receives_last() -> None:
    moved = [(0, 0, 1, 4), (0, 0, 2, 5), (0, 1, 3, 2)]
    replicas = replicas_of([[14, 6, 2, 2]], moved, Topology(ranks=4, experts=4))
    assert reduced(replicas) == pytest.approx(2)


def test_a_placed_expert_that_moved_needs_no_reduction() -> None:
    moved = replicas_of([[4, 4, 4, 4]], [(0, 0, 1, 4)], PAIR)
    assert reduced(moved, relay="direct") == pytest.approx(1)
    assert reduced(moved, relay="placed") == 0
