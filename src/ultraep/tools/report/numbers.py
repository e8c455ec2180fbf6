"""Numbers of a report, ready for JSON."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray

Numbers = dict[str, Any]
FloatArray = NDArray[np.float64]
MOST_NUMBERS = 400_000  # of the microbatches to choose from
DIGITS = 6


def plain(values: Any) -> list[float | None]:
    """As JSON has them: rounded, and None in place of what is no number."""
    found = np.asarray(values, dtype=np.float64).tolist()
    return [round(value, DIGITS) if math.isfinite(value) else None for value in found]


def kept(count: int, size: int, wanted: int, most: int = MOST_NUMBERS) -> IntArray:
    """Moments of so many numbers each: as many as fit, evenly spread, and the wanted one.

    >>> kept(9, size=1, wanted=5, most=3)
    array([0, 4, 5, 8])
    """
    fitting = max(2, most // max(size, 1))
    if count <= fitting:
        return np.arange(count)
    spread = np.linspace(0, count - 1, fitting).round().astype(np.int64)
    return np.union1d(spread, [wanted])
