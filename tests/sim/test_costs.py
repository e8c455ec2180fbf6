"""Seconds of single operations, the measured points behind them, and rates of plans by time."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from ultraep.tools.sim.cluster import load_cluster
from ultraep.tools.sim.costs import Costs, measured_rates
from ultraep.tools.sim.model import load_model

from .small import MICRO, plain_rates, small_costs

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PRESETS = {"qwen3": "qwen3-235b", "deepseek": "deepseek-v3-671b", "glm": "glm-4.7-358b"}
PRESETS["gpt-oss"] = "gpt-oss-20b"
MATMUL, MEMORY = 989e12, 4.8e12  # of an H200, by its data sheet


def test_experts_by_hand() -> None:
    # Forward: 192 operations per row, 192 bytes of weights, 2 * (16 + 16) = 64 bytes per row.
    # A microsecond has 1000 operations and 100 bytes: one row takes 2.56, ten take 8.32.
    costs = small_costs()
    assert costs.experts([0, 1, 10]) == pytest.approx([0, 2.56 * MICRO, 8.32 * MICRO])
    # Backward: weights are read for rows and written as FP32, 8 bytes each; rows count twice.
    assert costs.experts([0, 1], backward=True) == pytest.approx([0, (768 + 128) / 100 * MICRO])


def test_attention_by_hand() -> None:
    # 10 tokens: (192 + 80) weights twice, 6 attended tokens with 32 operations each, and 16 passes
    # of 16 bytes through memory.
    products, core, passes = 10 * 2 * 272 / 1000, 10 * 6 * 32 / 1000, 16 * 16 * 10 / 100
    costs = small_costs(
        dense_matmul=0.5, attention_forward=0.25, attention_backward=0.2, memory=0.8
    )
    forward = (2 * products + 4 * core + passes / 0.8) * MICRO
    assert costs.attention(10, 6) == pytest.approx(forward)
    backward = (2 * 2 * products + 5 * 2.5 * core + 2 * passes / 0.8) * MICRO
    assert costs.attention(10, 6, backward=True) == pytest.approx(backward)


def test_links_and_control_by_hand() -> None:
    links = small_costs(link=0.5, network=0.25)
    assert links.on_links([100, 0], [0, 100]) == pytest.approx([20 * MICRO, 400 * MICRO])
    assert links.on_links([100, 100], [1, 10]) == pytest.approx([20 * MICRO, 40 * MICRO])
    assert (links.latency(domains=1), links.latency(domains=2)) == (3 * MICRO, 7 * MICRO)
    by_ranks = {"plan_us": [2.0, 32.0], "schedule_us": [1.0, 4.0]}
    costs = small_costs(ranks=[4.0, 16.0], **by_ranks)
    plan_us = [costs.plan(ranks) / MICRO for ranks in (1, 4, 8, 16, 99)]
    assert plan_us == pytest.approx([2, 2, 8, 32, 32])
    assert costs.schedule(8) == pytest.approx(2 * MICRO)
    costs = small_costs(count_us=4.0, reroute_us=10.0, barrier_us=5.0, hop_us=2.0)
    # Counts of 4 experts and 8 ranks are 256 bytes; the link's 3 us and a barrier are added.
    assert costs.loads(8192 * 4, 8, 1) == pytest.approx((2.0 + 25.6 + 5.0 + 3.0) * MICRO)
    assert costs.reroute(8192 * 16) == pytest.approx(20 * MICRO)
    assert costs.hop() == 2 * MICRO


# Measured points against their result files


def results(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}_h200_202611.json").read_text())
    return rows


def values(name: str, benchmark: str, metric: str, **case: Any) -> list[float]:
    """All values of a metric whose case has these entries."""
    return [
        row["value"]
        for row in results(name)
        if (row["benchmark"], row["metric"]) == (benchmark, metric)
        and case.items() <= row["case"].items()
    ]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_efficiency_of_grouped_products(direction: str) -> None:
    h200, reached = load_cluster("h200-nvl8"), defaultdict(list)
    for row in results("grouped"):
        case = row["case"]
        if (row["benchmark"], row["metric"]) == ("grouped/grouped", f"{direction}_time_p50"):
            roofline = Costs(h200, load_model(PRESETS[case["model"]]), plain_rates())
            least = float(roofline.experts(case["rows"], backward=direction == "backward"))
            reached[case["rows"]].append(case["slots"] * least / (row["value"] * 1e-3))
    assert sorted(reached) == measured_rates().rows
    medians = [median(reached[rows]) for rows in sorted(reached)]
    assert getattr(measured_rates(), f"grouped_{direction}") == pytest.approx(medians, rel=0.02)


def test_times_of_the_control_plane() -> None:
    rates = measured_rates()
    costs = Costs(load_cluster("h200-nvl8"), load_model("qwen3-235b"), rates)

    def control_us(stage: str, ranks: int) -> float:
        case = {"load": "zipf shuffled 3", "slots": 1, "tolerance": 0.0, "ids": "int64"}
        case |= {"ranks": ranks, "domain": ranks, "stage": stage}
        (micros,) = values("control", "control/stages", "graph_time_p50", **case)
        return micros

    for ranks in (16, 64, 256, 1024):
        assert costs.plan(ranks) / MICRO == pytest.approx(control_us("plan", ranks), rel=0.1)
    for ranks in (8, 64, 256):
        (micros,) = values("transfer", "transfer/schedule", "auto_graph_time_p50", ranks=ranks)
        assert costs.schedule(ranks) / MICRO == pytest.approx(micros, rel=0.1)
    assert rates.count_us == pytest.approx(control_us("count", 64), rel=0.1)
    assert rates.reroute_us == pytest.approx(control_us("reroute", 64), rel=0.1)
    (barrier,) = values("transfer", "transfer/meet", "meeting_time", ranks=8)
    assert rates.barrier_us == pytest.approx(barrier, rel=0.1)
    signals = values("transfer", "transfer/relay", "fitted_cost_of_a_signal")
    assert rates.hop_us == pytest.approx(median(signals), rel=0.1)


# Rates of plans by time
