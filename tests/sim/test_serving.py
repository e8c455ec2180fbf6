"""Serving: requests that arrive, wait and are prefilled in chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ultraep.errors import ConfigError
from ultraep.tools.sim.serving import (
    Iteration,
    Requests,
    Serving,
    draw_requests,
    load_requests,
    make_iteration,
    mean_first_token,
    rate_at_limit,
)

from .small import small_costs, small_model, small_scenario

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


def test_costs_of_an_iteration_by_hand() -> None:
    costs = small_costs(framework=2.0)
    serving = Serving(requests=requests(mean_tokens=40.0), tokens=10)
    iteration = make_iteration(costs, serving, np.array([7.0, 8.0]), 0.5)
    assert (iteration.fixed, iteration.experts.tolist(), iteration.chunk) == (0.5, [7.0, 8.0], 10)
    token = 3 * costs.attention(1, 0) + costs.dense_mlp(1)  # one of three layers is dense
    assert iteration.per_token == pytest.approx(token)
    assert iteration.per_pair == pytest.approx(3 * 2 * 32 / 1e9)
    seconds = iteration.seconds(3, np.array([10.0, 4.0]), np.array([50.0, 8.0]))
    assert seconds == pytest.approx(0.5 + 10 * token + 50 * iteration.per_pair + 0.7 * 8.0)


# Rates


def rate(seed: int = 0, **changes: Any) -> float:
    return rate_at_limit(QUICK, Serving(requests=requests(**changes), tokens=1000, seed=seed), 4)


def test_the_rate_is_near_full_chunks_or_zero() -> None:
    full = 4 * 1000 / (0.01 + 0.1 + 0.1) / 100
    assert 0.85 * full < rate(limit_s=3.0) < 1.15 * full
    assert rate(limit_s=0.02) == 0  # shorter than an iteration


def test_the_rate_meets_the_limit_and_a_higher_one_does_not() -> None:
    serving = Serving(requests=requests(spread=0.5), tokens=1000)
    highest = rate_at_limit(QUICK, serving, 4)
    for factor, meets in ((1.0, True), (1.05, False)):
        drawn = draw_requests(serving, highest * factor)
        assert (mean_first_token(QUICK, *drawn, 4) <= 1.0) == meets


def test_the_rate_depends_on_the_seed_alone() -> None:
    assert rate(spread=0.8) == rate(spread=0.8)
    assert rate(spread=0.8) == pytest.approx(rate(seed=1, spread=0.8), rel=0.2)


# Requests and memory


@pytest.mark.parametrize("name", ["stem", "mixed"])
def test_prompt_lengths_have_the_mean_and_spread_of_the_preset(name: str) -> None:
    preset = load_requests(name)
    lengths = preset.lengths(200_000, np.random.default_rng(0))
    assert lengths.mean() == pytest.approx(preset.mean_tokens, rel=0.01)
    assert np.log(lengths).std() == pytest.approx(preset.spread, rel=0.01)
    assert (lengths == lengths.round()).all()


@pytest.mark.parametrize(
    ("field", "value"), [("mean_tokens", 0.0), ("limit_s", -1.0), ("spread", -0.5)]
)
def test_invalid_requests(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field} must .*, got {value}"):
        requests(**{field: value})


def test_prefill_needs_weights_slots_and_one_layer() -> None:
    job = Serving(requests=requests(), tokens=10)
    memory = small_scenario(job).memory(3, 7)
    assert memory.weights == job.weight_bytes(small_model(), 2) == 2 * (768 / 2 + 1112)
    assert (memory.slots, memory.rows, memory.kept) == (3 * 2 * 96, 7 * 56, 2 * 10 * 8 * 10)
