"""Launches of `kernels/quantise`: the functions of `ops.formats` for tensors on a GPU.

Shapes: A rows, H weights of N and K.
"""

from __future__ import annotations

import torch

import ultraep.ops.formats as formats
from ultraep.backends.triton.kernels import quantise as kernels
from ultraep.backends.triton.kernels.quantise import MatrixStack
from ultraep.backends.triton.launch import cdiv, power_of_2, quick
from ultraep.ops.formats import Format

ELEMENTS, WARPS = 8192, 8  # of a tile of `quantise`
ROWS, COLUMNS = 16, 256  # of a tile of `dequantise`


def quantise(
    form: Format,
    values: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Quantise weights [H, N, K] into e4m3 codes and their scales.

    kept: two integers on the device; while they are equal and not 0, nothing is written.
    """
    if values.dtype == torch.float64:
        formats.quantise(form, values, data, scales)
        return
    _quantise(values, form.height, form.width, data, scales, kept=kept)


def dequantise(
    form: Format, data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return weights [H, N, K], rounded once if the dtype cannot hold them."""
    out = torch.empty_like(data, dtype=dtype, memory_format=torch.contiguous_format)
    _dequantise(data, scales, form.height, form.width, out)
    return out


def pack(form: Format, rows: torch.Tensor) -> torch.Tensor:
    """Return rows [A, K] as bytes: the codes of a row, then its scales."""
    if rows.dtype == torch.float64:
        return formats.pack(form, rows)
    packed = rows.new_empty(len(rows), form.row_bytes(rows.shape[1]), dtype=torch.uint8)
    data, scales = form.parts(packed, rows.shape[1])
    _quantise(rows[None], 1, form.width, data[None], scales[None], level=True)
    return packed


def unpack(
    form: Format,
    packed: torch.Tensor,
    columns: int,
    dtype: torch.dtype,
    end: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return rows [A, K]; rows from the number in `end` on stay uninitialised."""
    data, scales = form.parts(packed, columns)
    out = packed.new_empty(len(packed), columns, dtype=dtype)
    _dequantise(data[None], scales[None], 1, form.width, out[None], end)
    return out


def _argument(stack: torch.Tensor) -> MatrixStack:
    return MatrixStack(stack, stack.stride(0), stack.stride(1))


def _quantise(
    values: torch.Tensor,
    height: int,
    width: int,
    data: torch.Tensor,
    scales: torch.Tensor,
    *,
    level: bool = False,
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Quantise matrices [outer, N, K]; height x width elements share a scale. Width 0: all."""
    if not values.numel():
        return
    outer, rows, columns = values.shape
    group = width or columns
    groups, padded = cdiv(columns, group), power_of_2(group)
    together = power_of_2(groups) if level else 1
    high = height if height > 1 else max(1, ELEMENTS // (together * padded))
    quick(kernels.quantise)[(cdiv(rows, high) * cdiv(groups, together), outer)](
        _argument(values),
        _argument(data.view(torch.uint8)),
        _argument(scales),
        *(kept or (None, None)),
        rows,
        columns,
        GROUP=group,
        WHOLE=height > 1,
        LEVEL=together > 1,
        BLOCK_M=high,
        G=together,
        BLOCK_N=padded,
        num_warps=WARPS,
    )


def _dequantise(
    data: torch.Tensor,
    scales: torch.Tensor,
    height: int,
    width: int,
    out: torch.Tensor,
    end: torch.Tensor | None = None,
) -> None:
    """Dequantise matrices [outer, N, K]; height x width codes share a scale."""
    outer, rows, columns = data.shape
    if not data.numel():
        return
    quick(kernels.dequantise)[(cdiv(rows, ROWS) * cdiv(columns, COLUMNS), outer)](
        _argument(data.view(torch.uint8)),
        _argument(scales),
        end,
        _argument(out),
        rows,
        columns,
        HIGH=height,
        WIDE=width or max(columns, COLUMNS),
        BLOCK_M=ROWS,
        BLOCK_N=COLUMNS,
        num_warps=WARPS // 2,
    )
