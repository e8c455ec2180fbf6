"""Products of stage 6 on a GPU; the host does not know how many rows arrive.

Shapes: A row capacity, L slots of this rank (H home slots, then the spare slots), N and K of a
weight, F hidden width, U input width of the activation, D width of a row.
"""

from __future__ import annotations

import torch

import ultraep.ops.products as plain
from ultraep.backends.triton.blocks import (
    Blocks,
    Table,
    default_table,
    multiplies_e4m3,
    square_band,
)
from ultraep.backends.triton.fp8 import dequantise, quantise, swiglu_packed
from ultraep.backends.triton.kernels import grouped, rowwise, tiles
from ultraep.backends.triton.kernels.grouped import Tiling
from ultraep.backends.triton.kernels.tiles import SlotTensors
from ultraep.backends.triton.launch import cdiv, matrix, multiprocessors, power_of_2, quick
from ultraep.errors import ConfigError
from ultraep.ops.fp8 import pack, parts
from ultraep.ops.products import Activation, Beside, Stacks

TYPES = (torch.bfloat16, torch.float16, torch.float32)
NO_TENSORS = SlotTensors(*[None] * len(SlotTensors._fields))
TILE, WIDEST, WARPS = 4096, 1024, 8  # elements, columns and warps of a tile of `scale_rows`


