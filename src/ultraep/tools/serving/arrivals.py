"""When prompts arrive: an open loop, in which nobody waits for an answer before the next one.

Drawn arrivals are a Poisson process. A file has a line for each, the second, or the second and the
tokens of the prompt with a comma between them; what begins with # is a comment:

    # second, tokens
    0.00, 120
    0.31, 64
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ultraep.errors import FileError
from ultraep.files.reading import read_text

MOST = 100_000  # arrivals of one turn
MOST_BYTES = 8 << 20  # of a file


class Arrival(NamedTuple):
    """A moment in seconds, and the tokens of the prompt; None: to be drawn."""

    second: float
    tokens: int | None = None


def poisson(rate: float, seconds: float, seed: Sequence[int]) -> list[Arrival]:
    """As many a second on average, for so long; the first one comes at once.

    >>> [round(second, 2) for second, _ in poisson(2.0, 3.0, [0])]
    [0.0, 0.34, 0.85, 0.86, 0.86, 1.14, 1.95, 2.29, 2.67]
    """
    rng, found = np.random.default_rng(list(seed)), [Arrival(0.0)]
    while True:
        second = found[-1].second + rng.exponential(1 / rate)
        if second >= seconds:
            return found
        found.append(Arrival(second))


def read_arrivals(path: Path) -> tuple[Arrival, ...]:
    """The arrivals of a file, in order of time; the first one is moved to the beginning."""
    lines = enumerate(read_text(path, most=MOST_BYTES).splitlines(), start=1)
    wanted = [(n, line) for n, line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not 1 <= len(wanted) <= MOST:
        raise FileError(f"{path}: between 1 and {MOST:,} arrivals are needed, got {len(wanted):,}")
    found = [_arrival(path, number, line) for number, line in wanted]
    found.sort(key=lambda arrival: arrival.second)
    return tuple(Arrival(one.second - found[0].second, one.tokens) for one in found)


def _arrival(path: Path, number: int, line: str) -> Arrival:
    second, _, tokens = line.partition(",")
    try:
        found = Arrival(float(second), int(tokens) if tokens.strip() else None)
    except ValueError:
        found = Arrival(math.nan)
    if not math.isfinite(found.second) or (found.tokens is not None and found.tokens < 1):
        raise FileError(f"{path}, line {number}: seconds[,tokens] is wanted, got {line.strip()!r}")
    return found


def rate_of(arrivals: Sequence[Arrival]) -> float:
    """Arrivals a second, as recorded; those that all come at once have no rate.

    >>> rate_of([Arrival(0.0), Arrival(0.5), Arrival(1.0)])
    2.0
    """
    last = arrivals[-1].second
    return (len(arrivals) - 1) / last if last else math.inf


def stretched(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """Arrivals like these at another rate.

    >>> [one.second for one in stretched([Arrival(0.0), Arrival(0.5), Arrival(1.0)], rate=4.0)]
    [0.0, 0.25, 0.5]
    """
    factor = rate_of(arrivals) / rate
    return [Arrival(one.second * factor, one.tokens) for one in arrivals]
