"""When prompts arrive, what they say, which of them are a microbatch, and what is asked for."""

import math
from itertools import islice, pairwise

import numpy as np
import pytest

from ultraep.errors import ConfigError, FileError
from ultraep.tools.serving.load import (
    Arrival,
    Lengths,
    LoadOptions,
    Prompt,
    make_prompts,
    next_microbatch,
    poisson,
    rate_of,
    read_arrivals,
)
from ultraep.tools.serving.run import EngineOptions

LENGTHS = Lengths(shortest=8, longest=64, burst=10)


def test_poisson_arrivals_have_their_rate_and_are_alike_for_one_seed():
    found, again, other = (list(islice(poisson(50.0, [seed]), 5000)) for seed in (7, 7, 8))
    gaps = [two.second - one.second for one, two in pairwise(found)]
    assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert np.std(gaps) == pytest.approx(1 / 50, rel=0.1)  # as spread as their mean
    assert found == again != other
    assert found[0].second == 0.0


def test_a_file_of_arrivals_is_read_in_order_of_time(tmp_path):
    path = tmp_path / "arrivals.csv"
    path.write_text("# second, tokens\n12.5, 40\n10\n\n11.5,7\n")
    assert read_arrivals(path) == (Arrival(0.0), Arrival(1.5, 7), Arrival(2.5, 40))
    load = LoadOptions(recorded=read_arrivals(path), rates=(4.0,), lengths=LENGTHS)
    prompts = load.prompts(4.0, 0, bytes_per_token=3)
    assert [prompt.tokens for prompt in prompts[1:]] == [7, 40]
    assert rate_of([Arrival(prompt.arrival) for prompt in prompts]) == pytest.approx(4.0)
    assert LoadOptions(recorded=read_arrivals(path)).known_rates() == (pytest.approx(0.8),)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1\nsoon\n", "line 2: seconds"),
        ("1, many\n", "line 1"),
        ("1, 0\n", "line 1"),
        ("nan\n", "line 1"),
        ("# nothing\n", "between 1 and 100,000 arrivals are needed, got 0"),
    ],
)
def test_what_is_no_file_of_arrivals_is_refused(tmp_path, text, told):
    path = tmp_path / "arrivals"
    path.write_text(text)
    with pytest.raises(FileError, match=told):
        read_arrivals(path)


def test_prompts_are_mixed_and_come_in_bursts():
    prompts = make_prompts([Arrival(0.0)] * 600, LENGTHS, [3], bytes_per_token=2)
    assert prompts == make_prompts([Arrival(0.0)] * 600, LENGTHS, [3], bytes_per_token=2)
    assert {len(prompt.text) for prompt in prompts} == {2 * prompt.tokens for prompt in prompts}
    tokens = [prompt.tokens for prompt in prompts]
    assert min(tokens) == 8
    assert max(tokens) == 64
    assert np.mean(tokens) == pytest.approx(LENGTHS.mean, rel=0.1)
    bursts = [[p.subject for p in prompts[begin : begin + 10]] for begin in range(0, 600, 10)]
    leading = [max(set(burst), key=burst.count) for burst in bursts]
    assert len(set(leading)) == 3
    assert np.mean([burst.count(lead) for burst, lead in zip(bursts, leading, strict=True)]) > 7


def prompt(number, tokens):
    return Prompt(number, 0.0, "code", tokens, b"x" * tokens)


def numbers(batch):
    return [[one.number for one in part] for part in batch]


def test_a_microbatch_takes_prompts_in_order_and_evens_tokens_out():
    waiting = [prompt(number, tokens) for number, tokens in enumerate([50, 10, 20, 30, 60, 5])]
    assert numbers(next_microbatch(waiting, 2, 64)) == [[0], [1, 2, 3]]
    assert numbers(next_microbatch(waiting[:1], 2, 64)) == [[0], []]


def test_a_prompt_beyond_the_budget_is_served_alone():
    waiting = [prompt(0, 500), prompt(1, 10), prompt(2, 60)]
    assert numbers(next_microbatch(waiting, 2, 64)) == [[0], [1]]


def test_rounds_differ_and_variants_do_not():
    load = LoadOptions(lengths=LENGTHS, seconds=2.0)
    first, second = (load.prompts(9.0, number, 1) for number in (0, 1))
    assert first == load.prompts(9.0, 0, 1)
    assert [p.arrival for p in first] != [p.arrival for p in second]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rates": (0.0,)}, "--rate must be positive numbers, got 0"),
        ({"rates": (math.inf,)}, "--rate must be positive numbers, got inf"),
        ({"shares": (-1.0,)}, "--load must be positive"),
        ({"seconds": 0.0}, "--seconds must lie in 0 to 3600, got 0"),
        ({"objective": math.nan}, "--slo must lie in 0 to 3600, got nan"),
        ({"rounds": 0}, "--rounds must be at least 1, got 0"),
        ({"seed": -1}, "--seed"),
    ],
)
def test_a_load_that_cannot_be_is_refused(given, told):
    with pytest.raises(ConfigError, match=told):
        LoadOptions(**given)
    with pytest.raises(ConfigError, match="got 9 and 8"):
        Lengths(shortest=9, longest=8)
    with pytest.raises(ConfigError, match="--burst must be at least 1"):
        Lengths(burst=0)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"ranks": 0}, "--ranks must lie between 1 and 64, got 0"),
        ({"slots": -1}, "--slots must not be negative, got -1"),
        ({"budget": 0}, "--budget must be at least 1, got 0"),
        ({"routing": "odd"}, "--routing is one of own, even, got 'odd'"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(given, told):
    with pytest.raises(ConfigError, match=told):
        EngineOptions(load=LoadOptions(), **given)
