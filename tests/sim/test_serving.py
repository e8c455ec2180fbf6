"""Requests that arrive, wait and are prefilled in chunks."""

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
    _drawn,
    load_requests,
    make_iteration,
    mean_first_token,
    rate_at_limit,
)

from .small import small_costs

PLAIN = Iteration(fixed=1.0, experts=np.array([2.0]), per_token=0.0, per_pair=0.0, chunk=10)


def requests(**changes: Any) -> Requests:
    chosen = {"name": "x", "title": "", "mean_tokens": 100.0, "spread": 0.0, "limit_s": 1.0}
    return Requests(**{**chosen, **changes})


def first_token(
    iteration: Iteration, arrivals: list[float], lengths: list[float], ranks: int = 1
) -> float:
    return mean_first_token(iteration, np.array(arrivals), np.array(lengths), ranks)


# By hand


def test_a_rank_takes_a_chunk_of_its_queue_at_a_time() -> None:
    # From 0 to 3 the first; the others come meanwhile and fill the chunk from 3 to 6.
    found = first_token(PLAIN, [0.0, 0.5, 1.0], [10, 4, 6])
    assert found == pytest.approx((3 + 5.5 + 5) / 3)


def test_a_long_prompt_is_cut_into_chunks() -> None:
    # 10, 10 and 5 tokens: two full iterations, and one in which half as much is to be done.
    assert first_token(PLAIN, [0.0], [25]) == pytest.approx(3 + 3 + 2)


def test_chunks_look_at_the_whole_prompt_before_them() -> None:
    looking = replace(PLAIN, fixed=0.0, experts=np.zeros(1), per_pair=1.0)
    assert first_token(looking, [0.0], [25]) == pytest.approx(25**2 / 2)
    assert first_token(replace(looking, chunk=100), [0.0], [25]) == pytest.approx(25**2 / 2)
    tokens = replace(looking, per_pair=0.0, per_token=2.0)
    assert first_token(tokens, [0.0], [25]) == pytest.approx(50)


def test_requests_go_to_the_ranks_in_turn_and_all_wait_for_the_busiest() -> None:
    # Ranks have 10 and 2 tokens: attention waits for the 10, the experts see 6 of 10 on average.
    iteration = replace(PLAIN, per_token=0.5)
    found = first_token(iteration, [0.0, 0.0], [10, 2], ranks=2)
    assert found == pytest.approx(1 + 0.5 * 10 + 0.6 * 2)
    # The third one waits behind the first, on rank 0.
    found = first_token(PLAIN, [0.0, 0.0, 0.0], [10, 2, 1], ranks=2)
    second = 1 + 2 * 0.05
    assert found == pytest.approx((2.2 + 2.2 + 2.2 + second) / 3)


def test_loads_of_iterations_repeat() -> None:
    iteration = replace(PLAIN, experts=np.array([2.0, 4.0]))
    assert first_token(iteration, [0.0], [30]) == pytest.approx(3 + 5 + 3)


def test_what_an_iteration_costs_by_hand() -> None:
    costs = small_costs(framework=2.0)
    serving = Serving(requests=requests(mean_tokens=40.0), chunk=10)
    made = make_iteration(costs, serving, np.array([7.0, 8.0]), 0.5)
    assert (made.fixed, made.experts.tolist(), made.chunk) == (0.5, [7.0, 8.0], 10)
    token = 3 * costs.attention_forward(1, 0) + costs.dense_mlp(1)  # of three layers one is dense
    assert made.per_token == pytest.approx(token)
    assert made.per_pair == pytest.approx(3 * 2 * 32 / 1e9)
    tokens, pairs = np.array([10.0, 4.0]), np.array([50.0, 8.0])
    wanted = 0.5 + 10 * token + 50 * made.per_pair + 0.7 * 8.0
    assert made.seconds(3, tokens, pairs) == pytest.approx(wanted)


# Rates


QUICK = Iteration(fixed=0.01, experts=np.array([0.1]), per_token=1e-4, per_pair=0.0, chunk=1000)


def rate(iteration: Iteration = QUICK, ranks: int = 4, **changes: Any) -> float:
    return rate_at_limit(iteration, Serving(requests=requests(**changes), chunk=1000), ranks)


def test_the_rate_stays_below_what_full_chunks_allow() -> None:
    full = 4 * 1000 / (0.01 + 0.1 + 0.1) / 100
    assert 0.85 * full < rate(limit_s=3.0) < 1.15 * full


def test_at_the_rate_found_the_limit_is_kept() -> None:
    serving = Serving(requests=requests(spread=0.5), chunk=1000)
    found = rate_at_limit(QUICK, serving, 4)
    for factor, kept in ((1.0, True), (1.05, False)):
        arrivals, lengths = _drawn(serving, found * factor)
        assert (mean_first_token(QUICK, arrivals, lengths, 4) <= 1.0) == kept


def test_a_limit_that_no_request_keeps_allows_none() -> None:
    assert rate(limit_s=0.02) == 0


def test_the_rate_depends_on_nothing_but_the_seed() -> None:
    one, two = (
        rate_at_limit(QUICK, Serving(requests=requests(spread=0.8), chunk=1000, seed=seed), 4)
        for seed in (0, 1)
    )
    again = rate_at_limit(QUICK, Serving(requests=requests(spread=0.8), chunk=1000), 4)
    assert one == again
    assert one == pytest.approx(two, rel=0.2)


# Requests


@pytest.mark.parametrize("name", ["stem", "mixed"])
def test_prompts_have_the_wanted_length(name: str) -> None:
    wanted = load_requests(name)
    lengths = wanted.lengths(200_000, np.random.default_rng(0))
    assert lengths.mean() == pytest.approx(wanted.mean_tokens, rel=0.01)
    assert np.log(lengths).std() == pytest.approx(wanted.spread, rel=0.01)
    assert (lengths == lengths.round()).all()


@pytest.mark.parametrize(
    ("field", "value"), [("mean_tokens", 0.0), ("limit_s", -1.0), ("spread", -0.5)]
)
def test_requests_that_cannot_be(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field} must .*, got {value}"):
        requests(**{field: value})
