"""Tile sizes of the kernels of stage 6, by the compute capability of the GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
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


Table = Mapping[tuple[str, int | str], Blocks]  # by kernel, and bytes per element or format

_ROWS: Table = {
    (kernel, size): Blocks(4, 1024 // size, warps=8, resident=resident)
    for kernel, resident in (("swiglu", 6), ("swiglu_backward", 3), ("row_dots", 4))
    for size in (2, 4)
}


def _products(half: Blocks, gradients: Blocks, quantised: Blocks) -> Table:
    """Return a table: tiles of 16-bit products, of their gradients, and of FP8 products."""
    # Products of float32 are exact and use no tensor cores.
    single = Blocks(64, 64, 32, warps=4, stages=2, resident=2)
    return {
        ("multiply", 2): half,
        ("multiply_transposed", 2): half,
        ("weight_gradients", 2): gradients,
        **{(name, 4): single for name in ("multiply", "multiply_transposed", "weight_gradients")},
        **{("multiply_quantised", form): quantised for form in ("fp8", "fp8_rows")},
        **_ROWS,
    }


_HALF = Blocks(128, 256, 64, warps=8, stages=3, half=True)
_GRADIENTS = Blocks(128, 256, 64, warps=8, stages=3)
_SMALL = Blocks(128, 128, 64, warps=8, stages=2)
E4M3_FROM = (8, 9)

TABLES: dict[str, dict[tuple[int, int], Table]] = {  # by backend and least capability
    "cuda": {
        (0, 0): _products(_HALF, _GRADIENTS, Blocks(128, 128, 128, warps=8, stages=2)),
        E4M3_FROM: _products(
            _HALF, _GRADIENTS, Blocks(128, 256, 128, warps=8, stages=4, half=True)
        ),
    },
    "hip": {  # 64 KiB of shared memory
        (0, 0): _products(_SMALL, _SMALL, Blocks(64, 64, 128, warps=4, stages=2)),
    },
}


def capability_of(device: torch.device) -> tuple[str, tuple[int, int]]:
    """Return backend and compute capability of a GPU; the interpreter has the least one."""
    if torch.version.hip is not None:
        return "hip", (0, 0)
    if device.type != "cuda":
        return "cuda", (0, 0)
    return "cuda", torch.cuda.get_device_capability(device)


def multiplies_e4m3(backend: str, capability: tuple[int, int]) -> bool:
    """Return whether the tensor cores of a GPU multiply e4m3."""
    return backend == "cuda" and capability >= E4M3_FROM


def table_for(backend: str, capability: tuple[int, int]) -> Table:
    """Return the table of the highest capability that the GPU has."""
    tables = TABLES[backend]
    return tables[max(least for least in tables if least <= capability)]


def square_band(programs: int, blocks: Blocks) -> int:
    """Return the height of a band with which `programs` programs need the fewest rows and columns.

    >>> square_band(16, Blocks(128, 256))
    6
    """
    return max(1, round(math.sqrt(programs * blocks.columns / blocks.rows)))
