"""Launches of rows times one number each, for rows whose number the host knows.

What the kernels do not know is left to their twins: double precision, rows with gaps, no rows.

Shapes: A rows, D width.
"""

from __future__ import annotations

import torch

import ultraep.ops.products as plain
from ultraep.backends.triton.kernels import scale as kernels
from ultraep.backends.triton.launch import cdiv, power_of_2, quick

TILE, WIDEST, WARPS = 4096, 1024, 8


def scale_rows(rows_AD: torch.Tensor, scale_A: torch.Tensor, out_AD: torch.Tensor) -> None:
    """Into `out_AD`, rows times their scale."""
    if not known(scale_A, rows_AD):
        plain.scale_rows(rows_AD, scale_A, out_AD)
        return
    (num_rows, width), blocks = rows_AD.shape, tile_for(rows_AD.shape[1])
    quick(kernels.scale_rows)[(cdiv(num_rows, blocks["M"]),)](
        rows_AD,
        scale_A,
        out_AD,
        num_rows,
        width,
        rows_AD.stride(0),
        out_AD.stride(0),
        **blocks,
        num_warps=WARPS,
    )


def scale_rows_backward(
    d_out_AD: torch.Tensor, rows_AD: torch.Tensor, scale_A: torch.Tensor, d_scale_A: torch.Tensor
) -> torch.Tensor:
    """[A, D] gradients of the rows; into `d_scale_A`, those of their scale."""
    if not known(scale_A, rows_AD, d_out_AD):
        return plain.scale_rows_backward(d_out_AD, rows_AD, scale_A, d_scale_A)
    d_rows_AD = torch.empty_like(rows_AD, memory_format=torch.contiguous_format)
    (num_rows, width), blocks = rows_AD.shape, tile_for(rows_AD.shape[1])
    quick(kernels.scale_rows_backward)[(cdiv(num_rows, blocks["M"]),)](
        d_out_AD,
        rows_AD,
        scale_A,
        d_rows_AD,
        d_scale_A,
        num_rows,
        width,
        d_out_AD.stride(0),
        rows_AD.stride(0),
        d_rows_AD.stride(0),
        **blocks,
        num_warps=WARPS,
    )
    return d_rows_AD


def known(scale_A: torch.Tensor, *of_rows: torch.Tensor) -> bool:
    """Whether the kernels know such rows."""
    return scale_A.dtype.itemsize <= 4 and all(
        rows.dtype.itemsize <= 4 and rows.stride(1) == 1 and rows.shape[0] > 0 for rows in of_rows
    )


def tile_for(width: int) -> dict[str, int]:
    """Rows and columns of a tile."""
    columns = min(WIDEST, power_of_2(width))
    return {"M": TILE // columns, "N": columns}
