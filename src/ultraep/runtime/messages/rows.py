"""RowMessages: stages 5 and 7 of one microbatch, by messages along its routes.

Shapes: T tokens, K experts per token, M routed rows without padding, A arrived rows, L slots of
this rank, D model width.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from ultraep.arrays import IntArray
from ultraep.comm import Communicator, moved
from ultraep.reroute import Routes


class RowMessages:
    """Moves rows between tokens and slots; see `ultraep.dispatch.Rows`."""

    def __init__(self, routes: Routes, comm: Communicator) -> None:
        self.routes, self._comm = routes, comm
        self._blocks = routes.receive_counts
        self._from_rank: list[int] = self._blocks.sum(axis=1).tolist()
        self._begins = [0, *accumulate(self._blocks.sum(axis=0).tolist())]
        self.offsets = moved(torch.tensor(self._begins, dtype=torch.int32), routes.order.device)

    @property
    def slots(self) -> torch.Tensor:
        """[T, K] slot of every routed row."""
        return self.routes.slots

    def begins(self) -> list[int]:
        """The offsets, known from the plan."""
        return self._begins

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


def _transpose_blocks(rows: torch.Tensor, lengths: IntArray) -> torch.Tensor:
    """Rows in blocks `[i, j]` of `lengths[i, j]` rows, reordered to blocks `[j, i]`."""
    outer, inner = lengths.shape
    if outer <= 1 or inner <= 1:
        return rows
    blocks = rows.split(lengths.reshape(-1).tolist())
    return torch.cat([blocks[i * inner + j] for j in range(inner) for i in range(outer)])
