"""Stage 5: tokens + Routes -> Arrivals, rows at the rank that serves them, grouped by slot.

Shapes: T tokens, K experts per token, M routed rows that are no padding, A arrived rows, L slots of
this rank, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ultraep.arrays import IntArray
from ultraep.comm import Communicator
from ultraep.modes import unseen
from ultraep.reroute import Routes


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Rows that came from all ranks, those of one slot together, in the order of their sources."""

    rows: torch.Tensor  # [A, D]
    weights: torch.Tensor  # [A] what the router gives them
    counts: list[int] | torch.Tensor  # [L] rows of each slot; on a device, [L + 1] their begins


class Roads:
    """Both directions of the way between tokens and slots; each is the other's gradient.

    A row may take a scalar along, which is not summed.
    """

    def __init__(
        self, routes: Routes, comm: Communicator, on_return: Callable[[], None] | None = None
    ) -> None:
        self.routes = routes
        self.on_return = on_return or (lambda: None)  # called before the first step of backward
        self._comm = comm
        self._blocks = routes.receive_counts
        self._from_rank: list[int] = self._blocks.sum(axis=1).tolist()
        self.counts: list[int] = self._blocks.sum(axis=0).tolist()  # [L] rows for each slot

    def to_slots(
        self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[A, D] a row for each choice of every token, and `[A]` its scalar, in slot order."""
        order = self.routes.order
        rows_AD = self._there(values_TD[order // self.routes.top_k])
        return rows_AD, None if scalars_TK is None else self._there(scalars_TK.reshape(-1)[order])

    def to_tokens(
        self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, D] the rows of each token, summed in the order of its choices; `[T, K]` scalars.

        Padding was not sent; zeros come back for it.
        """
        sums_TD = self._back(rows_AD).sum(dim=1)
        return sums_TD, None if scalars_A is None else self._back(scalars_A)

    def _there(self, sent: torch.Tensor) -> torch.Tensor:
        """[A, ...] in slot order, from `[M, ...]` in the order of sending."""
        arrived = self._comm.all_to_all(sent, self.routes.send_counts, self._from_rank)
        return _transpose_blocks(arrived, self._blocks)

    def _back(self, served: torch.Tensor) -> torch.Tensor:
        """[T, K, ...] in the order of tokens, from `[A, ...]` in slot order."""
        leaving = _transpose_blocks(served.contiguous(), self._blocks.T)
        back = self._comm.all_to_all(leaving, self._from_rank, self.routes.send_counts)
        make = back.new_zeros if self.routes.has_padding else back.new_empty
        rows = make(self.routes.num_rows, *back.shape[1:])
        rows[self.routes.order] = back
        return rows.reshape(*self.routes.shape, *back.shape[1:])


def dispatch(tokens_TD: torch.Tensor, weights_TK: torch.Tensor, roads: Roads) -> Arrivals:
    """Send every token to the slots that serve it, with the weights of its choices."""
    rows_AD, weights_A = _Dispatch.apply(tokens_TD, weights_TK, roads)  # type: ignore[no-untyped-call]
    return Arrivals(rows_AD, weights_A, roads.counts)


class _Dispatch(torch.autograd.Function):
    """Rows and weights travel to the slots; their gradients travel to the tokens."""

    @staticmethod
    def forward(
        ctx: Any, tokens_TD: torch.Tensor, weights_TK: torch.Tensor, roads: Roads
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.roads = roads
        with unseen():
            rows_AD, weights_A = roads.to_slots(tokens_TD, weights_TK)
        assert weights_A is not None
        if not ctx.needs_input_grad[1]:
            ctx.mark_non_differentiable(weights_A)
        return rows_AD, weights_A

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_rows_AD, d_weights_A = gradients
        learns = ctx.needs_input_grad[1]
        return *ctx.roads.to_tokens(d_rows_AD, d_weights_A if learns else None), None


def _transpose_blocks(rows: torch.Tensor, lengths: IntArray) -> torch.Tensor:
    """Rows in blocks `[i, j]` of `lengths[i, j]` rows, reordered to blocks `[j, i]`."""
    outer, inner = lengths.shape
    if outer <= 1 or inner <= 1:
        return rows
    blocks = rows.split(lengths.reshape(-1).tolist())
    return torch.cat([blocks[i * inner + j] for j in range(inner) for i in range(outer)])
