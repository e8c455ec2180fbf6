"""The rate of a prefill job, and the time of a pipeline."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from ultraep_tools.sim.cluster import load_cluster
from ultraep_tools.sim.model import load_model
from ultraep_tools.sim.run import simulate
from ultraep_tools.sim.scenario import Scenario
from ultraep_tools.sim.serving import Serving
from ultraep_tools.sim.training import pipeline_seconds
from ultraep_tools.sim.workload import Recorded


def test_a_prefill_rate_is_the_tokens_over_the_time_of_all_layers() -> None:
    model = replace(load_model("glm-4.5-106b"), layers=3)
    loads = Recorded(np.arange(128).reshape(1, 1, 128) + 1, model.top_k)
    job = Serving(tokens=8192, sequence=2048, iterations=2)
    scenario = Scenario(
        cluster=load_cluster("h200-nvl8"), model=model, workload=loads, job=job, ranks=8
    )
    costs = scenario.costs
    dense = costs.attention(8192, 1024) + costs.dense_mlp(8192)
    none, ours, ideal = simulate(scenario, ["none", "ultraep", "ideal"])
    for result in (none, ours, ideal):
        assert not any("back" in stage for stage in result.stages)
        assert result.throughput == result.tokens_per_second
        assert result.throughput == pytest.approx(8192 / (dense + result.seconds))
    assert none.throughput < ours.throughput < ideal.throughput


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
