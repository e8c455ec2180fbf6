"""What prompts say: text that every machine has, of mixed subjects and lengths, in bursts.

Subjects load other experts. They come in bursts: for some prompts most are of one subject, then
of the next, so that the load moves as it does where users are. Lengths are spread evenly in their
logarithm: many short ones, few long ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from ultraep.tools.serving.arrivals import Arrival
from ultraep.tools.tiny.text import MAIN, SUBJECTS


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text that asks for its first token, at some second after the beginning."""

    number: int
    arrival: float
    subject: str
    tokens: int  # that are wanted; a server counts its own
    text: bytes


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """How long prompts are, and for how many of them a subject stays."""

    shortest: int
    longest: int
    burst: int


def make_prompts(
    arrivals: Sequence[Arrival], lengths: Lengths, seed: Sequence[int], bytes_per_token: int
) -> list[Prompt]:
    """A prompt for every arrival; the same seed gives the same ones."""
    rng, names = np.random.default_rng([*seed, 1]), list(SUBJECTS)
    low, high = np.log([lengths.shortest, lengths.longest + 1])
    found = []
    for number, (second, tokens) in enumerate(arrivals):
        drawn = int(np.exp(rng.uniform(low, high)))
        burst = number // lengths.burst % len(names)
        subject = names[burst if rng.random() < MAIN else rng.integers(len(names))]
        tokens = tokens or min(drawn, lengths.longest)
        begin = int(rng.integers(1 << 31))
        text = piece(subject_text(subject), begin, tokens * bytes_per_token)
        found.append(Prompt(number, second, subject, tokens, text))
    return found


def mean_tokens(lengths: Lengths) -> float:
    """Tokens of a drawn prompt, on average.

    >>> round(mean_tokens(Lengths(shortest=16, longest=256, burst=1)))
    87
    """
    low, high = lengths.shortest, lengths.longest + 1
    return (high - low) / float(np.log(high / low))


@cache
def subject_text(name: str) -> bytes:
    """All there is of a subject."""
    return SUBJECTS[name]()


def piece(data: bytes, begin: int, length: int) -> bytes:
    """So many bytes from some place on; behind the last one follows the first.

    >>> piece(b"abcd", 6, 7)
    b'cdabcda'
    """
    begin %= len(data)
    return (data[begin:] + data * (length // len(data) + 1))[:length]
