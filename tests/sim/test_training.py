"""Pipelines, data-parallel groups and the optimizer."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import pytest

from ultraep.errors import ConfigError
from ultraep.sim.model import load_model
from ultraep.sim.run import simulate
from ultraep.sim.scenario import Scenario
from ultraep.sim.training import (
    Training,
    optimizer_seconds,
    pipeline_seconds,
    plain_seconds,
    stage_of_layer,
)
from ultraep.sim.workload import Skew

from .small import plain_rates, small_cluster, small_costs, small_model

MICRO = 1e-6

# Pipelines


def run_pipeline(forward: Any, backward: Any) -> float:
    """By events: a free stage starts a backward if one is ready, else a forward if it may.

    It may as long as no more microbatches are under way on it than there are stages from it to
    the last. Forwards and backwards each keep the order of their numbers.
    """
    count, stages = forward.shape
    ready_f = [list(range(count)) if stage == 0 else [] for stage in range(stages)]
    ready_b: list[list[int]] = [[] for _ in range(stages)]
    under_way, done_f, done_b = [0] * stages, [0] * stages, [0] * stages
    busy = [False] * stages
    events: list[tuple[float, int, str, int]] = []
    clock = 0.0

    def start(stage: int) -> None:
        if busy[stage]:
            return
        # One forward, one backward in turn: a forward is due while there is room for it.
        room = stages - stage - under_way[stage]
        if done_f[stage] < count and room > 0:
            if ready_f[stage]:
                number = ready_f[stage].pop(0)
                busy[stage] = True
                under_way[stage] += 1
                done_f[stage] += 1
                heapq.heappush(events, (clock + forward[number, stage], stage, "f", number))
        elif ready_b[stage]:
            number = ready_b[stage].pop(0)
            busy[stage] = True
            done_b[stage] += 1
            heapq.heappush(events, (clock + backward[number, stage], stage, "b", number))

    while True:
        for stage in range(stages):
            start(stage)
        if not events:
            break
        clock, stage, way, number = heapq.heappop(events)
        busy[stage] = False
        if way == "f":
            (ready_f[stage + 1] if stage < stages - 1 else ready_b[stage]).append(number)
        else:
            under_way[stage] -= 1
            if stage:
                ready_b[stage - 1].append(number)
    assert done_f == done_b == [count] * stages
    return clock


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8])
def test_a_pipeline_takes_as_long_as_its_events(count: int, stages: int) -> None:
    rng = np.random.default_rng([count, stages])
    for _ in range(20):
        forward, backward = rng.exponential(1.0, (2, count, stages)) + 1e-3
        assert pipeline_seconds(forward, backward) == pytest.approx(run_pipeline(forward, backward))


@pytest.mark.parametrize(("count", "stages"), [(1, 1), (8, 1), (1, 4), (4, 4), (8, 4), (32, 3)])
def test_equal_times_leave_the_known_bubble(count: int, stages: int) -> None:
    forward, backward = np.full((count, stages), 0.3), np.full((count, stages), 0.7)
    assert pipeline_seconds(forward, backward) == pytest.approx((count + stages - 1) * (0.3 + 0.7))


def test_a_slow_stage_sets_the_pace() -> None:
    forward = np.ones((8, 3))
    forward[:, 1] = 5.0
    # One second until the slow stage begins; its own 8 times 6; then back through the first.
    assert pipeline_seconds(forward, np.ones((8, 3))) >= 1 + 8 * 6 + 1
    assert pipeline_seconds(forward, np.ones((8, 3))) < 1 + 8 * 6 + 1 + 2 * 2


def test_stages_without_work_do_not_stop_a_pipeline() -> None:
    forward, backward = np.zeros((3, 2)), np.zeros((3, 2))
    assert pipeline_seconds(forward, backward) == 0
    backward[:, 1] = 2.0
    assert pipeline_seconds(forward, backward) == 6


# Layers


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7, 61])
def test_every_layer_has_a_stage(stages: int) -> None:
    found = stage_of_layer(load_model("deepseek-v3-671b"), stages)
    assert len(found) == 61
    assert found == sorted(found)
    sizes = np.bincount(found, minlength=stages)
    assert len(sizes) == stages
    assert sizes.max() - sizes.min() <= 1
    assert sizes.tolist() == sorted(sizes, reverse=True)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 layers cannot be dealt out to 4 stages"):
        stage_of_layer(small_model(), 4)


def test_dense_layers_and_the_head_stand_at_the_ends() -> None:
    costs = small_costs()
    training = Training(tokens=10, sequence=4, stages=3, recompute=False)
    assert training.context == 2
    forward, backward = plain_seconds(costs, training)
    dense = costs.attention_forward(10, 2) + costs.dense_mlp(10)
    assert forward == pytest.approx([dense, 0, costs.head(10)])
    back = costs.attention_backward(10, 2) + 2 * costs.dense_mlp(10)
    assert backward == pytest.approx([back, 0, 2 * costs.head(10)])
    again = plain_seconds(costs, Training(tokens=10, sequence=4, stages=3))[1]
    assert again == pytest.approx([back + dense, 0, 2 * costs.head(10)])


def test_the_optimizer_passes_over_its_share() -> None:
    # 768 weights of experts over 2 ranks, 2 stages and 3 groups, 1112 others likewise.
    training = Training(stages=2, groups=3)
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
        schedule=training,
        ranks=2,
        rates=plain_rates(),
    )


def test_one_stage_does_one_thing_after_the_other() -> None:
    made = scenario()
    (result,) = simulate(made, ["none"])
    training = made.schedule
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
    training = made.schedule
    assert isinstance(training, Training)
    plain = sum(part[0] for part in plain_seconds(made.costs, training))
    by_group = result.by_microbatch.reshape(2, 3, 3).sum(axis=1)  # steps, groups
    assert len(np.unique(by_group.round(12))) == 6
    slowest = by_group.max(axis=1).sum()
    took = slowest + 6 * plain + 2 * optimizer_seconds(made.costs, training, 2)
    assert result.tokens_per_second == pytest.approx(6 * 64 / took)


def test_stages_share_the_devices_of_a_token() -> None:
    # With many microbatches a pipeline of equal stages is as good as none, per device.
    one, two = (
        simulate(scenario(stages=stages, microbatches=64, steps=1, recompute=False), ["none"])[0]
        for stages in (1, 2)
    )
    assert 0.4 * one.tokens_per_second < two.tokens_per_second < one.tokens_per_second * 1.05
    assert one.by_microbatch == pytest.approx(two.by_microbatch)


@pytest.mark.parametrize(
    "field", ["tokens", "sequence", "stages", "groups", "microbatches", "steps"]
)
def test_nothing_of_a_schedule_is_empty(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be at least 1, got 0"):
        Training(**{field: 0})
