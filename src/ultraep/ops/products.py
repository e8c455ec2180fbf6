"""The products of stage 6: the rows of every slot with the weights of that slot.

An engine computes them for all slots of a rank: `TorchProducts` here, one slot after the other, and
`backends/triton/products.py` on a GPU, all at once. Both have these verbs, and a row of a result
never depends on the rows beside it where that is promised (`bitwise`).

Shapes: A rows, L slots of this rank (H home slots, then the spare ones), N and K those of a weight,
U and F what goes into and out of an activation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import linear

from ultraep.ops.activations import Activation
from ultraep.ops.modes import unseen

TILE = 32


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients of that type are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Stacks:
    """One tensor of every slot: of the home slots, and of the spare ones.

    Both have the same strides within a slot, and a last dimension without gaps. They have one type,
    but for gradients: those of homes may be rounded to the type of the parameters.
    """

    homes: torch.Tensor
    copies: torch.Tensor
    sums: torch.Tensor | None = None  # of gradients, in place of `homes` where copies are added
    spans: torch.Tensor | None = None  # [H, 2] where the copies of each home expert begin and end

    def __post_init__(self) -> None:
        homes, copies, sums = self.homes, self.copies, self.sums
        assert homes.shape[1:] == copies.shape[1:], (homes.shape, copies.shape)
        assert (sums is None) == (self.spans is None)
        assert sums is None or sums.stride() == homes.stride(), (sums.stride(), homes.stride())

    def __len__(self) -> int:
        return len(self.homes) + len(self.copies)

    def __getitem__(self, slot: int) -> torch.Tensor:
        spare = slot - len(self.homes)
        return self.homes[slot] if spare < 0 else self.copies[spare]


class Beside(NamedTuple):
    """Other work of the device that takes some programs of a product at first.

    behind: the block is launched where that work is done, on the same multiprocessors.
    """

    programs: int
    behind: Callable[[], AbstractContextManager[None]]


class Products(Protocol):
    """What stage 6 needs of an engine, for the rows of one microbatch."""

    @property
    def knows_spans(self) -> bool:
        """Whether `weight_gradients` heeds the `sums` and `spans` of stacks."""
        ...

    def multiply(
        self,
        rows_AK: torch.Tensor,
        weights: Stacks,
        bias: Stacks | None,
        *,
        scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[A, N] rows @ W^T + bias, times `scale` [A]; W [N, K] and bias [N] of every slot."""
        ...

    def multiply_transposed(
        self,
        rows_AN: torch.Tensor,
        weights: Stacks,
        *,
        out: torch.Tensor | None = None,
        beside: Beside | None = None,
    ) -> torch.Tensor:
        """[A, K] rows @ W."""
        ...

    def activate(self, up: torch.Tensor) -> torch.Tensor:
        """[A, F] from `[A, U]`."""
        ...

    def activate_backward(
        self, up: torch.Tensor, d_hidden_AF: torch.Tensor, scale_A: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Backward of down(activate(up)) * scale, given d_hidden = d_out @ W_down, not scaled.

        [A, U] gradient of `up`, [A, F] activate(up) * scale, and [A] d_hidden . activate(up).
        """
        ...

    def row_dots(self, rows_AN: torch.Tensor, bias: Stacks, sums_A: torch.Tensor) -> None:
        """Add to the sums the product of every row with the bias [N] of its slot."""
        ...

    def weight_gradients(
        self,
        d_out_AN: torch.Tensor,
        rows_AK: torch.Tensor,
        into: Stacks,
        bias: Stacks | None,
        *,
        scale: torch.Tensor | None = None,
    ) -> None:
        """Overwrite `into`, [N, K] of every slot, by d_out^T @ rows; zeros where no rows are.

        Of slots that have no place there, nobody wants to know.
        And `bias`, [N] of every slot, by the sum of d_out; only there, rows times `scale` [A].
        """
        ...


class TorchProducts:
    """Products by torch, one slot after the other.

    begins: [L + 1] where the rows of each slot begin.
    bitwise: fixed tiles of rows, so that what a row gives does not depend on the rows beside it.

    New tensors, none written in part: selective checkpointing may keep any of them.
    """

    knows_spans = False

    def __init__(self, begins: list[int], activation: Activation, *, bitwise: bool = False) -> None:
        self._begins, self._activation = begins, activation
        self._tile = TILE if bitwise else None

    def multiply(
        self,
        rows_AK: torch.Tensor,
        weights: Stacks,
        bias: Stacks | None,
        *,
        scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        found = []
        for slot, part in self._parts():
            weight = _of_slot(weights, slot, rows_AK)
            added = None if bias is None else _of_slot(bias, slot, rows_AK)
            product = self._in_tiles(linear, rows_AK[part], weight, added)
            found.append(product if scale is None else product * scale[part, None].to(product))
        return self._joined(found, rows_AK, weights.homes.shape[1], out)

    def multiply_transposed(
        self,
        rows_AN: torch.Tensor,
        weights: Stacks,
        *,
        out: torch.Tensor | None = None,
        beside: Beside | None = None,
    ) -> torch.Tensor:
        del beside  # nothing is: one slot after the other
        found = [
            self._in_tiles(torch.matmul, rows_AN[part], _of_slot(weights, slot, rows_AN))
            for slot, part in self._parts()
        ]
        return self._joined(found, rows_AN, weights.homes.shape[2], out)

    def activate(self, up: torch.Tensor) -> torch.Tensor:
        return self._activation.apply(up)

    def activate_backward(
        self, up: torch.Tensor, d_hidden_AF: torch.Tensor, scale_A: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return activate_backward(self._activation, up, d_hidden_AF, scale_A)

    def row_dots(self, rows_AN: torch.Tensor, bias: Stacks, sums_A: torch.Tensor) -> None:
        for slot, part in self._parts():
            sums_A[part] += dots(rows_AN[part], _of_slot(bias, slot, rows_AN))

    def weight_gradients(
        self,
        d_out_AN: torch.Tensor,
        rows_AK: torch.Tensor,
        into: Stacks,
        bias: Stacks | None,
        *,
        scale: torch.Tensor | None = None,
    ) -> None:
        for slot, (begin, end) in enumerate(pairwise(self._begins[: len(into) + 1])):
            part = slice(begin, end)
            d_out = d_out_AN[part]
            into[slot].copy_(d_out.T @ rows_AK[part])
            if bias is not None:
                scaled = d_out if scale is None else d_out * scale[part, None].to(d_out)
                bias[slot].copy_(scaled.sum(dim=0))

    def _parts(self) -> Iterator[tuple[int, slice]]:
        """Every slot that has rows, and its rows."""
        for slot, (begin, end) in enumerate(pairwise(self._begins)):
            if end > begin:
                yield slot, slice(begin, end)

    def _joined(
        self, parts: list[torch.Tensor], like: torch.Tensor, width: int, out: torch.Tensor | None
    ) -> torch.Tensor:
        """The rows of all slots in one tensor, or in that which is given."""
        joined = torch.cat(parts) if parts else like.new_empty(0, width)
        if out is None:
            return joined
        with unseen():  # memory of all microbatches: a mode that kept it would not write it again
            out[: len(joined)].copy_(joined)
        return out

    def _in_tiles(
        self,
        multiply: Callable[..., torch.Tensor],
        rows: torch.Tensor,
        *weights: torch.Tensor | None,
    ) -> torch.Tensor:
        if self._tile is None:
            return multiply(rows, *weights)
        short = -len(rows) % self._tile
        padded = torch.cat([rows, rows.new_zeros(short, rows.shape[1])])
        return torch.cat([multiply(part, *weights) for part in padded.split(self._tile)])[
            : len(rows)
        ]


def activate_backward(
    activation: Activation, up: torch.Tensor, d_hidden_AF: torch.Tensor, scale_A: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the verb of that name returns, of any activation; there may be more scales than rows."""
    hidden_AF, scale_A1 = activation.apply(up), scale_A[: len(up), None].to(up.dtype)
    d_up = activation.gradient(up, d_hidden_AF * scale_A1)
    d_scale_A = scale_A.new_zeros(len(scale_A), dtype=accumulator(up.dtype))
    d_scale_A[: len(up)] = dots(d_hidden_AF, hidden_AF)
    return d_up, hidden_AF * scale_A1, d_scale_A


def _of_slot(stacks: Stacks, slot: int, rows: torch.Tensor) -> torch.Tensor:
    """The tensor of one slot, in the type of the rows."""
    with unseen():  # a view of a slot that was kept may show what others put there since
        held = stacks[slot]
    return held.to(rows)


def scale_rows(rows_AD: torch.Tensor, scale_A: torch.Tensor, out_AD: torch.Tensor) -> None:
    """Into `out_AD`, rows times their scale, which is rounded to their type before."""
    torch.mul(rows_AD, scale_A[:, None].to(rows_AD.dtype), out=out_AD)


def scale_rows_backward(
    d_out_AD: torch.Tensor, rows_AD: torch.Tensor, scale_A: torch.Tensor, d_scale_A: torch.Tensor
) -> torch.Tensor:
    """[A, D] gradients of the rows; into `d_scale_A`, those of their scale."""
    d_scale_A.copy_(dots(d_out_AD, rows_AD))
    return d_out_AD * scale_A[:, None].to(rows_AD.dtype)


def dots(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Products of rows, in the type of sums; a row's does not depend on the rows beside it."""
    wide = accumulator(one.dtype)
    return (one.to(wide) * other.to(wide)).sum(dim=1)
