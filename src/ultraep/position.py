"""Position: where a rank is in the program. Ranks compare theirs and name those that differ.

`Steps` numbers the microbatches, the same in traces, errors and flight files.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from enum import IntEnum
from typing import NamedTuple

from ultraep.errors import ConfigError, PlanMismatch

POINTS, LAYERS, MICROBATCHES = 16, 4096, 32768  # that the first word of a position tells apart


class At(IntEnum):
    """A point of the program at which ranks compare records."""

    LOADS = 0
    LOADS_RECOMPUTED = 1
    PLAN = 2
    BACKWARD = 3
    STATE = 4
    PLANE = 5
    RATES = 6
    SPEEDS = 7
    ROWS = 8


NAMES = (  # of the points
    *("the loads", "the loads, recomputed in backward,", "the plan", "the backward pass"),
    *("the full state", "the choice of a data plane", "the measurement of rates"),
    *("the comparison of speeds", "the rows"),
)


class Position(NamedTuple):
    """The position of a rank in the program. Steps are numbered as in a trace."""

    at: int
    layer: int
    step: int
    microbatch: int = 0

    def __str__(self) -> str:
        return f"{NAMES[self.at]} of layer {self.layer} ({moment(self.step, self.microbatch)})"

    @property
    def words(self) -> tuple[int, int]:
        """Two 32-bit integers, for kernels."""
        microbatch, layer = self.microbatch % MICROBATCHES, (self.layer + 1) % LAYERS
        return (microbatch * LAYERS + layer) * POINTS + self.at, self.step & 0x7FFFFFFF

    @classmethod
    def from_words(cls, first: int, step: int) -> Position:
        """Return the position with these `words`.

        >>> Position.from_words(*Position(At.BACKWARD, 2, 7, 1).words)
        Position(at=3, layer=2, step=7, microbatch=1)
        """
        place, at = divmod(first, POINTS)
        microbatch, layer = divmod(place, LAYERS)
        return cls(at, layer - 1, step, microbatch)


def moment(step: int, microbatch: int) -> str:
    """Return step and microbatch in words.

    >>> moment(5, 0), moment(5, 2)
    ('step 5', 'step 5, microbatch 2')
    """
    return f"step {step}" + f", microbatch {microbatch}" * bool(microbatch)


def compare_positions(positions: Sequence[Position], place: object) -> None:
    """Raise on a rank at `place` if not all ranks are at the same position."""
    if len(set(positions)) > 1:
        groups = ranks_by_value(positions).items()
        listed = "; ".join(f"ranks {ranks} are at {other}" for other, ranks in groups)
        raise PlanMismatch(
            f"ranks are at different places of the program: {listed}",
            ranks=differing(positions),
            place=place,
        )


def compare_values(
    what: str, values: Sequence[Hashable], descriptions: Sequence[str], place: object = ""
) -> None:
    """Raise with the descriptions if the values of all ranks are not equal."""
    groups = ranks_by_value(values).values()
    if len(groups) > 1:
        listed = "; ".join(f"ranks {ranks} have {descriptions[ranks[0]]}" for ranks in groups)
        text = f"ranks disagree about {what}: {listed}"
        raise PlanMismatch(text, ranks=differing(values), place=place)


def ranks_by_value(values: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """Return the ranks that have each value."""
    groups: dict[Hashable, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return groups


def differing(values: Sequence[Hashable]) -> list[int]:
    """Return the ranks that differ from most ranks; all ranks if no value is the most common.

    >>> differing("aba"), differing("ab")
    ([1], [0, 1])
    """
    (common, most), *rest = Counter(values).most_common()
    if rest and rest[0][1] == most:
        return list(range(len(values)))
    return [rank for rank, value in enumerate(values) if value != common]


REMEMBERED = 64  # steps whose microbatches are counted


class Steps:
    """Numbers the microbatches of every layer: step by step, or inside of the steps of the caller.

    >>> steps = Steps()
    >>> steps.next(0), steps.next(0)
    ((0, 0), (1, 0))
    >>> steps.begin(7)
    >>> steps.next(0), steps.next(0), steps.last(0)
    ((7, 0), (7, 1), (7, 1))
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._numbers: dict[int, int] = defaultdict(int)  # microbatches of every layer
        self._counts: dict[int, dict[int, int]] = {}  # microbatches by step and layer
        self._last: dict[int, tuple[int, int]] = {}

    def begin(self, step: int) -> None:
        """Set the step of the microbatches from now on."""
        if step < 0:
            raise ConfigError(f"a step must not be negative, got {step}")
        self._step = step

    def next(self, layer: int) -> tuple[int, int]:
        """Return step and microbatch of a new microbatch."""
        self._last[layer] = self._next(layer)
        return self._last[layer]

    def last(self, layer: int) -> tuple[int, int]:
        """Return step and microbatch of the last microbatch of a layer; zeros before the first."""
        return self._last.get(layer, (0, 0))

    def _next(self, layer: int) -> tuple[int, int]:
        self._numbers[layer] += 1
        if self._step is None:  # every microbatch is a step
            return self._numbers[layer] - 1, 0
        counts = self._counts.setdefault(self._step, defaultdict(int))
        counts[layer] += 1
        while len(self._counts) > REMEMBERED:
            del self._counts[next(iter(self._counts))]
        return self._step, counts[layer] - 1
