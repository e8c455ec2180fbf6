"""Launches of stage 6 on the GPU: the rows of every slot with the weights of that slot.

Shapes: A rows that there is room for, L slots of this rank (H home slots, then the spare ones),
D columns of a row, N and K those of a weight, F hidden width.
"""

from __future__ import annotations

from functools import partial

import torch

from ultraep.backends.triton.blocks import Blocks, Table, capability_of, square_band, table_for
from ultraep.backends.triton.kernels import grouped, rowwise, tiles
from ultraep.backends.triton.kernels.tiles import DRAWN
from ultraep.backends.triton.launch import cdiv, power_of_2, quick
from ultraep.ops.products import Beside, Stacks


class Grouped:
    """Work on the rows of one rank, the rows of slot l being `offsets[l]:offsets[l + 1]`.

    `offsets`: [L + 1] int32, for one microbatch; whatever stands in it, the same kernels are
    launched, and nobody waits. Rows behind `offsets[L]` are neither read nor written.
    `programs`: multiprocessors to fill; all of them, if not given.

    Sums are made in single precision. A row of a result has the same bits wherever the row stands
    and whichever rows stand beside it; a sum over rows depends on their order.
    """

    def __init__(
        self, offsets: torch.Tensor, *, programs: int | None = None, table: Table | None = None
    ) -> None:
        assert offsets.dtype == torch.int32, offsets.dtype
        self.offsets, self.num_slots = offsets, len(offsets) - 1
        self.programs = programs or multiprocessors(offsets.device)
        self.table = table or table_for(*capability_of(offsets.device))
        self._order: dict[tuple[int, int], torch.Tensor] = {}
        self._padded = power_of_2(max(1, self.num_slots))

    def multiply(
        self,
        rows_AK: torch.Tensor,
        weights: Stacks,
        out_AN: torch.Tensor,
        *,
        bias: Stacks | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        """Rows @ W^T + bias, W [N, K] of every slot; then rounded, and times the rounded `scale`.

        `bias`: [N] of every slot.   `scale`: [A] float32.
        """
        self._multiply("multiply", rows_AK, weights, out_AN, bias, scale)

    def multiply_transposed(
        self,
        rows_AN: torch.Tensor,
        weights: Stacks,
        out_AK: torch.Tensor,
        *,
        beside: Beside | None = None,
    ) -> None:
        """Rows @ W, W [N, K] of every slot. beside: other work, which takes some programs."""
        self._multiply("multiply_transposed", rows_AN, weights, out_AK, None, None, beside)

    def _multiply(
        self,
        kernel: str,
        rows: torch.Tensor,
        weights: Stacks,
        out: torch.Tensor,
        bias: Stacks | None,
        scale: torch.Tensor | None,
        beside: Beside | None = None,
    ) -> None:
        transposed = kernel == "multiply_transposed"
        shape = (rows.shape[1], out.shape[1]) if transposed else (out.shape[1], rows.shape[1])
        self._check(weights, shape, rows, out, scale)
        assert {weights.homes.dtype, weights.copies.dtype} == {rows.dtype}, rows.dtype
        if bias is not None:
            self._check(bias, out.shape[1:])
            assert bias.homes.dtype == bias.copies.dtype, (bias.homes.dtype, bias.copies.dtype)
        blocks = self.table[kernel, rows.element_size()]
        tiles = self._tiles(rows.shape[0], blocks)
        launch = partial(
            self._launch_products, rows, weights, bias, scale, tiles, out, blocks, transposed
        )
        if beside is None:
            launch(self.programs, drawn=False)
            return
        tiles[int(DRAWN)].zero_()
        with beside.behind():
            launch(beside.programs, drawn=True)
        launch(self.programs - beside.programs, drawn=True)

    def _launch_products(
        self,
        rows: torch.Tensor,
        weights: Stacks,
        bias: Stacks | None,
        scale: torch.Tensor | None,
        tiles: torch.Tensor,
        out: torch.Tensor,
        blocks: Blocks,
        transposed: bool,
        programs: int,
        *,
        drawn: bool,
    ) -> None:
        quick(grouped.multiply)[(programs * blocks.resident,)](
            rows,
            weights.homes,
            weights.copies,
            bias and bias.homes,
            bias and bias.copies,
            scale,
            tiles,
            out,
            weights.homes.shape[0],
            rows.shape[1],
            out.shape[1],
            rows.stride(0),
            weights.homes.stride(0),
            weights.copies.stride(0),
            weights.homes.stride(1),
            bias and bias.homes.stride(0),
            bias and bias.copies.stride(0),
            out.stride(0),
            TRANSPOSED=transposed,
            EVEN_K=rows.shape[1] % blocks.depth == 0,
            EVEN_N=out.shape[1] % blocks.columns == 0,
            BLOCK_M=blocks.rows,
            BLOCK_N=blocks.columns,
            BLOCK_K=blocks.depth,
            HALF=blocks.half,
            DRAWN=drawn,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )

    def weight_gradients(
        self,
        d_out_AN: torch.Tensor,
        rows_AK: torch.Tensor,
        into: Stacks,
        *,
        bias: Stacks | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        """Overwrite `into`, [N, K] of every slot, by d_out^T @ rows: zeros for a slot without rows.

        And `bias`, [N] of every slot, by the sum of d_out; only there are rows times `scale`, [A].
        Sums are rounded once, to the type of the stack that they go to; those of home experts that
        have copies are not, and go to `sums` instead, if there are any.
        """
        height, width = d_out_AN.shape[1], rows_AK.shape[1]
        self._check(into, (height, width), d_out_AN, rows_AK, scale)
        assert d_out_AN.dtype == rows_AK.dtype, (d_out_AN.dtype, rows_AK.dtype)
        if bias is not None:
            self._check(bias, (height,))
        blocks = self.table["weight_gradients", rows_AK.element_size()]
        quick(grouped.weight_gradients)[(self.programs * blocks.resident,)](
            d_out_AN,
            rows_AK,
            scale,
            self.offsets,
            into.homes,
            into.copies,
            into.sums,
            bias and bias.homes,
            bias and bias.copies,
            bias and bias.sums,
            into.spans,
            into.homes.shape[0],
            self.num_slots,
            height,
            width,
            d_out_AN.stride(0),
            rows_AK.stride(0),
            into.homes.stride(0),
            into.copies.stride(0),
            into.homes.stride(1),
            bias and bias.homes.stride(0),
            bias and bias.copies.stride(0),
            EVEN_M=height % blocks.rows == 0,
            EVEN_N=width % blocks.columns == 0,
            BLOCK_M=blocks.rows,
            BLOCK_N=blocks.columns,
            BLOCK_K=blocks.depth,
            GROUP_M=blocks.band,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )

    def _tiles(self, room: int, blocks: Blocks) -> torch.Tensor:
        """The order of tiles of that height, made once for all products of these rows."""
        band = min(blocks.band, square_band(self.programs, blocks))
        kind = blocks.rows, band
        if kind not in self._order:
            most = 1 + cdiv(room, blocks.rows) + self.num_slots
            order = torch.empty(
                int(tiles.ENTRIES) * most, dtype=torch.int32, device=self.offsets.device
            )
            quick(tiles.lay_tiles)[(max(1, self.num_slots),)](
                self.offsets,
                order,
                self.num_slots,
                L=self._padded,
                BLOCK_M=blocks.rows,
                GROUP_M=band,
                B=64,
                num_warps=4,
            )
            self._order[kind] = order
        return self._order[kind]

    def swiglu(self, up: torch.Tensor, out_AF: torch.Tensor) -> None:
        """[A, 2F] -> [A, F]: silu of the first half, times the second; rounded once."""
        self._check(None, None, up, out_AF)
        assert up.shape[1] == 2 * out_AF.shape[1], (up.shape, out_AF.shape)
        blocks = self.table["swiglu", up.element_size()]
        quick(rowwise.swiglu)[(self.programs * blocks.resident,)](
            up,
            self.offsets,
            out_AF,
            self.num_slots,
            out_AF.shape[1],
            up.stride(0),
            out_AF.stride(0),
            BLOCK_M=blocks.rows,
            BLOCK_N=blocks.columns,
            num_warps=blocks.warps,
        )

    def swiglu_backward(
        self,
        up: torch.Tensor,
        d_hidden_AF: torch.Tensor,
        d_up: torch.Tensor,
        *,
        hidden: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        d_scale: torch.Tensor | None = None,
    ) -> None:
        """Backward of down(swiglu(up)) * scale, given d_hidden = d_out @ W_down, not scaled.

        `d_up`: [A, 2F], of d_hidden * scale.   `hidden`: [A, F] swiglu(up) * scale, with which
        d_out makes the gradient of W_down; may be `d_hidden_AF` itself.   `scale`: [A] float32, 1
        if not given.   `d_scale`: [A] float32, the products of d_hidden with swiglu(up).
        """
        self._check(None, None, up, d_hidden_AF, d_up, scale, d_scale, hidden)
        assert up.shape == d_up.shape, (up.shape, d_up.shape)
        assert up.shape[1] == 2 * d_hidden_AF.shape[1], (up.shape, d_hidden_AF.shape)
        assert hidden is None or hidden.shape == d_hidden_AF.shape
        blocks = self.table["swiglu_backward", up.element_size()]
        quick(rowwise.swiglu_backward)[(self.programs * blocks.resident,)](
            up,
            d_hidden_AF,
            scale,
            self.offsets,
            d_up,
            hidden,
            d_scale,
            self.num_slots,
            d_hidden_AF.shape[1],
            up.stride(0),
            d_hidden_AF.stride(0),
            d_up.stride(0),
            None if hidden is None else hidden.stride(0),
            BLOCK_M=blocks.rows,
            BLOCK_N=blocks.columns,
            num_warps=blocks.warps,
        )

    def row_dots(self, rows_AD: torch.Tensor, bias: Stacks, sums: torch.Tensor) -> None:
        """Add to `sums`, [A] float32, the product of every row with the bias [D] of its slot."""
        self._check(bias, rows_AD.shape[1:], rows_AD, sums)
        blocks = self.table["row_dots", rows_AD.element_size()]
        quick(rowwise.row_dots)[(self.programs * blocks.resident,)](
            rows_AD,
            bias.homes,
            bias.copies,
            self.offsets,
            sums,
            len(bias.homes),
            self.num_slots,
            rows_AD.shape[1],
            rows_AD.stride(0),
            bias.homes.stride(0),
            bias.copies.stride(0),
            L=self._padded,
            BLOCK_M=blocks.rows,
            BLOCK_N=blocks.columns,
            num_warps=blocks.warps,
        )

    def _check(
        self,
        stacks: Stacks | None,
        shape: tuple[int, ...] | None,
        *of_rows: torch.Tensor | None,
    ) -> None:
        """One tensor of that shape for every slot; numbers without gaps for the same rows."""
        if stacks is not None:
            slots = stacks.homes.shape[0] + stacks.copies.shape[0]
            assert slots == self.num_slots, (slots, self.num_slots)
            assert stacks.homes.shape[1:] == shape, (stacks.homes.shape, shape)
            strides = stacks.homes.stride()[1:], stacks.copies.stride()[1:]
            assert strides[0] == strides[1], strides
            assert strides[0][-1] == 1, strides
        rows = None
        for tensor in of_rows:
            if tensor is not None:
                rows = tensor.shape[0] if rows is None else rows
                assert tensor.shape[0] == rows, (tensor.shape, rows)
                assert tensor.stride(-1) == 1, tensor.stride()
                assert tensor.ndim > 1 or tensor.dtype == torch.float32, tensor.dtype


def multiprocessors(device: torch.device) -> int:
    """How many a GPU has; the interpreter takes two."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
