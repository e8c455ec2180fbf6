"""Launches of `kernels/fp8`: the functions of `ops.fp8` for tensors on a GPU.

Shapes: A row capacity, K columns, F hidden width.
"""

from __future__ import annotations

import torch

import ultraep.ops.fp8 as plain
from ultraep.backends.triton.kernels import fp8 as kernels
from ultraep.backends.triton.launch import cdiv, matrix, power_of_2, quick
from ultraep.ops.fp8 import empty_packed, parts
from ultraep.ops.modes import outside_dispatch_modes

ELEMENTS, WARPS = 8192, 8  # of a tile of `quantise` and `dequantise`
ACTIVATED, ACTIVATED_WARPS = 2048, 4  # of a tile of the activation
RESIDENT = 8  # programs of the activation per multiprocessor


def quantise(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantise rows `[..., K]` into `codes`, of the same shape, and `scales` `[..., 1]`."""
    if values.dtype == torch.float64:
        plain.quantise(values, codes, scales)
        return
    rows = values.flatten(0, -2)
    if rows.numel():
        high, padded = _tile(rows.shape[1], ELEMENTS)
        quick(kernels.quantise)[(cdiv(len(rows), high),)](
            matrix(rows if rows.stride(1) == 1 else rows.contiguous()),
            matrix(codes.view(torch.uint8).flatten(0, -2)),
            matrix(scales.flatten(0, -2)),
            len(rows),
            BLOCK_M=high,
            BLOCK_N=padded,
            num_warps=WARPS,
        )


@outside_dispatch_modes
def dequantise(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, used: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the numbers `[..., K]`. Rows behind `used` [1], if it is given, are not written."""
    if dtype == torch.float64:
        return plain.dequantise(codes, scales, dtype)
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    rows = codes.view(torch.uint8).flatten(0, -2)
    if rows.numel():
        high, padded = _tile(rows.shape[1], ELEMENTS)
        quick(kernels.dequantise)[(cdiv(len(rows), high),)](
            matrix(rows),
            matrix(scales.flatten(0, -2)),
            used,
            matrix(out.flatten(0, -2)),
            len(rows),
            BLOCK_M=high,
            BLOCK_N=padded,
            num_warps=WARPS,
        )
    return out


def swiglu_packed(up: torch.Tensor, offsets: torch.Tensor, programs: int) -> torch.Tensor:
    """Return packed rows: silu of the first half of `up` [A, 2F], times the second half.

    Rows behind `offsets[-1]` are neither read nor written.
    """
    width = up.shape[1] // 2
    packed = empty_packed(len(up), width, up.device)
    codes, scales = parts(packed, width)
    high, padded = _tile(width, ACTIVATED)
    quick(kernels.swiglu_quantise)[(programs * RESIDENT,)](
        matrix(up),
        offsets,
        matrix(codes.view(torch.uint8)),
        matrix(scales),
        len(offsets) - 1,
        BLOCK_M=high,
        BLOCK_N=padded,
        num_warps=ACTIVATED_WARPS,
    )
    return packed


def _tile(columns: int, elements: int) -> tuple[int, int]:
    """Return rows and columns of a tile of whole rows."""
    padded = power_of_2(columns)
    return max(1, elements // padded), padded