class TritonProducts:
    """Products of all slots in one launch; the rows of slot l are `offsets[l]:offsets[l + 1]`.

    offsets: [L + 1] int32 of one microbatch. The same kernels are launched whatever it holds, and
        the host does not wait for it. Rows behind `offsets[L]` are neither read nor written.
    dtype: of the rows; weights of another dtype are converted, as under autocast.
    programs: multiprocessors to use; None: all.
    table: tile sizes; None: the table of this GPU.
    fp8: weights are FP8. GPUs that cannot multiply e4m3 multiply dequantised numbers.

    Sums are float32. A row of a result has the same bits at any position, beside any other rows; a
    sum over rows depends on their order.
    """

    knows_spans = True

    def __init__(
        self,
        offsets: torch.Tensor,
        activation: Activation,
        dtype: torch.dtype,
        programs: int | None = None,
        table: Table | None = None,
        fp8: bool = False,
    ) -> None:
        if dtype not in TYPES:
            known = ", ".join(map(str, TYPES))
            raise ConfigError(
                f"the Triton kernels multiply {known}, got rows of {dtype}; use engine='torch'"
            )
        assert offsets.dtype == torch.int32, offsets.dtype
        self.offsets, self.num_slots = offsets, offsets.shape[0] - 1
        self.programs = programs or multiprocessors(offsets.device)
        self.table = table or default_table()
        self._activation, self._dtype, self._fp8 = activation, dtype, fp8
        self._orders: dict[tuple[int, int], torch.Tensor] = {}
        self._padded_slots = power_of_2(max(1, self.num_slots))

    def multiply(
        self,
        rows_AK: torch.Tensor,
        weights: Stacks,
        bias: Stacks | None,
        *,
        scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        row_scales, weight_scales = None, weights.scales
        if weight_scales is not None:
            rows_AK, row_scales = parts(rows_AK, weights.homes.shape[2])
            if not multiplies_e4m3(rows_AK.device):
                rows_AK = dequantise(rows_AK, row_scales, self._dtype, self.offsets[-1:])
                weights = weights.plain(self._dtype, dequantise)
                row_scales = weight_scales = None
        weights = fitting(weights, rows_AK.dtype)
        width = weights.homes.shape[1]
        if bias is not None:
            bias = fitting(bias, self._dtype)
        out_AN = out
        if out_AN is None:
            out_AN = rows_AK.new_empty(rows_AK.shape[0], width, dtype=self._dtype)
        blocks = self.table["multiply", rows_AK.element_size()]
        order = self.tile_order(rows_AK.shape[0], blocks)
        scale = None if scale is None else scale.float()
        arguments = rows_AK, weights, bias, scale, order, out_AN, blocks
        scales = row_scales, weight_scales
        self._multiply(*arguments, self.programs, transposed=False, scales=scales)
        return out_AN

    def multiply_transposed(
        self,
        rows_AN: torch.Tensor,
        weights: Stacks,
        *,
        out: torch.Tensor | None = None,
        beside: Beside | None = None,
    ) -> torch.Tensor:
        weights = fitting(weights.plain(rows_AN.dtype, dequantise), rows_AN.dtype)
        width = weights.homes.shape[2]
        out_AK = rows_AN.new_empty(rows_AN.shape[0], width) if out is None else out
        blocks = self.table["multiply_transposed", rows_AN.element_size()]
        order = self.tile_order(rows_AN.shape[0], blocks)
        arguments = rows_AN, weights, None, None, order, out_AK, blocks
        if beside is None:
            self._multiply(*arguments, self.programs, transposed=True)
            return out_AK
        order[int(tiles.DRAWN)].zero_()
        with beside.behind():
            self._multiply(*arguments, beside.programs, transposed=True, drawn=True)
        self._multiply(*arguments, self.programs - beside.programs, transposed=True, drawn=True)
        return out_AK

    def _multiply(
        self,
        rows: torch.Tensor,
        weights: Stacks,
        bias: Stacks | None,
        scale: torch.Tensor | None,
        order: torch.Tensor,
        out: torch.Tensor,
        blocks: Blocks,
        programs: int,
        *,
        transposed: bool,
        drawn: bool = False,
        scales: tuple[torch.Tensor | None, Stacks | None] = (None, None),
    ) -> None:
        row_scales, weight_scales = scales
        check_rows(rows, out, scale, row_scales)
        quick(grouped.multiply)[(programs * blocks.resident,)](
            matrix(rows),
            slot_tensors(weights),
            slot_tensors(bias),
            matrix(row_scales),
            slot_tensors(weight_scales),
            scale,
            order,
            matrix(out),
            weights.homes.shape[0],
            TRANSPOSED=transposed,
            TILING=tiling(blocks, depth=rows.shape[1], width=out.shape[1]),
            DRAWN=drawn,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )

    def activate(self, up: torch.Tensor) -> torch.Tensor:
        if self._activation.name != "swiglu":
            hidden_AF = self._activation.apply(up)
            return pack(hidden_AF, quantise) if self._fp8 else hidden_AF
        if self._fp8:
            return swiglu_packed(up, self.offsets, self.programs)
        hidden_AF = up.new_empty(up.shape[0], up.shape[1] // 2)
        check_rows(up, hidden_AF)
        blocks = self.table["swiglu", up.element_size()]
        quick(rowwise.swiglu)[(self.programs * blocks.resident,)](
            matrix(up),
            self.offsets,
            matrix(hidden_AF),
            self.num_slots,
            BLOCK_M=blocks.rows,
            BLOCK_N=blocks.columns,
            num_warps=blocks.warps,
        )
        return hidden_AF

    def activate_backward(
        self, up: torch.Tensor, d_hidden_AF: torch.Tensor, scale_A: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scale_A = scale_A.float()
        if self._activation.name != "swiglu":
            return plain.activate_backward(self._activation, up, d_hidden_AF, scale_A)
        d_up, d_scale_A = torch.empty_like(up), torch.empty_like(scale_A)
        check_rows(up, d_hidden_AF, d_up, scale_A)
        assert up.shape[1] == 2 * d_hidden_AF.shape[1], (up.shape, d_hidden_AF.shape)
        blocks = self.table["swiglu_backward", up.element_size()]
        quick(rowwise.swiglu_backward)[(self.programs * blocks.resident,)](
            matrix(up),
            matrix(d_hidden_AF),
            scale_A,
            self.offsets,
            matrix(d_up),
            matrix(d_hidden_AF),  # the hidden values replace their gradients
            d_scale_A,
            self.num_slots,
            BLOCK_M=blocks.rows,
            BLOCK_N=blocks.columns,
            num_warps=blocks.warps,
        )
        return d_up, d_hidden_AF, d_scale_A

    def row_dots(self, rows_AN: torch.Tensor, bias: Stacks, sums_A: torch.Tensor) -> None:
        bias = fitting(bias, rows_AN.dtype)
        check_rows(rows_AN, sums_A)
        blocks = self.table["row_dots", rows_AN.element_size()]
        quick(rowwise.row_dots)[(self.programs * blocks.resident,)](
            matrix(rows_AN),
            slot_tensors(bias),
            self.offsets,
            sums_A,
            bias.homes.shape[0],
            self.num_slots,
            L=self._padded_slots,
            BLOCK_M=blocks.rows,
            BLOCK_N=blocks.columns,
            num_warps=blocks.warps,
        )

    def weight_gradients(
        self,
        d_out_AN: torch.Tensor,
        rows_AK: torch.Tensor,
        into: Stacks,
        bias: Stacks | None,
        *,
        scale: torch.Tensor | None = None,
    ) -> None:
        if rows_AK.dtype == torch.uint8:  # packed
            codes = parts(rows_AK, into.homes.shape[2])
            rows_AK = dequantise(*codes, d_out_AN.dtype, self.offsets[-1:])
        height, width = d_out_AN.shape[1], rows_AK.shape[1]
        scale = None if scale is None else scale.float()
        check_rows(d_out_AN, rows_AK, scale)
        assert d_out_AN.dtype == rows_AK.dtype, (d_out_AN.dtype, rows_AK.dtype)
        slots = len(into)  # without replicas, the spare slots have no gradients
        blocks = self.table["weight_gradients", rows_AK.element_size()]
        quick(grouped.weight_gradients)[(self.programs * blocks.resident,)](
            matrix(d_out_AN),
            matrix(rows_AK),
            scale,
            self.offsets,
            slot_tensors(into),
            slot_tensors(bias),
            into.homes.shape[0],
            slots,
            TILING=tiling(blocks, height=height, width=width),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )

    def tile_order(self, rows: int, blocks: Blocks) -> torch.Tensor:
        """Return the order of tiles of that height, computed once per microbatch."""
        band = min(blocks.band, square_band(self.programs, blocks))
        key = blocks.rows, band
        if key not in self._orders:
            entries = 1 + cdiv(rows, blocks.rows) + self.num_slots
            order = self.offsets.new_empty(int(tiles.ENTRIES) * entries)
            quick(tiles.lay_tiles)[(max(1, self.num_slots),)](
                self.offsets,
                order,
                self.num_slots,
                L=self._padded_slots,
                BLOCK_M=blocks.rows,
                GROUP_M=band,
                B=64,
                num_warps=4,
            )
            self._orders[key] = order
        return self._orders[key]


def check_rows(*tensors: torch.Tensor | None) -> None:
    """Assert that tensors have equal numbers of rows, without gaps; vectors are float32."""
    present = [tensor for tensor in tensors if tensor is not None]
    for tensor in present:
        assert tensor.shape[0] == present[0].shape[0], (tensor.shape, present[0].shape)
        assert tensor.stride(-1) == 1, tensor.stride()
        assert tensor.ndim > 1 or tensor.dtype == torch.float32, tensor.dtype


def slot_tensors(stacks: Stacks | None) -> SlotTensors:
    """Return stacks as the argument of a kernel."""
    if stacks is None:
        return NO_TENSORS
    homes, replicas = stacks.homes, stacks.replicas
    strides = homes.stride(0), replicas.stride(0), homes.stride(1)
    return SlotTensors(homes, replicas, stacks.sums, stacks.spans, *strides)


def tiling(blocks: Blocks, *, width: int, height: int = 1, depth: int = 1) -> Tiling:
    """Return the compile-time sizes of a product; height and depth are 1 if the device has them."""
    return Tiling(
        EVEN_M=height % blocks.rows == 0,
        EVEN_N=width % blocks.columns == 0,
        EVEN_K=depth % blocks.depth == 0,
        BLOCK_M=blocks.rows,
        BLOCK_N=blocks.columns,
        BLOCK_K=blocks.depth,
        GROUP_M=blocks.band,
        HALF=blocks.half,
    )


def fitting(stacks: Stacks, dtype: torch.dtype) -> Stacks:
    """Convert weights to the dtype of the rows, as autocast does, with equal strides in a slot."""
    homes, replicas = stacks.homes, stacks.replicas
    alike = homes.stride()[1:] == replicas.stride()[1:]
    if alike and homes.dtype == replicas.dtype == dtype:
        return stacks
    homes = homes.to(dtype)
    return Stacks(homes if alike else homes.contiguous(), replicas.to(dtype))


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
