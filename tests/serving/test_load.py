"""Arrivals, prompts, microbatches, and options of the load and the engine."""

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


def test_poisson_arrivals_have_the_rate_and_depend_on_the_seed():
    arrivals, again, other = (list(islice(poisson(50.0, [seed]), 5000)) for seed in (7, 7, 8))
    gaps = [later.second - earlier.second for earlier, later in pairwise(arrivals)]
    assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert np.std(gaps) == pytest.approx(1 / 50, rel=0.1)  # of an exponential distribution
    assert arrivals == again != other
    assert arrivals[0].second == 0.0


def test_an_arrivals_file_is_sorted_by_time_and_scaled_to_the_rate(tmp_path):
    path = tmp_path / "arrivals.csv"
    path.write_text("# second, tokens\n12.5, 40\n10\n\n11.5,7\n")
    recorded = read_arrivals(path)
    assert recorded == (Arrival(0.0), Arrival(1.5, 7), Arrival(2.5, 40))
    load = LoadOptions(recorded=recorded, rates=(4.0,), lengths=LENGTHS)
    prompts = load.prompts(4.0, 0, bytes_per_token=3)
    assert [prompt.tokens for prompt in prompts[1:]] == [7, 40]
    assert rate_of([Arrival(prompt.arrival) for prompt in prompts]) == pytest.approx(4.0)
    assert LoadOptions(recorded=recorded).known_rates() == (pytest.approx(0.8),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\nsoon\n", r"line 2: expected seconds\[,tokens\], got 'soon'"),
        ("1, many\n", "line 1"),
        ("1, 0\n", "line 1"),
        ("nan\n", "line 1"),
        ("# nothing\n", "between 1 and 100,000 arrivals are needed, got 0"),
    ],
)
def test_invalid_arrivals_files_are_refused(tmp_path, text, message):
    path = tmp_path / "arrivals"
    path.write_text(text)
    with pytest.raises(FileError, match=message):
        read_arrivals(path)


def test_prompts_have_mixed_lengths_and_come_in_bursts():
    prompts = make_prompts([Arrival(0.0)] * 600, LENGTHS, [3], bytes_per_token=2)
    assert prompts == make_prompts([Arrival(0.0)] * 600, LENGTHS, [3], bytes_per_token=2)
    assert {len(prompt.text) for prompt in prompts} == {2 * prompt.tokens for prompt in prompts}
    tokens = [prompt.tokens for prompt in prompts]
    assert (min(tokens), max(tokens)) == (8, 64)
    assert np.mean(tokens) == pytest.approx(LENGTHS.mean, rel=0.1)
    bursts = [[p.subject for p in prompts[begin : begin + 10]] for begin in range(0, 600, 10)]
    leading = [max(set(burst), key=burst.count) for burst in bursts]
    assert len(set(leading)) == 3
    assert np.mean([burst.count(lead) for burst, lead in zip(bursts, leading, strict=True)]) > 7


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        pytest.param([50, 10, 20, 30, 60, 5], [[0], [1, 2, 3]], id="in order, evenly"),
        pytest.param([50], [[0], []], id="one prompt"),
        pytest.param([500, 10, 60], [[0], [1]], id="over the budget, alone"),
    ],
)
def test_a_microbatch_takes_the_prompts_that_fit(tokens, expected):
    waiting = [Prompt(n, 0.0, "code", count, b"x" * count) for n, count in enumerate(tokens)]
    batch = next_microbatch(waiting, 2, 64)
    assert [[prompt.number for prompt in part] for part in batch] == expected


def test_rounds_differ_and_variants_take_turns_at_going_first():
    load = LoadOptions(lengths=LENGTHS, seconds=2.0, rounds=2)
    first, second = (load.prompts(9.0, number, 1) for number in (0, 1))
    assert first == load.prompts(9.0, 0, 1)
    assert [p.arrival for p in first] != [p.arrival for p in second]
    order = list(load.turns(("a", "b"), (1.0, 2.0)))
    assert [variant for variant, *_ in order] == list("abba" + "baab")
    assert len(set(order)) == 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LoadOptions(rates=(0.0,)), "--rate must be positive numbers, got 0"),
        (lambda: LoadOptions(rates=(math.inf,)), "--rate must be positive numbers, got inf"),
        (lambda: LoadOptions(shares=(-1.0,)), "--load must be positive"),
        (lambda: LoadOptions(seconds=0.0), "--seconds must lie in 0 to 3600, got 0"),
        (lambda: LoadOptions(objective=math.nan), "--slo must lie in 0 to 3600, got nan"),
        (lambda: LoadOptions(rounds=0), "--rounds must be at least 1, got 0"),
        (lambda: LoadOptions(seed=-1), "--seed"),
        (lambda: Lengths(shortest=9, longest=8), "got 9 and 8"),
        (lambda: Lengths(burst=0), "--burst must be at least 1"),
        (lambda: EngineOptions(load=LoadOptions(), ranks=0), "between 1 and 64, got 0"),
        (lambda: EngineOptions(load=LoadOptions(), slots=-1), "not be negative, got -1"),
        (lambda: EngineOptions(load=LoadOptions(), budget=0), "--budget must be at least 1, got 0"),
        (lambda: EngineOptions(load=LoadOptions(), routing="odd"), "one of own, even, got 'odd'"),
    ],
)
def test_invalid_options_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
