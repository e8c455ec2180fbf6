"""The one array type of the control plane, 64-bit integers, and the one id that is none."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

PADDING = -1  # in place of an expert's id: a row that is none, never counted and never sent


def frozen(array: IntArray) -> IntArray:
    """The array itself, refusing writes: records are shared and must not change."""
    array.flags.writeable = False
    return array
