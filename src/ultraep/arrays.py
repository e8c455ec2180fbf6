"""The integer array type of the control plane, and the id that marks padding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

PADDING = -1  # expert id of a padding row, which is neither counted nor sent


def frozen(array: IntArray) -> IntArray:
    """Make an array read-only and return it."""
    array.flags.writeable = False
    return array
