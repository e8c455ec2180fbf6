"""The integer array type of the control plane, its digest, and the id that marks padding."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

PADDING = -1  # expert id of a padding row, which is neither counted nor sent
MULTIPLIER = 0x9E3779B97F4A7C15  # of the digests before: their order counts


def frozen(array: IntArray) -> IntArray:
    """Make an array read-only and return it."""
    array.flags.writeable = False
    return array


def digest_of(*arrays: IntArray) -> int:
    """Return a 63-bit digest of arrays, quick to compute; never 0."""
    digest = 0
    for array in arrays:
        flat = array.reshape(-1)
        factors = _factors(len(flat).bit_length())[: len(flat)]
        digest = digest * MULTIPLIER + int(np.dot(factors, flat)) + len(flat)
    return digest % (1 << 63) or 1


@cache
def _factors(bits: int) -> IntArray:
    """Return 2**bits random odd numbers (by splitmix64), the same in every process."""
    mixed = np.arange(1, (1 << bits) + 1, dtype=np.uint64) * np.uint64(MULTIPLIER)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed.view(np.int64) | 1
