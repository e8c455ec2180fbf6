"""One layer under the clock: by hand where that is possible, else by what must not matter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultraep import BalanceConfig, Topology, plan
from ultraep.hops import choose
from ultraep.tools.sim.cluster import load_cluster
from ultraep.tools.sim.costs import Costs, measured_rates
from ultraep.tools.sim.layer import CHUNKS, LayerClock, LayerTimes
from ultraep.tools.sim.model import load_model
from ultraep.tools.sim.planning import CopySets, plan_layer
from ultraep.tools.sim.runtime import runtime_of
from ultraep.tools.sim.workload import Skew
from ultraep.trace.schema import SIMULATED, STAGES, of_backward

from .small import copies_of, small_costs, small_runtime

MICRO = 1e-6
PAIR = Topology(ranks=2, experts=4, slots=1)
LOADS = [[12, 4, 2, 2]]  # 5 tokens of each of two ranks, top-2: 16 rows on rank 0 and 4 on rank 1
MOVED = [(0, 0, 1, 5)]  # 5 rows of expert 0 on rank 1: 11 and 9
FORWARD = [
    *("attention", "loads", "plan", "replicate", "reroute", "dispatch", "experts", "combine"),
]


def clock(topology: Topology = PAIR, *, costs: Costs | None = None, **settings: Any) -> LayerClock:
    """Two ranks with 5 tokens each, 6 tokens before each of them; no recompute."""
    chosen = {"runtime": small_runtime(), "tokens": 5, "context": 6.0, "recompute": False}
    return LayerClock(costs=costs or small_costs(), topology=topology, **{**chosen, **settings})


def micro(stages: dict[str, Any]) -> dict[str, float]:
    """Microseconds of the only microbatch."""
    return {name: float(seconds[0]) / MICRO for name, seconds in stages.items()}


def pair_times(**settings: Any) -> LayerTimes:
    return clock(**settings).times(copies_of(LOADS, MOVED, PAIR))


# By hand: a row is 16 bytes, an expert 192; a link has 10 bytes in a microsecond, and takes 3


def test_forward_by_hand() -> None:
    found = micro(pair_times().forward)
    assert list(found) == FORWARD
    assert found["attention"] == pytest.approx(5 * (2 * 272 + 6 * 32) / 1000 + 16 * 16 * 5 / 100)
    assert found["plan"] == 0
    assert found["loads"] == pytest.approx(8 * 4 * 2 / 10 + 3)  # counts of 4 experts and 2 ranks
    assert (found["replicate"], found["reroute"]) == (pytest.approx(192 / 10), 0)
    # Half of the 11 rows come from the rank itself.
    assert found["dispatch"] == found["combine"] == pytest.approx(11 * 16 / 2 / 10 + 3)
    # Rank 0: experts with 7 and 4 rows; rank 1: three with 2, 2 and 5. Bytes of weights and rows;
    # then 3 * 16 bytes of every row.
    first = 2 * 192 + 64 * 11 + 48 * 11
    second = 3 * 192 + 64 * 9 + 48 * 9
    assert found["experts"] == pytest.approx(max(first, second) / 100)


def test_backward_by_hand() -> None:
    found = micro(pair_times().backward)
    assert found["attention back"] == pytest.approx(
        5 * (2 * 2 * 272 + 2.5 * 6 * 32) / 1000 + 2 * 16 * 16 * 5 / 100
    )
    assert found["combine back"] == found["dispatch back"] == pytest.approx(11.8)
    second = 3 * 768 + 128 * 9 + 2 * 48 * 9
    assert found["experts back"] == pytest.approx(second / 100)
    assert found["weights again"] == pytest.approx(19.2)  # sent as in forward
    # 384 bytes of gradients in 38.4 us, beside a third of the products.
    assert found["reduce"] == pytest.approx(38.4 - second / 300, abs=1e-9)
    assert "recompute" not in found


def test_stages_are_named_as_in_traces_of_the_runtime() -> None:
    times = pair_times(recompute=True)
    assert {*times.forward, *times.backward, "verify"} == set(SIMULATED)
    assert set(SIMULATED) - set(STAGES) == {"attention", "attention back"}
    assert [of_backward((name,)).item() for name in times.forward] == [False] * 8
    assert all(of_backward(tuple(times.backward)))


def test_the_whole_is_the_sum_of_its_stages() -> None:
    times = pair_times(recompute=True)
    assert times.forward_seconds == pytest.approx(sum(times.forward.values()))
    assert times.backward_seconds == pytest.approx(sum(times.backward.values()))
    assert times.backward["recompute"] == pytest.approx(times.forward_seconds)


def test_what_is_reported_of_the_plan() -> None:
    times = pair_times()
    assert times.rank_rows.tolist() == [11]
    assert times.imbalance.tolist() == [1.1]
    assert times.copies.tolist() == [1]


def test_without_training_there_is_no_backward() -> None:
    times = pair_times(training=False)
    assert times.backward == {}
    assert times.backward_seconds == 0


def test_a_rank_with_few_rows_still_sends_its_own() -> None:
    copies = copies_of(LOADS, [], PAIR)  # 16 rows and 4; each rank sends 10
    busy = clock().by_rank(copies)["dispatch"][0] / MICRO
    assert busy == pytest.approx([16 * 16 / 2 / 10 + 3, 10 * 16 / 2 / 10 + 3])


def test_rows_that_leave_the_domain_take_the_network() -> None:
    # Four ranks in two domains: of 20 rows half go beyond, a quarter to the neighbour.
    topology = Topology(ranks=4, experts=4, domain=2)
    loads = copies_of([[20, 8, 6, 6]], [], topology)
    times = clock(topology).times(loads)
    assert micro(times.forward)["dispatch"] == pytest.approx(20 * 16 / 2 / 1 + 7)
    joined = clock(Topology(ranks=4, experts=4)).times(loads)
    assert micro(joined.forward)["dispatch"] == pytest.approx(20 * 16 * 3 / 4 / 10 + 3)


# Weights


def test_weights_beside_the_rows_only_cost_what_they_add_to_the_busiest_port() -> None:
    # Rank 0 sends 10 rows and an expert, 80 + 192 bytes; rank 1 receives 9 rows and the expert,
    # 72 + 192. The dispatch alone is 88 bytes.
    before, beside = (pair_times(runtime=small_runtime(beside=beside)) for beside in (False, True))
    assert micro(before.forward)["replicate"] == pytest.approx(19.2)
    assert micro(beside.forward)["replicate"] == pytest.approx((80 + 192 - 88) / 10)
    # A busy dispatch hides them all.
    loads = copies_of([[60, 20, 2, 2]], [(0, 0, 1, 5)], PAIR)
    hidden = clock(runtime=small_runtime(beside=True)).times(loads)
    assert micro(hidden.forward)["replicate"] == 0


def test_control_is_paid_by_those_who_plan() -> None:
    costs = small_costs(
        reroute_us=10 * 6553.6,  # 10 us for the 10 rows of a rank
        plan_us=np.full(2, 5.0),
        schedule_us=np.full(2, 2.0),
        hop_us=1.0,
    )

    def found(**entries: Any) -> dict[str, float]:
        runtime = small_runtime(**entries)
        return micro(pair_times(costs=costs, runtime=runtime).forward)

    measured = found(planner="measured", beside=True, layer_us=0.5)
    assert measured["plan"] == pytest.approx(5.5)
    assert measured["replicate"] == pytest.approx(18.4 + 1)
    assert measured["reroute"] == pytest.approx(10)  # hides the schedule
    given = found(plan_us=70.0, layer_us=30.0)
    assert given["plan"] == pytest.approx(100)
    assert (given["replicate"], given["reroute"]) == (pytest.approx(19.2 + 1), 0)  # meanwhile
    placed = found(relay="placed", layer_us=30.0)
    assert (placed["loads"], placed["plan"]) == (0, pytest.approx(30))
    assert (placed["replicate"], placed["reroute"]) == (0, pytest.approx(10))
    nothing = found(relay="nothing", layer_us=30.0)
    assert not any(nothing[name] for name in ("loads", "plan", "replicate", "reroute"))


def test_weights_come_again_in_backward_unless_they_are_kept_by_recompute() -> None:
    def again(recompute: bool, **entries: Any) -> float:
        times = pair_times(runtime=small_runtime(**entries), recompute=recompute)
        return micro(times.backward)["weights again"]

    assert again(recompute=False, kept=True) == pytest.approx(19.2)
    assert again(recompute=True, kept=False) == pytest.approx(19.2)
    assert again(recompute=True, kept=True) == 0
    assert again(recompute=False, relay="placed") == 0


STAR = Topology(ranks=8, experts=8, slots=2)


def star(fan: int) -> CopySets:
    """Expert 0 on so many other ranks."""
    return copies_of([[80] + [10] * 7], [(0, 0, host, 9) for host in range(1, fan + 1)], STAR)


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
def test_one_expert_to_many_ranks(relay: str, fan: int, sent: float, hops: int) -> None:
    times = clock(STAR, costs=small_costs(hop_us=100.0), runtime=small_runtime(relay=relay)).times(
        star(fan)
    )
    assert micro(times.forward)["replicate"] == pytest.approx(sent * 19.2 + hops * 100)


@given(seed=st.integers(0, 10**6), ranks=st.sampled_from([4, 8]))
@settings(derandomize=True, database=None, deadline=None, max_examples=100)
def test_auto_chooses_as_the_runtime_does(seed: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    topology = Topology(ranks=ranks, experts=2 * ranks, slots=2)
    loads_RE = rng.integers(
        0, (rng.pareto(1.0, 2 * ranks) * 50).astype(int) + 1, (ranks, 2 * ranks)
    )
    made = plan(loads_RE, topology)
    copies = plan_layer(
        loads_RE.sum(axis=0)[None],
        topology,
        BalanceConfig(),
        interval=1,
        past_E=np.zeros(2 * ranks, dtype=np.int64),
    )
    found = {
        relay: clock(topology, runtime=small_runtime(relay=relay))
        .times(copies)
        .forward["replicate"]
        for relay in ("direct", "chain", "auto")
    }
    assert found["auto"] == found[choose(made, CHUNKS)]
    assert found["auto"] == min(found["direct"], found["chain"])


# Gradients


def test_gradients_hide_beside_the_last_product_or_under_attention() -> None:
    times = pair_times(runtime=small_runtime(hidden="experts"))
    third = micro(times.backward)["experts back"] / 3
    assert micro(times.backward)["reduce"] == pytest.approx(max(38.4 - third, 0), abs=1e-9)
    attention = micro(times.backward)["attention back"]
    slow = 384 / (40 * MICRO + attention * MICRO) / 1e9  # takes 40 us longer than attention
    under = pair_times(runtime=small_runtime(hidden="attention", reduce_gb_s=slow))
    assert micro(under.backward)["reduce"] == pytest.approx(40)
    quick = pair_times(runtime=small_runtime(hidden="attention", reduce_gb_s=1.0, backward_us=9.0))
    assert micro(quick.backward)["reduce"] == pytest.approx(9)


def reduced(copies: CopySets, topology: Topology, **entries: Any) -> float:
    """Gradients of an expert, in those of one, that the busiest home waits for."""
    runtime = small_runtime(reduce_gb_s=1e-9, **entries)
    times = clock(topology, runtime=runtime).times(copies)
    hiding = float(times.backward["experts back"][0]) / 3
    return (float(times.backward["reduce"][0]) + hiding) / 384


def test_the_home_with_most_copies_is_the_last() -> None:
    moved = [(0, 0, 1, 4), (0, 0, 2, 5), (0, 1, 3, 2)]
    topology = Topology(ranks=4, experts=4)
    assert reduced(copies_of([[14, 6, 2, 2]], moved, topology), topology) == pytest.approx(2)


def test_an_expert_that_moved_has_its_gradient_where_it_is() -> None:
    whole = copies_of([[4, 4, 4, 4]], [(0, 0, 1, 4)], PAIR)
    assert reduced(whole, PAIR, relay="direct") == pytest.approx(1)  # the home is where it was
    runtime = small_runtime(relay="placed", reduce_gb_s=1e-9)
    assert clock(runtime=runtime).times(whole).backward["reduce"] == 0


# What must and must not matter, with a real model and measured rates


def real_clock(policy: str, *, cluster: str = "gb200-nvl72", **settings: Any) -> LayerClock:
    model = load_model("qwen3-235b")
    chosen: dict[str, Any] = {
        "costs": Costs(load_cluster(cluster), model, measured_rates()),
        "topology": Topology(ranks=16, experts=128, slots=2, domain=8 if cluster[0] == "h" else 16),
        "runtime": runtime_of(policy),
        "tokens": 2048,
        "context": 1024.0,
    }
    return LayerClock(**{**chosen, **settings})


def real_copies(policy: str, topology: Topology, count: int = 6) -> CopySets:
    workload = Skew(experts=128, top_k=8, spread=0.7, noise=0.3)
    loads_SE = workload.expert_loads(0, np.arange(count), 16 * 2048 * 8)
    config = BalanceConfig(policy=policy)
    return plan_layer(loads_SE, topology, config, interval=4, past_E=loads_SE.sum(axis=0))


@pytest.mark.parametrize("policy", ["none", "ultraep", "quota", "echo", "eplb", "lplb"])
@pytest.mark.parametrize("cluster", ["gb200-nvl72", "h200-nvl8"])
def test_a_stage_lasts_as_long_as_its_busiest_rank(policy: str, cluster: str) -> None:
    layer = real_clock("ultraep" if policy == "echo" else policy, cluster=cluster)
    copies = real_copies(policy, layer.topology)
    times, by_rank = layer.times(copies), layer.by_rank(copies)
    everything = times.forward | times.backward
    assert set(by_rank) == {"dispatch", "experts", "combine", "experts back"}
    for stage, busy_SR in by_rank.items():
        assert busy_SR.shape == (6, 16)
        assert busy_SR.max(axis=1) == pytest.approx(everything[stage])
    assert "experts back" not in replace(layer, training=False).by_rank(copies)
