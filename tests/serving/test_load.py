"""Arrivals, prompts, microbatches, and options of the load and the engine."""

import math

import pytest

from ultraep.errors import ConfigError, FileError
from ultraep.tools.serving.load import (
    Arrival,
    Lengths,
    LoadOptions,
    Prompt,
    next_microbatch,
    rate_of,
    read_arrivals,
)
from ultraep.tools.serving.run import EngineOptions

LENGTHS = Lengths(shortest=8, longest=64, burst=10)


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
