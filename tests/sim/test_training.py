"""Training: pipelines, data-parallel groups, the optimizer, and memory."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from ultraep.tools.sim.run import simulate
from ultraep.tools.sim.training import Training, pipeline_seconds

from .small import small_model, small_scenario

# Pipelines


def longest_path(forward: Any, backward: Any) -> float:
    """The end of the last pass: each waits for its input and for the pass before it."""
    count, stages = forward.shape

    def passes(stage: int) -> list[tuple[str, int]]:
        """At most `stages - stage` microbatches are in flight on a stage."""
        warm = min(count, stages - stage)
        rest = [[("b", n), ("f", n + warm)] for n in range(count)]
        in_order = [("f", n) for n in range(warm)] + [step for pair in rest for step in pair]
        return [step for step in in_order if step[1] < count]

    @cache
    def end(kind: str, number: int, stage: int) -> float:
        order = passes(stage)
        index = order.index((kind, number))
        before = end(*order[index - 1], stage) if index else 0.0
        if kind == "f":
            ready = end("f", number, stage - 1) if stage else 0.0
        else:
            last = stage == stages - 1
            ready = end("f", number, stage) if last else end("b", number, stage + 1)
        return max(before, ready) + (forward if kind == "f" else backward)[number, stage]

    return max(end("b", count - 1, stage) for stage in range(stages))


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_a_pipeline_takes_as_long_as_its_longest_path(count: int, stages: int) -> None:
    rng = np.random.default_rng([count, stages])
    for _ in range(10):
        forward, backward = rng.exponential(1.0, (2, count, stages)) + 1e-3
        assert pipeline_seconds(forward, backward) == pytest.approx(longest_path(forward, backward))
    equal = pipeline_seconds(np.full((count, stages), 0.3), np.full((count, stages), 0.7))
    assert equal == pytest.approx(count + stages - 1)  # the known bubble


@pytest.mark.parametrize("groups", [1, 3])
def test_a_step_waits_for_the_slowest_group(groups: int) -> None:
    job = Training(tokens=64, sequence=64, microbatches=3, steps=2, groups=groups)
    scenario = small_scenario(job)
    (result,) = simulate(scenario, ["none"])
    dense = sum(part[0] for part in job.dense_seconds(scenario.costs))
    by_group = result.by_microbatch.reshape(2, 3, groups).sum(axis=1)  # steps, groups
    assert len(np.unique(by_group.round(12))) == 2 * groups
    seconds = by_group.max(axis=1).sum() + 6 * dense
    seconds += 2 * job.optimizer_seconds(scenario.costs, 2)
    assert result.tokens_per_second == pytest.approx(6 * 64 / seconds)
    operations = scenario.model.training_operations(64)
    assert result.throughput == pytest.approx(result.tokens_per_second * operations / 1e12)


# Memory of the small model: 8 experts of 96 weights, and 1112 other weights


def job(**settings: Any) -> Training:
    return Training(**{"tokens": 10, "sequence": 10, "microbatches": 4, "steps": 1} | settings)


def test_weights_gradients_and_a_share_of_the_optimizer_state() -> None:
    assert job().weight_bytes(small_model(), 2) == 6 * (384 + 1112) + 12 * (384 + 1112 / 2)
    sharded = job(pipeline=2, groups=3).weight_bytes(small_model(), 2)
    assert sharded == pytest.approx(6 * (192 + 556) + 12 * (192 / 3 + 556 / 6))


@pytest.mark.parametrize(
    ("settings", "vectors"),
    [
        ({}, 3 + 10),  # inputs of three layers, and one whole layer
        ({"pipeline": 3}, 3 + 10),  # the first stage has one layer and three microbatches
        ({"pipeline": 3, "microbatches": 2}, 2 + 10),
        ({"pipeline": 2, "microbatches": 8}, 4 + 10),
        # Ten vectors of three layers, and the 20 rows of 56 bytes of two other layers.
        ({"recompute": False}, 10 * 3 + 2 * 20 * 56 / 160),
    ],
)
def test_stored_activations(settings: dict[str, Any], vectors: float) -> None:
    assert job(**settings).activation_bytes(small_model()) == 2 * 10 * 8 * vectors
