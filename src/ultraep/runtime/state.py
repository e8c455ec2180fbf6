"""The experts of all ranks in one place: for checkpoints, not for the hot path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ultraep.comm import Message

if TYPE_CHECKING:
    from ultraep.runtime.balancer import Balancer


def gather_experts(stacked: torch.Tensor, balancer: Balancer) -> torch.Tensor:
    """[E, ...] the stacked home experts of all ranks, in the order of the experts; collective."""
    topology, comm = balancer.topology, balancer.comm
    stacked = stacked.detach().contiguous()
    parts = [stacked.new_empty(homes, *stacked.shape[1:]) for homes in topology.homes_per_rank]
    comm.exchange(
        [Message(peer, stacked) for peer in range(comm.size)],
        [Message(peer, part) for peer, part in enumerate(parts)],
    )
    by_rank = torch.cat(parts)
    every = torch.empty_like(by_rank)
    every[torch.from_numpy(topology.experts_by_rank.copy())] = by_rank
    return every
