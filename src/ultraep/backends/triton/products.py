"""Products of stage 6 on a GPU, with numbers of rows that only the device need know.

And rows times one number each, for rows whose number the host knows.

Shapes: A rows that there is room for, D width of a row, F hidden width, U what goes into the
activation.
"""

from __future__ import annotations

import torch

import ultraep.ops.products as plain
from ultraep.backends.triton.grouped import Grouped
from ultraep.backends.triton.kernels import rowwise
from ultraep.backends.triton.launch import cdiv, power_of_2, quick
from ultraep.errors import ConfigError
from ultraep.ops.activations import Activation
from ultraep.ops.products import Beside, Stacks

TYPES = (torch.bfloat16, torch.float16, torch.float32)
TILE, WIDEST, WARPS = 4096, 1024, 8  # of rows that are scaled


class TritonProducts:
    """Products of all slots at once.

    offsets: [L + 1] int32 where the rows of each slot begin.
    dtype: of the rows; weights of another type are converted, as under autocast.
    programs: multiprocessors to fill; None: all.
    """

    knows_spans = True

    def __init__(
        self,
        offsets: torch.Tensor,
        activation: Activation,
        dtype: torch.dtype,
        programs: int | None = None,
    ) -> None:
        if dtype not in TYPES:
            known = ", ".join(map(str, TYPES))
            raise ConfigError(f"kernels multiply {known}; rows are {dtype}: give engine='torch'")
        self._grouped, self._activation = Grouped(offsets, programs=programs), activation

    def multiply(
        self,
        rows_AK: torch.Tensor,
        weights: Stacks,
        bias: Stacks | None,
        *,
        scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        dtype, width = rows_AK.dtype, weights.homes.shape[1]
        out_AN = rows_AK.new_empty(rows_AK.shape[0], width) if out is None else out
        added = None if bias is None else fitting(bias, dtype)
        scale = None if scale is None else scale.float()
        self._grouped.multiply(rows_AK, fitting(weights, dtype), out_AN, bias=added, scale=scale)
        return out_AN

    def multiply_transposed(
        self,
        rows_AN: torch.Tensor,
        weights: Stacks,
        *,
        out: torch.Tensor | None = None,
        beside: Beside | None = None,
    ) -> torch.Tensor:
        width, stacks = weights.homes.shape[2], fitting(weights, rows_AN.dtype)
        out_AK = rows_AN.new_empty(rows_AN.shape[0], width) if out is None else out
        self._grouped.multiply_transposed(rows_AN, stacks, out_AK, beside=beside)
        return out_AK

    def activate(self, up: torch.Tensor) -> torch.Tensor:
        if self._activation.name != "swiglu":
            return self._activation.apply(up)
        hidden_AF = up.new_empty(up.shape[0], up.shape[1] // 2)
        self._grouped.swiglu(up, hidden_AF)
        return hidden_AF

    def activate_backward(
        self, up: torch.Tensor, d_hidden_AF: torch.Tensor, scale_A: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scale_A = scale_A.float()
        if self._activation.name == "swiglu":
            d_up, d_scale_A = torch.empty_like(up), torch.empty_like(scale_A)
            self._grouped.swiglu_backward(
                up, d_hidden_AF, d_up, hidden=d_hidden_AF, scale=scale_A, d_scale=d_scale_A
            )
            return d_up, d_hidden_AF, d_scale_A
        return plain.activate_backward(self._activation, up, d_hidden_AF, scale_A)

    def row_dots(self, rows_AN: torch.Tensor, bias: Stacks, sums_A: torch.Tensor) -> None:
        self._grouped.row_dots(rows_AN, fitting(bias, rows_AN.dtype), sums_A)

    def weight_gradients(
        self,
        d_out_AN: torch.Tensor,
        rows_AK: torch.Tensor,
        into: Stacks,
        bias: Stacks | None,
        *,
        scale: torch.Tensor | None = None,
    ) -> None:
        scale = None if scale is None else scale.float()
        self._grouped.weight_gradients(d_out_AN, rows_AK, into, bias=bias, scale=scale)


def fitting(stacks: Stacks, dtype: torch.dtype) -> Stacks:
    """Weights in the type of the rows, as under autocast, without gaps within an expert."""
    homes = stacks.homes.to(dtype)
    if homes.stride()[1:] != stacks.copies.stride()[1:]:
        homes = homes.contiguous()
    return Stacks(homes, stacks.copies.to(dtype))


def scale_rows(rows_AD: torch.Tensor, scale_A: torch.Tensor, out_AD: torch.Tensor) -> None:
    """Into `out_AD`, rows times their scale; torch does what the kernel does not know."""
    if not _known(scale_A, rows_AD):
        plain.scale_rows(rows_AD, scale_A, out_AD)
        return
    (num_rows, width), blocks = rows_AD.shape, _tile_for(rows_AD.shape[1])
    quick(rowwise.scale_rows)[(cdiv(num_rows, blocks["BLOCK_M"]),)](
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
    if not _known(scale_A, rows_AD, d_out_AD):
        return plain.scale_rows_backward(d_out_AD, rows_AD, scale_A, d_scale_A)
    d_rows_AD = torch.empty_like(rows_AD, memory_format=torch.contiguous_format)
    (num_rows, width), blocks = rows_AD.shape, _tile_for(rows_AD.shape[1])
    quick(rowwise.scale_rows_backward)[(cdiv(num_rows, blocks["BLOCK_M"]),)](
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


def _known(scale_A: torch.Tensor, *of_rows: torch.Tensor) -> bool:
    """Whether the kernels know such rows."""
    return scale_A.dtype.itemsize <= 4 and all(
        rows.dtype.itemsize <= 4 and rows.stride(1) == 1 and rows.shape[0] > 0 for rows in of_rows
    )


def _tile_for(width: int) -> dict[str, int]:
    """Rows and columns of a tile."""
    columns = min(WIDEST, power_of_2(width))
    return {"BLOCK_M": TILE // columns, "BLOCK_N": columns}
