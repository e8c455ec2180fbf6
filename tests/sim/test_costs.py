"""Seconds of single operations, the measured points behind them, and rates of plans by time."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import pytest

import ultraep
from ultraep import BalanceConfig, ConfigError, Topology, workload
from ultraep.tools.sim.cluster import load_cluster
from ultraep.tools.sim.costs import Costs, measured_rates, rates_of
from ultraep.tools.sim.model import load_model
from ultraep.tools.sim.presets import presets

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


def test_efficiency_is_interpolated_over_the_logarithm_of_rows() -> None:
    points = {"rows": [4.0, 16.0], "grouped_forward": [0.5, 0.25]}
    rows = np.array([1, 4, 8, 16, 1000])
    factor = small_costs(**points).experts(rows) / small_costs().experts(rows)
    assert factor == pytest.approx([2, 2, 1 / 0.375, 4, 4])


@pytest.mark.parametrize("model", list(presets("models")))
@pytest.mark.parametrize("backward", [False, True])
def test_more_rows_take_longer_and_never_less_than_the_roofline(model: str, backward: bool) -> None:
    # The measured efficiency of few rows varies, so up to 8 % less time is accepted there.
    sizes = load_cluster("gb200-nvl72"), load_model(model)
    rows = np.unique(np.geomspace(1, 1e6, 4000).astype(int))
    seconds = Costs(*sizes, measured_rates()).experts(rows, backward=backward)
    assert (np.diff(seconds)[rows[1:] > 1024] > 0).all()
    assert (seconds >= 0.92 * np.maximum.accumulate(seconds)).all()
    assert (seconds > Costs(*sizes, plain_rates()).experts(rows, backward=backward)).all()


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


def test_the_framework_slows_everything_except_experts_and_messages() -> None:
    def seconds(costs: Costs) -> list[float]:
        attention = [costs.attention(10, 5), costs.attention(10, 5, backward=True)]
        return [*attention, costs.dense_mlp(10), costs.head(10)]

    plain, slow = small_costs(), small_costs(framework=3.0)
    assert seconds(slow) == pytest.approx([3 * value for value in seconds(plain)])
    assert slow.experts(10) == plain.experts(10)
    assert slow.on_links(10, 10) == plain.on_links(10, 10)


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


def test_the_efficiency_of_dense_operations() -> None:
    rates = measured_rates()
    products = values("grouped", "grouped/dense", "rate", work="matmul")
    assert rates.dense_matmul == pytest.approx(median(products) * 1e12 / MATMUL, rel=0.02)
    size = "64 heads of 128, 8192 tokens"
    for direction in ("forward", "backward"):
        (rate,) = values("grouped", "grouped/dense", "rate", size=size, **{"pass": direction})
        efficiency = getattr(rates, f"attention_{direction}")
        assert efficiency == pytest.approx(rate * 1e12 / MATMUL, rel=0.02)
    moved = values("grouped", "grouped/dense", "byte_rate")
    assert len(moved) == 3
    assert rates.memory == pytest.approx(mean(moved) * 1e9 / MEMORY, rel=0.02)


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


def rates(model: str = "qwen3-235b", **sizes: Any) -> ultraep.Rates:
    return rates_of("h200-nvl8", model, **{"ranks": 8, "tokens": 8192, **sizes})


def test_rates_grow_with_the_sizes() -> None:
    many, few, training = rates(), rates(tokens=4), rates(training=True)
    assert few.row < many.row < training.row
    assert few.copy == many.copy < training.copy
    assert many.copy < rates("deepseek-v3-671b").copy
    with pytest.raises(ConfigError, match="ranks and tokens must be at least 1, got 0 and 8192"):
        rates(ranks=0)


def test_replicas_pay_with_many_tokens_only() -> None:
    replicas = []
    for tokens in (16, 8192):
        loads = workload.zipf(8, 128, ratio=1.5, top_k=8, tokens=tokens)
        config = BalanceConfig(rates=rates(tokens=tokens))
        plan = ultraep.plan(loads, Topology(ranks=8, experts=128), config)
        replicas.append(plan.num_replicas)
    assert replicas[0] == 0 < replicas[1]
