"""The time of a pipeline; test_golden.py records the rest of a training."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from ultraep.tools.sim.training import pipeline_seconds


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
