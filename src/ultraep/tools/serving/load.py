"""The load: when prompts arrive, what they say, and which of them become one microbatch.

Arrivals are an open loop: nobody waits for an answer before sending the next prompt. They are drawn
from a Poisson process, or read from a file with a line `second` or `second, tokens` for each
prompt, where # begins a comment:

    # second, tokens
    0.00, 120
    0.31, 64

Prompts are text of this machine. Subjects load different experts and come in bursts, so that the
load moves. Lengths are spread evenly in their logarithm: many short ones, few long ones.
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
from ultraep.tools.tiny.text import MAIN, SUBJECTS

MOST_ARRIVALS = 100_000  # of one turn
MOST_BYTES = 8 << 20  # of a file
LONGEST_TURN = 3600.0  # seconds
Variant = TypeVar("Variant")


class Arrival(NamedTuple):
    """A moment in seconds, and the tokens of the prompt; None: to be drawn."""

    second: float
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text that asks for its first token, some seconds after the beginning."""

    number: int
    arrival: float
    subject: str
    tokens: int  # that are wanted; a server counts its own
    text: bytes


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of prompts, and for how many prompts a subject stays."""

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
        """Tokens of a drawn prompt, on average.

        >>> round(Lengths(shortest=16, longest=256).mean)
        87
        """
        low, high = self.shortest, self.longest + 1
        return (high - low) / float(np.log(high / low))


# -- arrivals ------------------------------------------------------------------------------------


def poisson(rate: float, seed: Sequence[int]) -> Iterator[Arrival]:
    """Draw `rate` arrivals a second on average, without end; the first one comes at once.

    >>> from itertools import islice
    >>> [round(second, 2) for second, _ in islice(poisson(2.0, [0]), 5)]
    [0.0, 0.34, 0.85, 0.86, 0.86]
    """
    rng, second = np.random.default_rng(list(seed)), 0.0
    while True:
        yield Arrival(second)
        second += rng.exponential(1 / rate)


def read_arrivals(path: Path) -> tuple[Arrival, ...]:
    """The arrivals of a file, in order of time; the first one is moved to the beginning."""
    lines = enumerate(read_text(path, most=MOST_BYTES).splitlines(), start=1)
    entries = [(n, line) for n, line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not 1 <= len(entries) <= MOST_ARRIVALS:
        raise FileError(
            f"{path}: between 1 and {MOST_ARRIVALS:,} arrivals are needed, got {len(entries):,}"
        )
    arrivals = [_arrival(path, number, line) for number, line in entries]
    arrivals.sort(key=lambda arrival: arrival.second)
    return tuple(Arrival(second - arrivals[0].second, tokens) for second, tokens in arrivals)


def _arrival(path: Path, number: int, line: str) -> Arrival:
    second, _, tokens = line.partition(",")
    try:
        arrival = Arrival(float(second), int(tokens) if tokens.strip() else None)
    except ValueError:
        arrival = Arrival(math.nan)
    if not math.isfinite(arrival.second) or (arrival.tokens is not None and arrival.tokens < 1):
        raise FileError(f"{path}, line {number}: seconds[,tokens] is wanted, got {line.strip()!r}")
    return arrival


def rate_of(arrivals: Sequence[Arrival]) -> float:
    """Arrivals a second, as recorded; arrivals that all come at once have no rate.

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
    """A prompt for every arrival; the same seed gives the same prompts.

    texts: by subject; None: those of this machine.
    """
    texts = texts or library_texts()
    rng, names = np.random.default_rng([*seed, 1]), list(texts)
    low, high = np.log([lengths.shortest, lengths.longest + 1])
    prompts = []
    for number, (second, tokens) in enumerate(arrivals):
        drawn = int(np.exp(rng.uniform(low, high)))
        burst = number // lengths.burst % len(names)
        subject = names[burst if rng.random() < MAIN else rng.integers(len(names))]
        tokens = tokens or min(drawn, lengths.longest)
        begin = int(rng.integers(1 << 31))
        text = piece(texts[subject], begin, tokens * bytes_per_token)
        prompts.append(Prompt(number, second, subject, tokens, text))
    return prompts


@cache
def library_texts() -> dict[str, bytes]:
    """All text of this machine, by subject."""
    return {name: read() for name, read in SUBJECTS.items()}


def piece(data: bytes, begin: int, length: int) -> bytes:
    """So many bytes from some place on; behind the last one follows the first.

    >>> piece(b"abcd", 6, 7)
    b'cdabcda'
    """
    begin %= len(data)
    return (data[begin:] + data * (length // len(data) + 1))[:length]


def next_microbatch(waiting: Sequence[Prompt], ranks: int, budget: int) -> list[list[Prompt]]:
    """The first prompts that fit, in order, each on the rank with the fewest tokens.

    budget: most tokens of a rank. A prompt that is longer than that is served alone on its rank.
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
    """The load, whoever serves it.

    rates: prompts a second; empty: by `shares` of what the first variant can serve, or as the
        file of arrivals has them.
    seconds: of the arrivals of one turn.   rounds: turns of every variant at every rate.
    objective: seconds within which a first token is wanted.
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
        """Tokens of the longest prompt that can come."""
        recorded = [arrival.tokens for arrival in self.recorded] or [None]
        return max(self.lengths.longest if tokens is None else tokens for tokens in recorded)

    def known_rates(self) -> tuple[float, ...]:
        """The rates, if they need no calibration."""
        return self.rates or ((rate_of(self.recorded),) if self.recorded else ())

    def prompts(self, rate: float, number: int, bytes_per_token: int) -> list[Prompt]:
        """The prompts of one round at one rate; the same for all variants."""
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
        """How long the arrivals of a turn take."""
        return len(self.recorded) / rate if self.recorded else self.seconds

    def turns(
        self, variants: Sequence[Variant], rates: Sequence[float]
    ) -> Iterator[tuple[Variant, float, int]]:
        """Variant, rate and round of every turn; variants take turns at being first."""
        for number in range(self.rounds):
            for place, rate in enumerate(rates):
                for index in range(len(variants)):
                    yield variants[(index + number + place) % len(variants)], rate, number
