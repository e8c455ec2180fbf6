"""The load: when prompts arrive, their text and length, and how they form microbatches.

The load is open-loop: a prompt arrives on schedule, whether or not earlier prompts are answered.
Arrivals are drawn from a Poisson process, or read from a file with one line `second` or
`second, tokens` per prompt. Lines that start with # are comments:

    # second, tokens
    0.00, 120
    0.31, 64

Prompts are texts from Python's own library. Most prompts of a burst have the same subject, and
subjects load different experts. Lengths are uniform in the logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from ultraep.errors import ConfigError, FileError
from ultraep.files.reading import read_text
from ultraep_tools.tiny.text import MAIN, SUBJECTS

MOST_ARRIVALS = 100_000  # per turn
MOST_BYTES = 8 << 20  # per file
LONGEST_TURN = 3600.0  # seconds
Variant = TypeVar("Variant")


class Arrival(NamedTuple):
    """Arrival time in seconds, and the length of the prompt; None: drawn later."""

    second: float
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt. tokens: requested length; a server counts with its own tokenizer."""

    number: int
    arrival: float
    subject: str
    tokens: int
    text: bytes


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Range of prompt lengths in tokens. burst: prompts until the subject changes."""

    shortest: int = 16
    longest: int = 256
    burst: int = 12

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ConfigError(
                f"--shortest must lie between 1 and --longest, got {self.shortest} and "
                f"{self.longest}"
            )
        if self.burst < 1:
            raise ConfigError(f"--burst must be at least 1, got {self.burst}")

    @property
    def mean(self) -> float:
        """Mean length of a drawn prompt.

        >>> round(Lengths(shortest=16, longest=256).mean)
        87
        """
        low, high = self.shortest, self.longest + 1
        return (high - low) / float(np.log(high / low))


# -- arrivals ------------------------------------------------------------------------------------


def poisson(rate: float, seed: Sequence[int]) -> Iterator[Arrival]:
    """Draw arrivals without end, `rate` per second on average, starting at second 0.

    >>> from itertools import islice
    >>> [round(second, 2) for second, _ in islice(poisson(2.0, [0]), 5)]
    [0.0, 0.34, 0.85, 0.86, 0.86]
    """
    rng, second = np.random.default_rng(list(seed)), 0.0
    while True:
        yield Arrival(second)
        second += rng.exponential(1 / rate)


def read_arrivals(path: Path) -> tuple[Arrival, ...]:
    """Read a file of arrivals, sorted by time and shifted to start at second 0."""
    arrivals = []
    for number, line in enumerate(read_text(path, most=MOST_BYTES).splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            arrivals.append(_parse_arrival(line, f"{path}, line {number}"))
    if not 1 <= len(arrivals) <= MOST_ARRIVALS:
        raise FileError(
            f"{path}: between 1 and {MOST_ARRIVALS:,} arrivals are needed, got {len(arrivals):,}"
        )
    arrivals.sort(key=lambda arrival: arrival.second)
    return tuple(Arrival(second - arrivals[0].second, tokens) for second, tokens in arrivals)


def _parse_arrival(line: str, where: str) -> Arrival:
    second, _, tokens = line.partition(",")
    try:
        arrival = Arrival(float(second), int(tokens) if tokens.strip() else None)
    except ValueError:
        arrival = Arrival(math.nan)
    if not math.isfinite(arrival.second) or (arrival.tokens is not None and arrival.tokens < 1):
        raise FileError(f"{where}: expected seconds[,tokens], got {line.strip()!r}")
    return arrival


def rate_of(arrivals: Sequence[Arrival]) -> float:
    """Arrivals per second; infinite if all arrive at once.

    >>> rate_of([Arrival(0.0), Arrival(0.5), Arrival(1.0)])
    2.0
    """
    last = arrivals[-1].second
    return (len(arrivals) - 1) / last if last else math.inf


# -- prompts -------------------------------------------------------------------------------------


def make_prompts(
    arrivals: Sequence[Arrival],
    lengths: Lengths,
    seed: Sequence[int],
    bytes_per_token: int,
    texts: Mapping[str, bytes] | None = None,
) -> list[Prompt]:
    """Make a prompt for every arrival; the same seed gives the same prompts.

    texts: by subject; None: Python's own library.
    """
    texts = texts or library_texts()
    rng, subjects = np.random.default_rng([*seed, 1]), list(texts)
    low, high = np.log([lengths.shortest, lengths.longest + 1])
    prompts = []
    for number, (second, tokens) in enumerate(arrivals):
        drawn = int(np.exp(rng.uniform(low, high)))
        burst = number // lengths.burst % len(subjects)
        subject = subjects[burst if rng.random() < MAIN else rng.integers(len(subjects))]
        tokens = tokens or min(drawn, lengths.longest)
        begin = int(rng.integers(1 << 31))
        text = excerpt(texts[subject], begin, tokens * bytes_per_token)
        prompts.append(Prompt(number, second, subject, tokens, text))
    return prompts


@cache
def library_texts() -> dict[str, bytes]:
    return {name: read() for name, read in SUBJECTS.items()}


def excerpt(data: bytes, begin: int, length: int) -> bytes:
    """Return `length` bytes from `begin` on, wrapping around at the end.

    >>> excerpt(b"abcd", 6, 7)
    b'cdabcda'
    """
    begin %= len(data)
    piece = data[begin : begin + length]
    return (piece + data * (length // len(data) + 1))[:length] if len(piece) < length else piece


def next_microbatch(waiting: Sequence[Prompt], ranks: int, budget: int) -> list[list[Prompt]]:
    """Take the first prompts that fit, in order, each on the rank with the fewest tokens.

    budget: max tokens per rank. A longer prompt is served alone on its rank.
    """
    batch: list[list[Prompt]] = [[] for _ in range(ranks)]
    used = [0] * ranks
    for prompt in waiting:
        rank = used.index(min(used))
        if used[rank] and used[rank] + prompt.tokens > budget:
            break
        batch[rank].append(prompt)
        used[rank] += prompt.tokens
    return batch


# -- options -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The load of the engine or of servers.

    rates: prompts per second; empty: the rate of the recorded arrivals, or `shares` of the
        throughput of the engine without balancing.
    seconds: duration of the arrivals of a turn.   rounds: turns per variant and rate.
    objective: limit for the time to first token, in seconds.
    """

    rates: tuple[float, ...] = ()
    shares: tuple[float, ...] = (0.4, 0.8, 1.1, 1.4)
    seconds: float = 5.0
    rounds: int = 3
    lengths: Lengths = field(default_factory=Lengths)
    recorded: tuple[Arrival, ...] = ()
    objective: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, values in (("--rate", self.rates), ("--load", self.shares)):
            for value in values:
                if not 0 < value < math.inf:
                    raise ConfigError(f"{name} must be positive numbers, got {value:g}")
        for name, value in (("--seconds", self.seconds), ("--slo", self.objective)):
            if not 0 < value <= LONGEST_TURN:
                raise ConfigError(f"{name} must lie in 0 to {LONGEST_TURN:g}, got {value:g}")
        if self.rounds < 1:
            raise ConfigError(f"--rounds must be at least 1, got {self.rounds}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed must lie between 0 and 2**63 - 1, got {self.seed}")

    @cached_property
    def longest(self) -> int:
        """Length of the longest possible prompt, in tokens."""
        recorded = [arrival.tokens for arrival in self.recorded] or [None]
        return max(self.lengths.longest if tokens is None else tokens for tokens in recorded)

    def known_rates(self) -> tuple[float, ...]:
        """The rates, or () if a calibration must choose them."""
        return self.rates or ((rate_of(self.recorded),) if self.recorded else ())

    def prompts(self, rate: float, number: int, bytes_per_token: int) -> list[Prompt]:
        """The prompts of round `number` at one rate; the same for all variants."""
        seed = [self.seed, number]
        arrivals: Sequence[Arrival] = self.recorded
        if not arrivals:
            drawn = poisson(rate, [*seed, round(1000 * rate)])
            arrivals = list(takewhile(lambda arrival: arrival.second < self.seconds, drawn))
        elif math.isfinite(rate_of(arrivals)):
            factor = rate_of(arrivals) / rate
            arrivals = [Arrival(second * factor, tokens) for second, tokens in arrivals]
        return make_prompts(arrivals, self.lengths, seed, bytes_per_token)

    def seconds_at(self, rate: float) -> float:
        """Duration of the arrivals of a turn."""
        return len(self.recorded) / rate if self.recorded else self.seconds

    def turns(
        self, variants: Sequence[Variant], rates: Sequence[float]
    ) -> Iterator[tuple[Variant, float, int]]:
        """Variant, rate and round of every turn; variants take turns at going first."""
        for number in range(self.rounds):
            for place, rate in enumerate(rates):
                for index in range(len(variants)):
                    yield variants[(index + number + place) % len(variants)], rate, number
