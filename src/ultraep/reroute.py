"""Stage 4: ids + Plan -> Routes, a slot instead of an expert for every routed row.

Shapes: T tokens, K experts per token, N = T * K routed rows, R ranks, E experts, S slots of all
ranks, L slots of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from ultraep.arrays import IntArray
from ultraep.backends import select
from ultraep.errors import LoadError
from ultraep.plan import Plan


@dataclass(frozen=True, slots=True)
class Routes:
    """Where the rows of this rank go, and how many come from everywhere."""

    slots: torch.Tensor  # [T, K] slot of every routed row, counted over all ranks
    order: torch.Tensor  # [N] rows in the order of sending: by slot, then by token
    send_counts: list[int]  # [R] rows for every rank
    receive_counts: IntArray  # [R, L] rows from every rank for each slot of this one

    @property
    def top_k(self) -> int:
        return self.slots.shape[-1]


def reroute(
    ids: torch.Tensor, plan: Plan, rank: int, *, backend: ModuleType | None = None
) -> Routes:
    """Give every routed row of this rank its slot. `ids` are the `[T, K]` choices of the router."""
    topology, engine = plan.topology, backend or select()
    flat = ids.detach().reshape(-1).to("cpu", torch.int64).numpy()
    experts, hosts, indices = plan.replicas.T
    slot_N, order_N = engine.reroute(
        flat,
        topology.home_slot_of_expert,
        np.ascontiguousarray(experts),
        topology.spare_slot(hosts, indices),
        np.ascontiguousarray(plan.split[:, rank]),
        int(topology.first_slot_of_rank[-1]),
    )
    return Routes(
        slots=torch.from_numpy(slot_N).reshape(ids.shape).to(ids.device),
        order=torch.from_numpy(order_N).to(ids.device),
        send_counts=rows_sent(plan, rank).tolist(),
        receive_counts=rows_received(plan, rank),
    )


def rows_sent(plan: Plan, rank: int) -> IntArray:
    """[R] rows that this rank sends to every rank."""
    homes, experts, hosts = (
        plan.topology.home_of_expert,
        plan.replicas[:, 0],
        plan.replicas[:, 1],
    )
    sent = np.bincount(homes, plan.loads[rank], plan.topology.ranks)
    moved = plan.split[:, rank]
    sent -= np.bincount(homes[experts], moved, plan.topology.ranks)
    sent += np.bincount(hosts, moved, plan.topology.ranks)
    return sent.astype(np.int64)


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
