"""Rows times a scale each, on a GPU: the gates of experts that are modules.

Shapes: A rows, D width of a row.
"""

from __future__ import annotations

import torch

import ultraep.ops.products as plain
from ultraep.backends.triton.kernels import rowwise
from ultraep.backends.triton.launch import cdiv, matrix, power_of_2, quick

TILE, WIDEST, WARPS = 4096, 1024, 8  # elements, columns and warps of a tile


def scale_rows(rows_AD: torch.Tensor, scale_A: torch.Tensor, out_AD: torch.Tensor) -> None:
    """Write rows times their scale into `out_AD`."""
    if not _supported(scale_A, rows_AD):
        plain.scale_rows(rows_AD, scale_A, out_AD)
        return
    blocks = _tile_for(rows_AD.shape[1])
    quick(rowwise.scale_rows)[(cdiv(rows_AD.shape[0], blocks["BLOCK_M"]),)](
        matrix(rows_AD), scale_A, matrix(out_AD), rows_AD.shape[0], **blocks, num_warps=WARPS
    )


def scale_rows_backward(
    d_out_AD: torch.Tensor, rows_AD: torch.Tensor, scale_A: torch.Tensor, d_scale_A: torch.Tensor
) -> torch.Tensor:
    """Return the gradient [A, D] of the rows, and write the gradient of the scale."""
    if not _supported(scale_A, rows_AD, d_out_AD):
        return plain.scale_rows_backward(d_out_AD, rows_AD, scale_A, d_scale_A)
    d_rows_AD = torch.empty_like(rows_AD, memory_format=torch.contiguous_format)
    blocks = _tile_for(rows_AD.shape[1])
    quick(rowwise.scale_rows_backward)[(cdiv(rows_AD.shape[0], blocks["BLOCK_M"]),)](
        matrix(d_out_AD),
        matrix(rows_AD),
        scale_A,
        matrix(d_rows_AD),
        d_scale_A,
        rows_AD.shape[0],
        **blocks,
        num_warps=WARPS,
    )
    return d_rows_AD


def _supported(scale_A: torch.Tensor, *matrices: torch.Tensor) -> bool:
    """Return whether the kernels handle these shapes and dtypes; torch does otherwise."""
    return scale_A.dtype.itemsize <= 4 and all(
        rows.dtype.itemsize <= 4 and rows.stride(1) == 1 and len(rows) > 0 for rows in matrices
    )


def _tile_for(width: int) -> dict[str, int]:
    columns = min(WIDEST, power_of_2(width))
    return {"BLOCK_M": TILE // columns, "BLOCK_N": columns}
