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
from ultraep.tools.sim.planning import plan_layer
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
