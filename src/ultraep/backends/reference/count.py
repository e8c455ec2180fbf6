"""How many rows every expert gets, and how many ids name no expert.

Shapes: N routed rows, E experts.
"""

from __future__ import annotations

import numpy as np

from ultraep.arrays import PADDING, IntArray


def count(ids_N: IntArray, experts: int) -> tuple[IntArray, int]:
    """[E] rows of every expert, and the number of ids out of range. Padding is neither.

    >>> count(np.array([0, 2, 2, 7, PADDING]), 3)
    (array([1, 0, 2]), 1)
    """
    known = (ids_N >= 0) & (ids_N < experts)
    counts: IntArray = np.bincount(ids_N[known], minlength=experts).astype(np.int64)
    return counts, int((~known & (ids_N != PADDING)).sum())
