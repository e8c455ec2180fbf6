"""Requests that arrive, wait and are prefilled in chunks; the time of a pipeline."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from ultraep.errors import ConfigError
from ultraep_tools.sim.serving import (
    Iteration,
    Requests,
    Serving,
    draw_requests,
    mean_first_token,
    rate_at_limit,
)
from ultraep_tools.sim.training import pipeline_seconds

PLAIN = Iteration(fixed=1.0, experts=np.array([2.0]), per_token=0.0, per_pair=0.0, chunk=10)
PAIRS = replace(PLAIN, fixed=0.0, experts=np.zeros(1), per_pair=1.0)
QUICK = Iteration(fixed=0.01, experts=np.array([0.1]), per_token=1e-4, per_pair=0.0, chunk=1000)


def requests(**changes: Any) -> Requests:
    chosen: Any = {"name": "x", "title": "", "mean_tokens": 100.0, "spread": 0.0, "limit_s": 1.0}
    return Requests(**chosen | changes)


@pytest.mark.parametrize(
    ("iteration", "arrivals", "lengths", "ranks", "seconds"),
    [
        # The first takes 0 to 3. The others arrive meanwhile and fill the chunk from 3 to 6.
        (PLAIN, [0.0, 0.5, 1.0], [10, 4, 6], 1, (3 + 5.5 + 5) / 3),
        # A long prompt is cut into 10, 10 and 5 tokens; the last iteration is half full.
        (PLAIN, [0.0], [25], 1, 3 + 3 + 2),
        # Chunks attend to the whole prompt before them, whatever their size.
        (PAIRS, [0.0], [25], 1, 25**2 / 2),
        (replace(PAIRS, chunk=100), [0.0], [25], 1, 25**2 / 2),
        (replace(PAIRS, per_pair=0.0, per_token=2.0), [0.0], [25], 1, 50),
        # Ranks have 10 and 2 tokens: attention waits for 10, the experts serve 6 on average.
        (replace(PLAIN, per_token=0.5), [0.0, 0.0], [10, 2], 2, 1 + 0.5 * 10 + 0.6 * 2),
        # The third request waits for the first, on rank 0.
        (PLAIN, [0.0, 0.0, 0.0], [10, 2, 1], 2, (3 * 2.2 + 1 + 2 * 0.05) / 3),
        # The loads of iterations repeat.
        (replace(PLAIN, experts=np.array([2.0, 4.0])), [0.0], [30], 1, 3 + 5 + 3),
    ],
)
def test_time_to_first_token_by_hand(
    iteration: Iteration, arrivals: Any, lengths: Any, ranks: int, seconds: float
) -> None:
    mean = mean_first_token(iteration, np.array(arrivals), np.array(lengths), ranks)
    assert mean == pytest.approx(seconds)


def test_the_rate_meets_the_limit_and_a_higher_one_does_not() -> None:
    serving = Serving(requests=requests(spread=0.5), tokens=1000)
    highest = rate_at_limit(QUICK, serving, 4)
    for factor, meets in ((1.0, True), (1.05, False)):
        drawn = draw_requests(serving, highest * factor)
        assert (mean_first_token(QUICK, *drawn, 4) <= 1.0) == meets


@pytest.mark.parametrize(
    ("field", "value"), [("mean_tokens", 0.0), ("limit_s", -1.0), ("spread", -0.5)]
)
def test_invalid_requests(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field} must .*, got {value}"):
        requests(**{field: value})


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
