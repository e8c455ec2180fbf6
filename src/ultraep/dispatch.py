"""Stage 5: tokens + Routes -> Arrivals, rows at the rank that serves them, grouped by slot.

Shapes: T tokens, K experts per token, N = T * K routed rows, A arrived rows, L slots of this rank,
R ranks, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ultraep.arrays import IntArray
from ultraep.comm import Communicator
from ultraep.reroute import Routes


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Rows that came from all ranks, those of one slot together, in the order of their sources."""

    rows: torch.Tensor  # [A, D]
    counts: list[int]  # [L] rows of each slot


class Roads:
    """Both directions of the way between tokens and slots; each undoes the other's order."""

    def __init__(
        self, routes: Routes, comm: Communicator, on_return: Callable[[], None] | None = None
    ) -> None:
        self.routes = routes
        self.on_return = on_return or (lambda: None)  # called before the first step of backward
        self._comm = comm
        self._blocks = routes.receive_counts
        self._from_rank: list[int] = self._blocks.sum(axis=1).tolist()
        self.counts: list[int] = self._blocks.sum(axis=0).tolist()  # [L] rows for each slot

    def to_slots(self, values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[A, D] what arrives here, if every rank sends these rows of its values, in slot order."""
        arrived = self._comm.all_to_all(values[rows], self.routes.send_counts, self._from_rank)
        return _transpose_blocks(arrived, self._blocks)

    def to_tokens(self, rows_AD: torch.Tensor) -> torch.Tensor:
        """[N, D] rows of this rank's tokens in token order, from the `[A, D]` rows served here.

        Padding was not sent; zeros come back for it.
        """
        leaving = _transpose_blocks(rows_AD, self._blocks.T)
        back = self._comm.all_to_all(leaving, self._from_rank, self.routes.send_counts)
        if self.routes.has_padding:
            rows_ND = back.new_zeros(self.routes.num_rows, *back.shape[1:])
        else:
            rows_ND = torch.empty_like(back)
        rows_ND[self.routes.order] = back
        return rows_ND


def dispatch(tokens_TD: torch.Tensor, roads: Roads) -> Arrivals:
    """Send every token to the slots that serve it."""
    rows_AD: torch.Tensor = _Dispatch.apply(tokens_TD, roads)  # type: ignore[no-untyped-call]
    return Arrivals(rows_AD, roads.counts)


class _Dispatch(torch.autograd.Function):
    """Forward: one row per token and choice. Backward: the gradients of its rows, summed."""

    @staticmethod
    def forward(ctx: Any, tokens_TD: torch.Tensor, roads: Roads) -> torch.Tensor:
        ctx.roads = roads
        ctx.shape = (*roads.routes.shape, tokens_TD.shape[-1])
        return roads.to_slots(tokens_TD, roads.routes.order // roads.routes.top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        rows_ND = ctx.roads.to_tokens(gradients[0].contiguous())
        return rows_ND.reshape(ctx.shape).sum(dim=1), None


def _transpose_blocks(rows: torch.Tensor, lengths: IntArray) -> torch.Tensor:
    """Rows in blocks `[i, j]` of `lengths[i, j]` rows, reordered to blocks `[j, i]`."""
    outer, inner = lengths.shape
    if outer <= 1 or inner <= 1:
        return rows
    blocks = rows.split(lengths.reshape(-1).tolist())
    return torch.cat([blocks[i * inner + j] for j in range(inner) for i in range(outer)])
