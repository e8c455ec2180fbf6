"""Steps: the number of every microbatch, the same in traces, errors and flight files."""

from __future__ import annotations

from collections import defaultdict

from ultraep.errors import ConfigError

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
