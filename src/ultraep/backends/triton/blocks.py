"""How the kernels of stage 6 cut their work, by the maker of the GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ultraep.backends.triton.launch import power_of_2


@dataclass(frozen=True)
class Blocks:
    """How a kernel cuts its work, and what a multiprocessor holds of it.

    Tiles of rows x columns, in steps of `depth`; `band` rows of tiles share their columns.
    """

    rows: int
    columns: int
    depth: int = 0
    warps: int = 4
    stages: int = 3
    band: int = 8
    resident: int = 1  # programs on one multiprocessor
    half: bool = False  # whether slots of few rows may have a tile of half the height
    narrow: bool = False  # whether the last columns may be a tile of fewer ones

    def last(self, width: int) -> int:
        """Columns of the last tile of so many: 64 of 2880 in tiles of 256 that may be narrow."""
        left = width % self.columns
        if not left or not self.narrow:
            return self.columns
        return int(min(self.columns, max(16, power_of_2(left))))


Table = Mapping[tuple[str, int], Blocks]  # by kernel and bytes of an element

_ROWS = {
    (kernel, size): Blocks(4, 1024 // size, warps=8, resident=resident)
    for kernel, resident in (("swiglu", 6), ("swiglu_backward", 3), ("row_dots", 4))
    for size in (2, 4)
}
_FULL = {  # no tensor cores: exact products of single precision
    (kernel, 4): Blocks(64, 64, 32, warps=4, stages=2, resident=2)
    for kernel in ("multiply", "multiply_transposed", "weight_gradients")
}
TABLES: dict[str, Table] = {
    "cuda": {
        ("multiply", 2): Blocks(128, 256, 64, warps=8, stages=3, half=True),
        ("multiply_transposed", 2): Blocks(128, 256, 64, warps=8, stages=3, half=True),
        ("weight_gradients", 2): Blocks(128, 256, 64, warps=8, stages=3),
        **_FULL,
        **_ROWS,
    },
    "hip": {  # 64 KiB of shared memory
        ("multiply", 2): Blocks(128, 128, 64, warps=8, stages=2),
        ("multiply_transposed", 2): Blocks(128, 128, 64, warps=8, stages=2),
        ("weight_gradients", 2): Blocks(128, 128, 64, warps=8, stages=2),
        **_FULL,
        **_ROWS,
    },
}


def square_band(programs: int, blocks: Blocks) -> int:
    """Rows of tiles in a band with which so many programs need the fewest rows and columns at once.

    >>> square_band(16, Blocks(128, 256))
    6
    """
    return max(1, round(math.sqrt(programs * blocks.columns / blocks.rows)))
