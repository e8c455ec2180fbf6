"""Tile sizes of the kernels of stage 6."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, eq=False)
class Blocks:
    """Tiles of rows x columns, in steps of `depth`; `band` rows of tiles share their columns."""

    rows: int
    columns: int
    depth: int = 0
    warps: int = 4
    stages: int = 3
    band: int = 8
    resident: int = 1  # programs per multiprocessor
    half: bool = False  # whether slots of few rows may use tiles of half the height


Table = Mapping[tuple[str, int], Blocks]  # by kernel, and bytes per element

_ROWS: Table = {
    (kernel, size): Blocks(4, 1024 // size, warps=8, resident=resident)
    for kernel, resident in (("swiglu", 6), ("swiglu_backward", 3), ("row_dots", 4))
    for size in (2, 4)
}


def _products(half: Blocks, gradients: Blocks) -> Table:
    """Return a table: tiles of 16-bit products, and of their gradients."""
    # Products of float32 are exact and use no tensor cores.
    single = Blocks(64, 64, 32, warps=4, stages=2, resident=2)
    return {
        ("multiply", 2): half,
        ("multiply_transposed", 2): half,
        ("weight_gradients", 2): gradients,
        **{(name, 4): single for name in ("multiply", "multiply_transposed", "weight_gradients")},
        **_ROWS,
    }


_HALF = Blocks(128, 256, 64, warps=8, stages=3, half=True)
_GRADIENTS = Blocks(128, 256, 64, warps=8, stages=3)
_SMALL = Blocks(128, 128, 64, warps=8, stages=2)
_FP8 = Blocks(128, 256, 128, warps=8, stages=4, half=True)
E4M3_FROM = (8, 9)  # compute capability

TABLES: dict[str, Table] = {
    "cuda": {**_products(_HALF, _GRADIENTS), ("multiply", 1): _FP8},
    "hip": _products(_SMALL, _SMALL),  # 64 KiB of shared memory
}


def multiplies_e4m3(device: torch.device) -> bool:
    """Return whether the kernels multiply e4m3 on this device; the interpreter does."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= E4M3_FROM


def default_table() -> Table:
    """Return the tile sizes of this machine's GPUs."""
    return TABLES["cuda" if torch.version.hip is None else "hip"]


@cache
def square_band(programs: int, blocks: Blocks) -> int:
    """Return the height of a band with which `programs` programs need the fewest rows and columns.

    >>> square_band(16, Blocks(128, 256))
    6
    """
    return max(1, round(math.sqrt(programs * blocks.columns / blocks.rows)))
