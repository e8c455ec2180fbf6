"""Products of stage 6 on a GPU in FP8; twin of `ultraep.ops.quantised`.

Tensor cores that support e4m3 multiply it. On other GPUs the kernels decode the codes to float16,
which is exact: products run at the rate of float16 and use the memory of FP8.

Shapes: A row capacity, N and K of a weight, F hidden width.
"""

from __future__ import annotations

import torch

from ultraep.backends.triton import quantise
from ultraep.backends.triton.blocks import Blocks, Table, capability_of, multiplies_e4m3
from ultraep.backends.triton.kernels import quantise as quantise_kernels
from ultraep.backends.triton.kernels import quantised as kernels
from ultraep.backends.triton.launch import cdiv, power_of_2, quick
from ultraep.backends.triton.products import (
    TritonProducts,
    check_rows,
    matrix,
    slot_tensors,
    tiling,
)
from ultraep.ops.activations import Activation
from ultraep.ops.formats import E4M3, Format
from ultraep.ops.products import Stacks
from ultraep.ops.quantised import QuantisedProducts, QuantisedStacks

ACTIVATED, TOGETHER = 2048, 4  # elements of a tile of the activation, and groups
RESIDENT = 8  # programs of the activation per multiprocessor
RATIO_GROUPS = 16  # groups per program of `lay_ratios`


class TritonQuantised(QuantisedProducts):
    """Products of all slots in one launch; see `TritonProducts` for the arguments.

    native: multiply e4m3 codes without decoding them; None: if the GPU can.
    """

    numbers = quantise

    def __init__(
        self,
        offsets: torch.Tensor,
        activation: Activation,
        dtype: torch.dtype,
        form: Format,
        programs: int | None = None,
        table: Table | None = None,
        native: bool | None = None,
    ) -> None:
        self._products = TritonProducts(offsets, activation, dtype, programs, table)
        super().__init__(self._products, form, dtype)
        self._fused = form.packs and activation.name == "swiglu"
        if native is None:
            native = multiplies_e4m3(*capability_of(offsets.device))
        self._codes = E4M3 if native else torch.uint8

    def multiply(
        self,
        rows: torch.Tensor,
        weights: QuantisedStacks,
        bias: Stacks | None,
        *,
        scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not self._form.packs:
            return super().multiply(rows, weights, bias, scale=scale, out=out)
        form, products, (width, depth) = self._form, self._products, weights.data.homes.shape[1:]
        out_AN = rows.new_empty(len(rows), width, dtype=self._dtype) if out is None else out
        codes, row_scales = form.parts(rows, depth)
        scale = None if scale is None else scale.float()
        check_rows(codes, row_scales, out_AN, scale)
        products.check(weights.data, (width, depth))
        products.check(weights.scales, form.scale_shape((width, depth)))
        if bias is not None:
            products.check(bias, (width,))
        blocks = products.table["multiply_quantised", form.name]
        order = products.tile_order(len(rows), blocks)
        ratios = self.row_ratios(row_scales, order, blocks) if form.width else (None, None)
        data = Stacks(weights.data.homes.view(self._codes), weights.data.copies.view(self._codes))
        quick(kernels.multiply_quantised)[(products.programs * blocks.resident,)](
            matrix(codes.view(self._codes)),
            None if form.width else matrix(row_scales),
            *ratios,
            slot_tensors(data),
            slot_tensors(weights.scales),
            slot_tensors(bias),
            scale,
            order,
            matrix(out_AN),
            len(data.homes),
            BLOCKS=form.width > 0,
            TILING=tiling(blocks, depth=depth, width=width),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
        return out_AN

    def row_ratios(
        self, row_scales: torch.Tensor, order: torch.Tensor, blocks: Blocks
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ratios [rows of tiles, groups, BLOCK_M] and changes [rows of tiles, groups]."""
        high = cdiv(len(row_scales), blocks.rows) + self._products.num_slots
        groups = row_scales.shape[1]
        ratios = row_scales.new_empty(high, groups, blocks.rows, dtype=torch.bfloat16)
        changes = row_scales.new_empty(high, groups, dtype=torch.uint8)
        together = min(RATIO_GROUPS, power_of_2(groups))
        if high:
            quick(kernels.lay_ratios)[(high, cdiv(groups, together))](
                order,
                matrix(row_scales),
                ratios,
                changes,
                BLOCK_M=blocks.rows,
                G=together,
                num_warps=4,
            )
        return ratios, changes

    def activate(self, up: torch.Tensor) -> torch.Tensor:
        if not self._fused:
            return super().activate(up)
        form, width = self._form, up.shape[1] // 2
        packed = up.new_empty(len(up), form.row_bytes(width), dtype=torch.uint8)
        codes, scales = form.parts(packed, width)
        group, groups = form.width or width, form.groups(width)
        padded, together = power_of_2(group), min(TOGETHER, power_of_2(groups))
        quick(quantise_kernels.swiglu_quantise)[(self._products.programs * RESIDENT,)](
            matrix(up),
            self._products.offsets,
            matrix(codes.view(torch.uint8)),
            matrix(scales),
            self._products.num_slots,
            GROUP=group,
            LEVEL=groups > 1,
            BLOCK_M=max(1, ACTIVATED // (together * padded)),
            G=together,
            BLOCK_N=padded,
            num_warps=4,
        )
        return packed

    def _rows(self, packed: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        return quantise.unpack(self._form, packed, width, dtype, self._products.offsets[-1:])
