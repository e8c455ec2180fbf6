"""Launches of `kernels/quantise`: the verbs of `formats` for tensors on a GPU.

Shapes: A rows, N and K those of a weight.
"""

from __future__ import annotations

import torch

import ultraep.ops.formats as formats
from ultraep.backends.triton.kernels import quantise as kernels
from ultraep.backends.triton.launch import cdiv, power_of_2, quick
from ultraep.ops.formats import Format

NUMBERS, WARPS = 8192, 8  # of a tile
PLAIN_ROWS, PLAIN_COLUMNS = 16, 256  # of a tile that is dequantised


def quantise(form: Format, values: torch.Tensor, data: torch.Tensor, scales: torch.Tensor) -> None:
    """Weights `[..., N, K]` into e4m3 numbers and their scales."""
    if values.dtype == torch.float64:
        formats.quantise(form, values, data, scales)
        return
    _quantise(_matrices(values), form.height, form.width, _matrices(data), _matrices(scales))


def dequantise(
    form: Format, data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """[..., N, K] weights, rounded once where the type cannot hold them."""
    out = torch.empty_like(data, dtype=dtype, memory_format=torch.contiguous_format)
    _dequantise(_matrices(data), _matrices(scales), form.height, form.width, _matrices(out))
    return out


def pack(form: Format, rows: torch.Tensor) -> torch.Tensor:
    """[A, bytes] rows `[A, K]`, each with its scales behind it."""
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
    """[A, K] rows; those from the number `end` on, which the device knows, are left out."""
    data, scales = form.parts(packed, columns)
    out = packed.new_empty(len(packed), columns, dtype=dtype)
    _dequantise(data[None], scales[None], 1, form.width, out[None], end)
    return out


def _matrices(stack: torch.Tensor) -> torch.Tensor:
    """[outer, N, K] of a tensor with two dimensions or more."""
    return stack[None] if stack.ndim == 2 else stack


def _quantise(
    values: torch.Tensor,
    height: int,
    width: int,
    data: torch.Tensor,
    scales: torch.Tensor,
    *,
    level: bool = False,
) -> None:
    """Groups of height x width numbers of matrices `[outer, N, K]`; width 0: all columns."""
    if not values.numel():
        return
    outer, rows, columns = values.shape
    group = width or columns
    groups, padded = cdiv(columns, group), power_of_2(group)
    together = power_of_2(groups) if level else 1
    high = height if height > 1 else max(1, NUMBERS // (together * padded))
    quick(kernels.quantise)[(cdiv(rows, high) * cdiv(groups, together), outer)](
        values,
        data.view(torch.uint8),
        scales,
        rows,
        columns,
        values.stride(0),
        values.stride(1),
        data.stride(0),
        data.stride(1),
        scales.stride(0),
        scales.stride(1),
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
    """Matrices `[outer, N, K]`, height x width of whose numbers share a scale."""
    outer, rows, columns = data.shape
    if not data.numel():
        return
    grid = cdiv(rows, PLAIN_ROWS) * cdiv(columns, PLAIN_COLUMNS), outer
    quick(kernels.dequantise)[grid](
        data.view(torch.uint8),
        scales,
        end,
        out,
        rows,
        columns,
        data.stride(0),
        data.stride(1),
        scales.stride(0),
        scales.stride(1),
        out.stride(0),
        out.stride(1),
        HIGH=height,
        WIDE=width or max(columns, PLAIN_COLUMNS),
        BLOCK_M=PLAIN_ROWS,
        BLOCK_N=PLAIN_COLUMNS,
        num_warps=WARPS // 2,
    )
