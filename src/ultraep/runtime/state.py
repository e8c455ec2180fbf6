"""Gather the experts of all ranks, for checkpoints; not for the hot path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ultraep.bundle import as_bytes
from ultraep.comm import Message
from ultraep.errors import ConfigError

if TYPE_CHECKING:
    from ultraep.runtime.balancer import Balancer


def gather_experts(
    stacked: torch.Tensor, balancer: Balancer, *, only: int | None = None
) -> torch.Tensor:
    """Return [E, ...] the stacked home experts of all ranks, in the order of experts; collective.

    only: the rank that receives them, others get `[0, ...]`; None: all ranks.
    """
    if stacked.dtype.itemsize == 1 and stacked.dtype != torch.uint8:  # cannot be sent everywhere
        return gather_experts(as_bytes(stacked), balancer, only=only).view(stacked.dtype)
    topology, comm = balancer.topology, balancer.comm
    stacked = stacked.detach().contiguous()
    shape = stacked.shape[1:]
    receives = only is None or only == comm.rank
    parts = [stacked.new_empty(n, *shape) for n in topology.homes_per_rank] if receives else []
    comm.exchange(
        [Message(peer, stacked) for peer in range(comm.size) if only in (None, peer)],
        [Message(peer, part) for peer, part in enumerate(parts)],
    )
    if not receives:
        return stacked.new_empty(0, *shape)
    by_rank = torch.cat(parts)
    by_expert = torch.empty_like(by_rank)
    by_expert[torch.from_numpy(topology.experts_by_rank.copy())] = by_rank
    return by_expert


def reorder_experts(
    state: Mapping[str, torch.Tensor], order: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Return the `full_state_dict` of a layer with its experts in another order.

    order: expert `order[i]` becomes expert i, in the router as well, so the layer computes the
        same. `ultraep trace place` finds an order that gives fast-link domains equal loads.
    """
    if sorted(order) != list(range(len(order))):
        raise ConfigError(f"the order must contain every expert once, got {list(order)[:8]} ...")
    index, reordered = torch.tensor(order), dict(state)
    for name, tensor in state.items():
        if name.startswith(("experts.", "router.")):
            if len(tensor) != len(order):
                raise ConfigError(
                    f"{name!r} has {len(tensor)} experts, but the order has {len(order)}; pass the "
                    "full_state_dict() of a layer"
                )
            reordered[name] = tensor[index.to(tensor.device)]
    return reordered
