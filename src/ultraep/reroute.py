"""Stage 4: ids + Plan -> Routes, a slot instead of an expert for every routed row.

Shapes: T tokens, K experts per token, N = T * K routed rows, R ranks, E experts, S slots of all
ranks, L slots of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import numpy as np
import torch

from ultraep.arrays import IntArray
from ultraep.backends import select
from ultraep.errors import LoadError
from ultraep.loads import as_integers
from ultraep.plan import Plan


@dataclass(frozen=True)
class Routes:
    """Where the rows of this rank go, and how many come from everywhere."""

    shape: tuple[int, ...]  # of the ids: [T, K]
    order: torch.Tensor  # [N] rows in the order of sending: by slot, then by token
    rows_of_slot: torch.Tensor  # [S] rows of this rank for every slot
    send_counts: list[int]  # [R] rows for every rank
    receive_counts: IntArray  # [R, L] rows from every rank for each slot of this one

    @cached_property
    def slots(self) -> torch.Tensor:
        """[T, K] slot of every routed row, counted over all ranks: what dispatchers need."""
        in_order = torch.arange(len(self.rows_of_slot), device=self.order.device)
        slots = torch.empty_like(self.order)
        slots[self.order] = in_order.repeat_interleave(self.rows_of_slot)
        return slots.reshape(self.shape)

    @property
    def top_k(self) -> int:
        return self.shape[-1]


def reroute(
    ids: torch.Tensor, plan: Plan, rank: int, *, backend: ModuleType | None = None
) -> Routes:
    """Give every routed row of this rank its slot. `ids` are the `[T, K]` choices of the router."""
    topology, engine = plan.topology, backend or select()
    flat = as_integers(ids, "ids").reshape(-1).astype(np.int64, copy=False)
    experts, hosts, indices = plan.replicas.T.copy()
    found = engine.reroute(
        flat,
        plan.loads[rank],
        topology.home_slot_of_expert,
        experts,
        topology.spare_slot(hosts, indices),
        plan.split[:, rank].copy(),
        int(topology.first_slot_of_rank[-1]),
    )
    if found is None:
        raise LoadError(f"the ids of rank {rank} are not those that its plan was made for")
    order_N, rows_of_slot = found
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows_of_slot)])
    return Routes(
        shape=tuple(ids.shape),
        order=torch.from_numpy(order_N).to(ids.device),
        rows_of_slot=torch.from_numpy(rows_of_slot).to(ids.device),
        send_counts=np.diff(ends[topology.first_slot_of_rank]).tolist(),
        receive_counts=rows_received(plan, rank),
    )


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
    backend: ModuleType | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for routers that hand out `[T, E]` maps: `[T, S]` map and probabilities.

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
