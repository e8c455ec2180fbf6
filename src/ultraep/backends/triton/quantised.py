"""Products of stage 6 on a GPU with numbers of eight bits; twins of `ultraep.ops.quantised`.

Tensor cores that know e4m3 multiply it. On others the codes are decoded to float16 on the way,
which changes no number: each has the rate of float16, and the memory of eight bits.

Shapes: A rows that there is room for, N and K those of a weight, F hidden width.
"""

from __future__ import annotations

import torch

from ultraep.backends.triton import quantise
from ultraep.backends.triton.blocks import Blocks, Table, capability_of, multiplies_e4m3
from ultraep.backends.triton.grouped import Grouped
from ultraep.backends.triton.kernels import quantise as quantise_kernels
from ultraep.backends.triton.kernels import quantised as kernels
from ultraep.backends.triton.launch import cdiv, power_of_2, quick
from ultraep.backends.triton.products import TritonProducts
from ultraep.ops.activations import Activation
from ultraep.ops.formats import E4M3, Format
from ultraep.ops.products import Stacks
from ultraep.ops.quantised import QuantisedProducts, QuantisedStacks

ACTIVATED, TOGETHER = 2048, 4  # numbers of a tile between two products, and groups
RESIDENT = 8  # programs on a multiprocessor, there
LAID = 16  # groups of a row of tiles whose ratios are laid by one program


class GroupedQuantised(Grouped):
    """Work on packed rows of one rank; see `Grouped`.

    `native`: codes are multiplied as they are; None: if the GPU can.
    """

    def __init__(
        self,
        offsets: torch.Tensor,
        *,
        programs: int | None = None,
        table: Table | None = None,
        native: bool | None = None,
    ) -> None:
        super().__init__(offsets, programs=programs, table=table)
        if native is None:
            native = multiplies_e4m3(*capability_of(offsets.device))
        self._codes = E4M3 if native else torch.uint8

    def multiply_quantised(
        self,
        form: Format,
        packed: torch.Tensor,
        weights: QuantisedStacks,
        out_AN: torch.Tensor,
        *,
        bias: Stacks | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        """Rows @ W^T + bias, W [N, K] of every slot; then rounded, and times the rounded `scale`.

        `bias`: [N] of every slot.   `scale`: [A] float32.
        """
        depth, width = weights.width, out_AN.shape[1]
        codes, row_scales = form.parts(packed, depth)
        self._check(weights.data, (width, depth), codes, row_scales, out_AN, scale)
        self._check(weights.scales, form.scale_shape((width, depth)))
        if bias is not None:
            self._check(bias, (width,))
        data, scales = weights.data, weights.scales
        blocks = self.table["multiply_quantised", form.name]
        tiles = self._tiles(len(packed), blocks)
        laid = self._ratios(row_scales, tiles, blocks) if form.width else (None, None)
        quick(kernels.multiply_quantised)[(self.programs * blocks.resident,)](
            codes.view(self._codes),
            None if form.width else row_scales,
            *laid,
            data.homes.view(self._codes),
            data.copies.view(self._codes),
            scales.homes,
            scales.copies,
            bias and bias.homes,
            bias and bias.copies,
            scale,
            tiles,
            out_AN,
            len(data.homes),
            depth,
            width,
            codes.stride(0),
            row_scales.stride(0),
            data.homes.stride(0),
            data.copies.stride(0),
            data.homes.stride(1),
            scales.homes.stride(0),
            scales.copies.stride(0),
            scales.homes.stride(1),
            bias and bias.homes.stride(0),
            bias and bias.copies.stride(0),
            out_AN.stride(0),
            BLOCKS=form.width > 0,
            EVEN_K=depth % blocks.depth == 0,
            EVEN_N=width % blocks.columns == 0,
            BLOCK_M=blocks.rows,
            BLOCK_N=blocks.columns,
            BLOCK_K=blocks.depth,
            HALF=blocks.half,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )

    def _ratios(
        self, row_scales: torch.Tensor, tiles: torch.Tensor, blocks: Blocks
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows of tiles, groups, M] the ratios of these rows, [rows of tiles, groups] changes."""
        high, groups = cdiv(len(row_scales), blocks.rows) + self.num_slots, row_scales.shape[1]
        ratios = row_scales.new_empty(high, groups, blocks.rows, dtype=torch.bfloat16)
        changes = row_scales.new_empty(high, groups, dtype=torch.uint8)
        together = min(LAID, power_of_2(groups))
        if high:
            quick(kernels.lay_ratios)[(high, cdiv(groups, together))](
                tiles,
                row_scales,
                ratios,
                changes,
                groups,
                row_scales.stride(0),
                BLOCK_M=blocks.rows,
                G=together,
                num_warps=4,
            )
        return ratios, changes

    def swiglu_quantise(self, form: Format, up: torch.Tensor) -> torch.Tensor:
        """[A, bytes] the packed rows `[A, F]`, from `[A, 2F]`: see `Grouped.swiglu`."""
        width = up.shape[1] // 2
        packed = up.new_empty(len(up), form.row_bytes(width), dtype=torch.uint8)
        codes, scales = form.parts(packed, width)
        group, groups = form.width or width, form.groups(width)
        padded, together = power_of_2(group), min(TOGETHER, power_of_2(groups))
        quick(quantise_kernels.swiglu_quantise)[(self.programs * RESIDENT,)](
            up,
            self.offsets,
            codes.view(torch.uint8),
            scales,
            self.num_slots,
            width,
            up.stride(0),
            codes.stride(0),
            scales.stride(0),
            GROUP=group,
            LEVEL=groups > 1,
            BLOCK_M=max(1, ACTIVATED // (together * padded)),
            G=together,
            BLOCK_N=padded,
            num_warps=4,
        )
        return packed


class TritonQuantised(QuantisedProducts):
    """Products of all slots at once; see `TritonProducts` for what it is made of."""

    numbers = quantise

    def __init__(
        self,
        offsets: torch.Tensor,
        activation: Activation,
        dtype: torch.dtype,
        form: Format,
        programs: int | None = None,
    ) -> None:
        super().__init__(TritonProducts(offsets, activation, dtype, programs), form, dtype)
        self._fused = form.packs and activation.name == "swiglu"
        self._grouped = GroupedQuantised(offsets, programs=programs)

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
        width = weights.data.homes.shape[1]
        out_AN = rows.new_empty(len(rows), width, dtype=self._dtype) if out is None else out
        scale = None if scale is None else scale.float()
        self._grouped.multiply_quantised(self._form, rows, weights, out_AN, bias=bias, scale=scale)
        return out_AN

    def activate(self, up: torch.Tensor) -> torch.Tensor:
        return (
            self._grouped.swiglu_quantise(self._form, up) if self._fused else super().activate(up)
        )

    def _rows(self, packed: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        return quantise.unpack(self._form, packed, width, dtype, self._grouped.offsets[-1:])
