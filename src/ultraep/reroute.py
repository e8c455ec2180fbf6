"""Stage 4: ids + Plan -> Routes, a slot instead of an expert for every routed row.

An id of -1 is padding: a row that is none, has no slot and is not sent.

Shapes: T tokens, K experts per token, N = T * K routed rows, M of them that are no padding, R
ranks, E experts, S slots of all ranks, L slots of this rank.
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
from ultraep.errors import LoadError
from ultraep.loads import flat_ids
from ultraep.plan import Plan


@dataclass(frozen=True)
class Routes:
    """Where the rows of this rank go, and how many come from everywhere."""

    shape: tuple[int, ...]  # of the ids: [T, K]
    order: torch.Tensor  # [M] rows in the order of sending: by slot, then by place on the line
    rows_of_slot: IntArray  # [S] rows of this rank for every slot
    send_counts: list[int]  # [R] rows for every rank
    receive_counts: IntArray  # [R, L] rows from every rank for each slot of this one
    known_positions: torch.Tensor | None = None

    @cached_property
    def slots(self) -> torch.Tensor:
        """[T, K] slot of every routed row, counted over all ranks, for dispatchers; -1: padding."""
        in_order = np.arange(len(self.rows_of_slot)).repeat(self.rows_of_slot)
        slots = torch.full((self.num_rows,), PADDING, device=self.order.device)
        slots[self.order] = torch.from_numpy(in_order).to(slots.device)
        return slots.reshape(self.shape)

    @cached_property
    def token_of_row(self) -> torch.Tensor:
        """[M] the token of every row, in the order of sending."""
        return self.order // self.shape[-1]

    @cached_property
    def positions(self) -> torch.Tensor:
        """[N] where every routed row stands in the order of sending; of padding, anywhere."""
        if self.known_positions is not None:
            return self.known_positions
        positions = self.order.new_zeros(self.num_rows)
        positions[self.order] = torch.arange(len(self.order), device=self.order.device)
        return positions

    @cached_property
    def padding(self) -> torch.Tensor:
        """[N] whether a routed row is none."""
        padding = torch.ones(self.num_rows, dtype=torch.bool, device=self.order.device)
        return padding.index_fill_(0, self.order, False)

    @property
    def num_rows(self) -> int:
        """Routed rows, padding and all."""
        return math.prod(self.shape)

    @property
    def has_padding(self) -> bool:
        return len(self.order) < self.num_rows


def reroute(ids: torch.Tensor, plan: Plan, rank: int, *, backend: str | None = None) -> Routes:
    """Give every routed row of this rank its slot.

    ids: `[T, K]` choices of the router, those that were counted; -1: padding.
    """
    topology, engine = plan.topology, select(backend, ids.device.type)
    experts, hosts, indices = plan.replicas.T.copy()
    found = engine.reroute(
        flat_ids(ids, engine.DEVICE),
        plan.loads[rank],
        topology.home_slot_of_expert,
        experts,
        topology.spare_slot(hosts, indices),
        plan.split[:, rank].copy(),
        int(topology.first_slot_of_rank[-1]),
    )
    if found is None:
        raise LoadError(f"the ids of rank {rank} are not those that its plan was made for")
    return routes_of(plan, rank, ids.shape, torch.as_tensor(found[0], device=ids.device))


def routes_of(
    plan: Plan,
    rank: int,
    shape: Sequence[int],
    order_M: torch.Tensor,
    positions_N: torch.Tensor | None = None,
) -> Routes:
    """Routes from the order of sending; all the rest is known from the plan."""
    rows_of_slot = rows_sent(plan, rank)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows_of_slot)])
    return Routes(
        shape=tuple(shape),
        order=order_M,
        rows_of_slot=rows_of_slot,
        send_counts=np.diff(ends[plan.topology.first_slot_of_rank]).tolist(),
        receive_counts=rows_received(plan, rank),
        known_positions=positions_N,
    )


def rows_sent(plan: Plan, rank: int) -> IntArray:
    """[S] rows that this rank sends to every slot."""
    topology = plan.topology
    experts, hosts, indices = plan.replicas.T
    rows = np.zeros(topology.first_slot_of_rank[-1], dtype=np.int64)
    rows[topology.home_slot_of_expert] = plan.loads[rank]
    np.subtract.at(rows, topology.home_slot_of_expert[experts], plan.split[:, rank])
    rows[topology.spare_slot(hosts, indices)] = plan.split[:, rank]
    return rows


def rows_received(plan: Plan, rank: int) -> IntArray:
    """[R, L] rows that every rank sends to each slot of this one: home slots, then spare ones."""
    topology = plan.topology
    mine = topology.home_experts(rank)
    received = np.zeros((topology.ranks, len(mine) + topology.slots), dtype=np.int64)
    received[:, : len(mine)] = plan.loads[:, mine]
    experts, hosts, indices = plan.replicas.T
    for copy in np.flatnonzero(topology.home_of_expert[experts] == rank):
        received[:, np.searchsorted(mine, experts[copy])] -= plan.split[copy]
    for copy in np.flatnonzero(hosts == rank):
        received[:, len(mine) + indices[copy]] = plan.split[copy]
    return received


def reroute_dense(
    routing_map: torch.Tensor,
    probabilities: torch.Tensor,
    plan: Plan,
    rank: int,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stage 4 for routers that hand out `[T, E]` maps: `[T, S]` map and probabilities.

    Gradients flow through the probabilities to where they came from.
    """
    if routing_map.shape != probabilities.shape or routing_map.dtype != torch.bool:
        raise LoadError(
            f"want a bool map like the probabilities {list(probabilities.shape)}, "
            f"got {routing_map.dtype} {list(routing_map.shape)}"
        )
    tokens, experts = routing_map.nonzero(as_tuple=True)
    slots = reroute(experts[:, None], plan, rank, backend=backend).slots[:, 0]
    shape = (len(routing_map), int(plan.topology.first_slot_of_rank[-1]))
    slot_map = torch.zeros(shape, dtype=torch.bool, device=routing_map.device)
    slot_map[tokens, slots] = True
    spread = torch.zeros(shape, dtype=probabilities.dtype, device=probabilities.device)
    return slot_map, spread.index_put((tokens, slots), probabilities[tokens, experts])
