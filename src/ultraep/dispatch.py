"""Stage 5: tokens -> Arrivals, rows at the rank that serves them, grouped by slot.

`RowMessages` moves them by messages, there and back; `runtime/mapped` does without the host.

Shapes: T tokens, K experts per token, M routed rows that are no padding, A arrived rows, L slots of
this rank, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from ultraep.arrays import IntArray
from ultraep.comm import Communicator, moved
from ultraep.ops.modes import unseen
from ultraep.ops.recompute import Gradients, first_order, save
from ultraep.plane import Exchange
from ultraep.reroute import Routes


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Rows that came from all ranks, those of one slot together, in the order of their sources.

    On a device there may be more rows than have come: those from `offsets[L]` on are nobody's.
    """

    rows: torch.Tensor  # [A, D]
    gates: torch.Tensor  # [A] what their outputs are multiplied by
    exchange: Exchange
    packed: torch.Tensor | None = None  # [A, bytes] as they came; `rows` then are without numbers

    @property
    def offsets(self) -> torch.Tensor:
        """[L + 1] where the rows of each slot begin."""
        return self.exchange.offsets

    def begins(self) -> list[int]:
        """The offsets on the host; may wait for a device."""
        return self.exchange.begins()


class RowMessages:
    """The exchange of rows by messages along the routes of one microbatch."""

    def __init__(
        self, routes: Routes, comm: Communicator, on_return: Callable[[], None] | None = None
    ) -> None:
        self.routes = routes
        self._comm, self._on_return = comm, on_return
        self._blocks = routes.receive_counts
        self._from_rank: list[int] = self._blocks.sum(axis=1).tolist()
        self._begins = [0, *accumulate(self._blocks.sum(axis=0).tolist())]
        self.offsets = moved(torch.tensor(self._begins, dtype=torch.int32), routes.order.device)

    @property
    def slots(self) -> torch.Tensor:
        """[T, K] slot of every routed row."""
        return self.routes.slots

    def begins(self) -> list[int]:
        """The offsets, which the plan has told."""
        return self._begins

    def returns(self) -> None:
        """Backward begins."""
        if self._on_return is not None:
            self._on_return()

    def to_slots(
        self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[A, D] a row for each choice of every token, and `[A]` its scalar, in slot order."""
        order = self.routes.order
        rows_AD = self._there(values_TD.index_select(0, self.routes.token_of_row))
        if scalars_TK is None:
            return rows_AD, None
        return rows_AD, self._there(scalars_TK.reshape(-1).index_select(0, order))

    def to_tokens(
        self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, D] the rows of each token, summed in the order of its choices; `[T, K]` scalars."""
        sums_TD = self._back(rows_AD).sum(dim=1, dtype=rows_AD.dtype)
        return sums_TD, None if scalars_A is None else self._back(scalars_A)

    def _there(self, sent: torch.Tensor) -> torch.Tensor:
        """[A, ...] in slot order, from `[M, ...]` in the order of sending."""
        if self._comm.size == 1:
            return sent
        arrived = self._comm.all_to_all(sent, self.routes.send_counts, self._from_rank)
        return _transpose_blocks(arrived, self._blocks)

    def _back(self, served: torch.Tensor) -> torch.Tensor:
        """[T, K, ...] in the order of tokens, from `[A, ...]` in slot order."""
        back = served
        if self._comm.size > 1:
            leaving = _transpose_blocks(served.contiguous(), self._blocks.T)
            back = self._comm.all_to_all(leaving, self._from_rank, self.routes.send_counts)
        shape = *self.routes.shape, *back.shape[1:]
        if not len(back):
            return back.new_zeros(shape)
        rows = back.index_select(0, self.routes.positions)
        if self.routes.has_padding:
            rows[self.routes.padding] = 0
        return rows.reshape(shape)


def dispatch(
    tokens_TD: torch.Tensor,
    gates_TK: torch.Tensor,
    exchange: Exchange,
    pack: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Arrivals:
    """Send every token to the slots that serve it, with the gates of its choices.

    pack: makes rows of bytes of them, which travel in their place; gradients come back as of rows.
    """
    rows_AD, gates_A, packed = _Dispatch.apply(tokens_TD, gates_TK, exchange, pack)  # type: ignore[no-untyped-call]
    return Arrivals(rows_AD, gates_A, exchange, packed)


class _Dispatch(torch.autograd.Function):
    """Rows and gates travel to the slots; their gradients travel to the tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens_TD: torch.Tensor,
        gates_TK: torch.Tensor,
        exchange: Exchange,
        pack: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        save(ctx, exchange)
        packed = None
        with unseen():
            if pack is None:
                rows_AD, gates_A = exchange.to_slots(tokens_TD, gates_TK)
            else:
                packed, gates_A = exchange.to_slots(pack(tokens_TD), gates_TK)
                rows_AD = tokens_TD.new_empty(()).expand(len(packed), tokens_TD.shape[1])
        assert gates_A is not None
        fixed = [] if ctx.needs_input_grad[1] else [gates_A]
        ctx.mark_non_differentiable(*fixed, *([] if packed is None else [packed]))
        return rows_AD, gates_A, packed

    @staticmethod
    @first_order
    def backward(ctx: Any, exchange: Exchange, gradients: Gradients, _: Any) -> Gradients:
        d_rows_AD, d_gates_A, _ = gradients
        assert d_rows_AD is not None
        learns = ctx.needs_input_grad[1]
        return *exchange.to_tokens(d_rows_AD, d_gates_A if learns else None), None, None


def _transpose_blocks(rows: torch.Tensor, lengths: IntArray) -> torch.Tensor:
    """Rows in blocks `[i, j]` of `lengths[i, j]` rows, reordered to blocks `[j, i]`."""
    outer, inner = lengths.shape
    if outer <= 1 or inner <= 1:
        return rows
    blocks = rows.split(lengths.reshape(-1).tolist())
    return torch.cat([blocks[i * inner + j] for j in range(inner) for i in range(outer)])
