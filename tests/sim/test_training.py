"""Pipelines, data-parallel groups and the optimizer."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import pytest

from ultraep.errors import ConfigError
from ultraep.tools.sim.model import load_model
from ultraep.tools.sim.run import simulate
from ultraep.tools.sim.scenario import Scenario
from ultraep.tools.sim.training import (
    Training,
    optimizer_seconds,
    part_of_layer,
    pipeline_seconds,
    plain_seconds,
)
from ultraep.tools.sim.workload import Skew

from .small import plain_rates, small_cluster, small_costs, small_model

MICRO = 1e-6

# Pipelines


def run_pipeline(forward: Any, backward: Any) -> float:
    """By events: a free part starts a backward if one is ready, else a forward if it may.

    It may as long as no more microbatches are under way on it than there are parts from it to
    the last. Forwards and backwards each keep the order of their numbers.
    """
    count, parts = forward.shape
    ready_f = [list(range(count)) if part == 0 else [] for part in range(parts)]
    ready_b: list[list[int]] = [[] for _ in range(parts)]
    under_way, done_f, done_b = [0] * parts, [0] * parts, [0] * parts
    busy = [False] * parts
    events: list[tuple[float, int, str, int]] = []
    clock = 0.0

    def start(part: int) -> None:
        if busy[part]:
            return
        # One forward, one backward in turn: a forward is due while there is room for it.
        room = parts - part - under_way[part]
        if done_f[part] < count and room > 0:
            if ready_f[part]:
                number = ready_f[part].pop(0)
                busy[part] = True
                under_way[part] += 1
                done_f[part] += 1
                heapq.heappush(events, (clock + forward[number, part], part, "f", number))
        elif ready_b[part]:
            number = ready_b[part].pop(0)
            busy[part] = True
            done_b[part] += 1
            heapq.heappush(events, (clock + backward[number, part], part, "b", number))

    while True:
        for part in range(parts):
            start(part)
        if not events:
            break
        clock, part, way, number = heapq.heappop(events)
        busy[part] = False
        if way == "f":
            (ready_f[part + 1] if part < parts - 1 else ready_b[part]).append(number)
        else:
            under_way[part] -= 1
            if part:
                ready_b[part - 1].append(number)
    assert done_f == done_b == [count] * parts
    return clock


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8])
def test_a_pipeline_takes_as_long_as_its_events(count: int, parts: int) -> None:
    rng = np.random.default_rng([count, parts])
    for _ in range(20):
        forward, backward = rng.exponential(1.0, (2, count, parts)) + 1e-3
        assert pipeline_seconds(forward, backward) == pytest.approx(run_pipeline(forward, backward))


@pytest.mark.parametrize(("count", "parts"), [(1, 1), (8, 1), (1, 4), (4, 4), (8, 4), (32, 3)])
def test_equal_times_leave_the_known_bubble(count: int, parts: int) -> None:
    forward, backward = np.full((count, parts), 0.3), np.full((count, parts), 0.7)
    assert pipeline_seconds(forward, backward) == pytest.approx((count + parts - 1) * (0.3 + 0.7))


# Layers


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7, 61])
def test_every_layer_has_a_stage(parts: int) -> None:
    found = part_of_layer(load_model("deepseek-v3-671b"), parts)
    assert len(found) == 61
    assert found == sorted(found)
    sizes = np.bincount(found, minlength=parts)
    assert len(sizes) == parts
    assert sizes.max() - sizes.min() <= 1
    assert sizes.tolist() == sorted(sizes, reverse=True)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 layers cannot be dealt out to 4 pipeline parts"):
        part_of_layer(small_model(), 4)


def test_dense_layers_and_the_head_stand_at_the_ends() -> None:
    costs = small_costs()
    training = Training(tokens=10, sequence=4, pipeline=3, recompute=False)
    assert training.context == 2
    forward, backward = plain_seconds(costs, training)
    dense = costs.attention_forward(10, 2) + costs.dense_mlp(10)
    assert forward == pytest.approx([dense, 0, costs.head(10)])
    back = costs.attention_backward(10, 2) + 2 * costs.dense_mlp(10)
    assert backward == pytest.approx([back, 0, 2 * costs.head(10)])
    again = plain_seconds(costs, Training(tokens=10, sequence=4, pipeline=3))[1]
    assert again == pytest.approx([back + dense, 0, 2 * costs.head(10)])


def test_the_optimizer_passes_over_its_share() -> None:
    # 768 weights of experts over 2 ranks, 2 parts and 3 groups, 1112 others likewise.
    training = Training(pipeline=2, groups=3)
    seconds = optimizer_seconds(small_costs(memory=0.5), training, ranks=2)
    share = (768 + 1112) / (2 * 2 * 3)
    assert 28 * share / 50 <= seconds / MICRO <= 30 * share / 50 + 1e-9


# Steps


def scenario(**settings: Any) -> Scenario:
    training = Training(**{"tokens": 64, "sequence": 64, "microbatches": 3, "steps": 2, **settings})
    return Scenario(
        cluster=small_cluster(),
        model=small_model(),
        workload=Skew(experts=4, top_k=2, spread=1.0, noise=0.5),
        job=training,
        ranks=2,
        rates=plain_rates(),
    )


def test_one_stage_does_one_thing_after_the_other() -> None:
    made = scenario()
    (result,) = simulate(made, ["none"])
    training = made.job
    assert isinstance(training, Training)
    plain = sum(part[0] for part in plain_seconds(made.costs, training))
    step = optimizer_seconds(made.costs, training, 2)
    took = result.by_microbatch.sum() + 6 * plain + 2 * step
    assert result.tokens_per_second == pytest.approx(6 * 64 / took)
    operations = made.model.training_operations(64)
    assert result.throughput == pytest.approx(result.tokens_per_second * operations / 1e12)


def test_a_step_waits_for_the_slowest_group() -> None:
    made = scenario(groups=3)
    (result,) = simulate(made, ["none"])
    training = made.job
    assert isinstance(training, Training)
    plain = sum(part[0] for part in plain_seconds(made.costs, training))
    by_group = result.by_microbatch.reshape(2, 3, 3).sum(axis=1)  # steps, groups
    assert len(np.unique(by_group.round(12))) == 6
    slowest = by_group.max(axis=1).sum()
    took = slowest + 6 * plain + 2 * optimizer_seconds(made.costs, training, 2)
    assert result.tokens_per_second == pytest.approx(6 * 64 / took)


def test_nothing_of_a_training_is_empty() -> None:
    with pytest.raises(ConfigError, match="groups must be at least 1, got 0"):
        Training(groups=0)
