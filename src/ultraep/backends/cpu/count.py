"""Twin of `reference/count.py`."""

import numpy as np
from numba import njit

from ultraep.arrays import PADDING


@njit(cache=True)
def count(ids_N, experts):
    """[E] rows of every expert, and the number of ids out of range. Padding is neither."""
    counts = np.zeros(experts, np.int64)
    unknown = 0
    for expert in ids_N:
        if 0 <= expert < experts:
            counts[expert] += 1
        elif expert != PADDING:
            unknown += 1
    return counts, unknown
