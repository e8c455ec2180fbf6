"""Stage 4: assign a slot to every routed row of this rank.

Padding (id -1) has no slot and is not sent.

Shapes: T tokens, K experts per token, N = T * K routed rows, M rows without padding, R ranks, E
experts, S slots of all ranks, L slots of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ultraep.arrays import PADDING, IntArray
from ultraep.backends import select
from ultraep.comm import moved
from ultraep.errors import LoadError
from ultraep.loads import flat_ids
from ultraep.plan import Plan


@dataclass(frozen=True)
class Routes:
    """The slots of this rank's rows, and the row counts of all ranks."""

    shape: tuple[int, ...]  # of the ids: [T, K]
    order: torch.Tensor  # [M] rows in send order: by slot, then by position in the expert's queue
    rows_of_slot: IntArray  # [S] rows of this rank for each slot
    send_counts: list[int]  # [R] rows for each rank
    receive_counts: IntArray  # [R, L] rows from each rank for each slot of this rank
    known_positions: torch.Tensor | None = None

    @cached_property
    def slots(self) -> torch.Tensor:
        """[T, K] global slot of every routed row, for other dispatchers; -1: padding."""
        counts = moved(torch.from_numpy(self.rows_of_slot), self.order.device)
        numbers = torch.arange(len(counts), device=self.order.device)
        slots = torch.full((self.num_rows,), PADDING, device=self.order.device)
        slots.scatter_(
            0, self.order, numbers.repeat_interleave(counts, output_size=len(self.order))
        )
        return slots.reshape(self.shape)

    @cached_property
    def token_of_row(self) -> torch.Tensor:
        """[M] token of each row, in send order."""
        return self.order // self.shape[-1]

    @cached_property
    def positions(self) -> torch.Tensor:
        """[N] position of each routed row in send order; undefined for padding."""
        if self.known_positions is not None:
            return self.known_positions
        positions = self.order.new_zeros(self.num_rows)
        positions[self.order] = torch.arange(len(self.order), device=self.order.device)
        return positions

    @cached_property
    def padding(self) -> torch.Tensor:
        """[N] whether a row is padding."""
        padding = torch.ones(self.num_rows, dtype=torch.bool, device=self.order.device)
        return padding.index_fill_(0, self.order, False)

    @cached_property
    def bags(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of all rows without padding, by token, and the first one of each token."""
        kept = ~self.padding
        counts = kept.view(self.shape).sum(dim=-1)
        return self.positions.masked_select(kept), counts.cumsum(0) - counts

    @cached_property
    def num_rows(self) -> int:
        """Rows including padding."""
        return math.prod(self.shape)

    @cached_property
    def has_padding(self) -> bool:
        return len(self.order) < self.num_rows


def reroute(ids: torch.Tensor, plan: Plan, rank: int, *, backend: str | None = None) -> Routes:
    """Assign a slot to every routed row of this rank.

    ids: the `[T, K]` ids that stage 1 counted; -1: padding.
    """
    topology = plan.topology
    experts, hosts, indices = plan.replicas.T.copy()
    result = select(backend).reroute(
        flat_ids(ids),
        plan.loads[rank],
        topology.home_slot_of_expert,
        experts,
        topology.spare_slot(hosts, indices),
        plan.split[:, rank].copy(),
        int(topology.first_slot_of_rank[-1]),
    )
    if result is None:
        raise LoadError(
            f"the ids of rank {rank} differ from the loads of the plan; count and plan these ids"
        )
    return routes_of(plan, rank, ids.shape, torch.as_tensor(result[0], device=ids.device))


def routes_of(
    plan: Plan,
    rank: int,
    shape: Sequence[int],
    order_M: torch.Tensor,
    positions_N: torch.Tensor | None = None,
) -> Routes:
    """Complete routes from their send order; the counts follow from the plan."""
    topology = plan.topology
    experts, hosts, indices = plan.replicas.T
    rows_of_slot = np.zeros(topology.first_slot_of_rank[-1], dtype=np.int64)
    rows_of_slot[topology.home_slot_of_expert] = plan.loads[rank]
    np.subtract.at(rows_of_slot, topology.home_slot_of_expert[experts], plan.split[:, rank])
    rows_of_slot[topology.spare_slot(hosts, indices)] = plan.split[:, rank]
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows_of_slot)])
    return Routes(
        shape=tuple(shape),
        order=order_M,
        rows_of_slot=rows_of_slot,
        send_counts=np.diff(ends[topology.first_slot_of_rank]).tolist(),
        receive_counts=rows_received(plan, rank),
        known_positions=positions_N,
    )


def rows_received(plan: Plan, rank: int) -> IntArray:
    """Return `[R, L]` rows from each rank for each slot of this rank: home slots, then spare."""
    topology = plan.topology
    mine = topology.home_experts(rank)
    received = np.zeros((topology.ranks, len(mine) + topology.slots), dtype=np.int64)
    received[:, : len(mine)] = plan.loads[:, mine]
    experts, hosts, indices = plan.replicas.T
    for index in np.flatnonzero(topology.home_of_expert[experts] == rank):
        received[:, np.searchsorted(mine, experts[index])] -= plan.split[index]
    for index in np.flatnonzero(hosts == rank):
        received[:, len(mine) + indices[index]] = plan.split[index]
    return received
