"""Products of stage 6 on a GPU; the host does not know how many rows arrive.

Shapes: A row capacity, L slots of this rank (H home slots, then the spare slots), N and K of a
weight, F hidden width, U input width of the activation, D width of a row.
"""

from __future__ import annotations

from typing import Any

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
from ultraep.backends.triton.launch import (
    OPEN,
    Bound,
    bound,
    cdiv,
    layout,
    multiprocessors,
    open_matrix,
    power_of_2,
)
from ultraep.errors import ConfigError
from ultraep.ops.fp8 import pack, parts
from ultraep.ops.products import Activation, Beside, Stacks

TYPES = (torch.bfloat16, torch.float16, torch.float32)
NO_TENSORS = SlotTensors(*[None] * len(SlotTensors._fields))


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
        self._orders: dict[tuple[int, int, int], torch.Tensor] = {}
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
        with beside.behind():
            self._multiply(*arguments, beside.programs, transposed=True)
        self._multiply(*arguments, self.programs - beside.programs, transposed=True)
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
        scales: tuple[torch.Tensor | None, Stacks | None] = (None, None),
    ) -> None:
        row_scales, weight_scales = scales
        stacks = weights, bias, weight_scales

        def bind() -> Bound:
            check_rows(rows, out, scale, row_scales)
            return Bound(
                grouped.multiply,
                open_matrix(rows),
                open_slots(weights),
                open_slots(bias),
                open_matrix(row_scales),
                open_slots(weight_scales),
                *(OPEN, OPEN, open_matrix(out), weights.homes.shape[0], OPEN),
                TRANSPOSED=transposed,
                TILING=tiling(blocks, depth=rows.shape[1], width=out.shape[1]),
                num_warps=blocks.warps,
                num_stages=blocks.stages,
            )

        layouts = layout(rows), layout(out), row_scales is None, *map(layout_of, stacks)
        launch = bound(("multiply", rows.get_device(), blocks, transposed, *layouts), bind)
        codes = () if row_scales is None else (row_scales,)
        tensors = rows, *tensors_of(weights), *tensors_of(bias), *codes, *tensors_of(weight_scales)
        together = self.programs * blocks.resident
        launch((programs * blocks.resident,), *tensors, scale, order, out, together)

    def activate(self, up: torch.Tensor) -> torch.Tensor:
        if self._activation.name != "swiglu":
            hidden_AF = self._activation.apply(up)
            return pack(hidden_AF, quantise) if self._fp8 else hidden_AF
        if self._fp8:
            return swiglu_packed(up, self.offsets, self.programs)
        hidden_AF = up.new_empty(up.shape[0], up.shape[1] // 2)
        blocks = self.table["swiglu", up.element_size()]

        def bind() -> Bound:
            check_rows(up, hidden_AF)
            return Bound(
                rowwise.swiglu,
                *(open_matrix(up), OPEN, open_matrix(hidden_AF), self.num_slots),
                BLOCK_M=blocks.rows,
                BLOCK_N=blocks.columns,
                num_warps=blocks.warps,
            )

        launch = bound(("swiglu", up.get_device(), blocks, layout(up), self.num_slots), bind)
        launch((self.programs * blocks.resident,), up, self.offsets, hidden_AF)
        return hidden_AF

    def activate_backward(
        self, up: torch.Tensor, d_hidden_AF: torch.Tensor, scale_A: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scale_A = scale_A.float()
        if self._activation.name != "swiglu":
            return plain.activate_backward(self._activation, up, d_hidden_AF, scale_A)
        d_up, d_scale_A = torch.empty_like(up), torch.empty_like(scale_A)
        blocks = self.table["swiglu_backward", up.element_size()]

        def bind() -> Bound:
            check_rows(up, d_hidden_AF, d_up, scale_A)
            assert up.shape[1] == 2 * d_hidden_AF.shape[1], (up.shape, d_hidden_AF.shape)
            hidden = open_matrix(d_hidden_AF)
            return Bound(
                rowwise.swiglu_backward,
                *(open_matrix(up), hidden, OPEN, OPEN, open_matrix(d_up), hidden, OPEN),
                self.num_slots,
                BLOCK_M=blocks.rows,
                BLOCK_N=blocks.columns,
                num_warps=blocks.warps,
            )

        layouts = layout(up), layout(d_hidden_AF), layout(d_up)
        key = "swiglu_backward", up.get_device(), blocks, *layouts, self.num_slots
        # The hidden values replace their gradients.
        tensors = up, d_hidden_AF, scale_A, self.offsets, d_up, d_hidden_AF, d_scale_A
        bound(key, bind)((self.programs * blocks.resident,), *tensors)
        return d_up, d_hidden_AF, d_scale_A

    def row_dots(self, rows_AN: torch.Tensor, bias: Stacks, sums_A: torch.Tensor) -> None:
        bias = fitting(bias, rows_AN.dtype)
        blocks = self.table["row_dots", rows_AN.element_size()]

        def bind() -> Bound:
            check_rows(rows_AN, sums_A)
            return Bound(
                rowwise.row_dots,
                *(open_matrix(rows_AN), open_slots(bias), OPEN, OPEN),
                *(bias.homes.shape[0], self.num_slots),
                L=self._padded_slots,
                BLOCK_M=blocks.rows,
                BLOCK_N=blocks.columns,
                num_warps=blocks.warps,
            )

        layouts = layout(rows_AN), layout_of(bias), self.num_slots
        launch = bound(("row_dots", rows_AN.get_device(), blocks, *layouts), bind)
        tensors = rows_AN, *tensors_of(bias), self.offsets, sums_A
        launch((self.programs * blocks.resident,), *tensors)

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
        slots = len(into)  # without replicas, the spare slots have no gradients
        blocks = self.table["weight_gradients", rows_AK.element_size()]

        def bind() -> Bound:
            check_rows(d_out_AN, rows_AK, scale)
            assert d_out_AN.dtype == rows_AK.dtype, (d_out_AN.dtype, rows_AK.dtype)
            return Bound(
                grouped.weight_gradients,
                *(open_matrix(d_out_AN), open_matrix(rows_AK), OPEN, OPEN, OPEN),
                *(open_slots(into), open_slots(bias), into.homes.shape[0], slots, OPEN),
                TILING=tiling(blocks, height=height, width=width),
                num_warps=blocks.warps,
                num_stages=blocks.stages,
            )

        layouts = layout(d_out_AN), layout(rows_AK), layout_of(into), layout_of(bias), slots
        launch = bound(("weight_gradients", rows_AK.get_device(), blocks, *layouts), bind)
        order, programs = self.tile_order(rows_AK.shape[0], blocks), self.programs * blocks.resident
        tensors = scale, self.offsets, order, *tensors_of(into), *tensors_of(bias)
        launch((programs,), d_out_AN, rows_AK, *tensors, programs)

    def tile_order(self, rows: int, blocks: Blocks) -> torch.Tensor:
        """Return the order of tiles of that height, computed once per microbatch."""
        band = min(blocks.band, square_band(self.programs, blocks))
        key = blocks.rows, band, blocks.resident
        if key not in self._orders:
            entries = int(tiles.ENTRIES) * (cdiv(rows, blocks.rows) + self.num_slots)
            order = self.offsets.new_empty(int(tiles.HEADER) + entries)
            launch = bound(
                ("lay_tiles", order.get_device(), self.num_slots, *key[:2]),
                lambda: Bound(
                    tiles.lay_tiles,
                    *(OPEN, OPEN, self.num_slots),
                    L=self._padded_slots,
                    BLOCK_M=blocks.rows,
                    GROUP_M=band,
                    B=64,
                    num_warps=4,
                ),
            )
            launch((max(1, self.num_slots),), self.offsets, order)
            self._orders[key] = order
        return self._orders[key]


def check_rows(*tensors: torch.Tensor | None) -> None:
    """Assert that tensors have equal numbers of rows, without gaps; vectors are float32."""
    present = [tensor for tensor in tensors if tensor is not None]
    for tensor in present:
        assert tensor.shape[0] == present[0].shape[0], (tensor.shape, present[0].shape)
        assert tensor.stride(-1) == 1, tensor.stride()
        assert tensor.ndim > 1 or tensor.dtype == torch.float32, tensor.dtype


def open_slots(stacks: Stacks | None) -> SlotTensors:
    """Return stacks as the argument of a `Bound`, without the memory of `tensors_of`."""
    if stacks is None:
        return NO_TENSORS
    homes, replicas, sums = stacks.homes, stacks.replicas, stacks.sums
    assert homes.shape[1:] == replicas.shape[1:], (homes.shape, replicas.shape)
    assert sums is None or sums.stride() == homes.stride(), (sums.stride(), homes.stride())
    strides = homes.stride(0), replicas.stride(0), homes.stride(1)
    summed = None if sums is None else OPEN
    return SlotTensors(OPEN, OPEN, summed, summed, *strides)


def tensors_of(stacks: Stacks | None) -> tuple[torch.Tensor | None, ...]:
    if stacks is None:
        return ()
    sums = () if stacks.sums is None else (stacks.sums, stacks.spans)
    return stacks.homes, stacks.replicas, *sums


def layout_of(stacks: Stacks | None) -> tuple[Any, ...] | None:
    """Return what `open_slots` depends on, and the number of home slots."""
    if stacks is None:
        return None
    homes = stacks.homes
    return homes.shape[0], homes.stride(), stacks.replicas.stride(0), stacks.sums is None


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
