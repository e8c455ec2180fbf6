"""The experts of all ranks in one place: for checkpoints, not for the hot path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ultraep.comm import Message

if TYPE_CHECKING:
    from ultraep.runtime.balancer import Balancer


def gather_experts(
    stacked: torch.Tensor, balancer: Balancer, *, only: int | None = None
) -> torch.Tensor:
    """[E, ...] the stacked home experts of all ranks, in the order of the experts; collective.

    only: the one rank that wants them; others get nothing, `[0, ...]`. None: all ranks.
    """
    if stacked.dtype == torch.float8_e4m3fn:  # which some groups do not know
        return gather_experts(stacked.view(torch.uint8), balancer, only=only).view(stacked.dtype)
    topology, comm = balancer.topology, balancer.comm
    stacked = stacked.detach().contiguous()
    shape = stacked.shape[1:]
    wanted = only is None or only == comm.rank
    parts = [stacked.new_empty(n, *shape) for n in topology.homes_per_rank] if wanted else []
    comm.exchange(
        [Message(peer, stacked) for peer in range(comm.size) if only in (None, peer)],
        [Message(peer, part) for peer, part in enumerate(parts)],
    )
    if not wanted:
        return stacked.new_empty(0, *shape)
    by_rank = torch.cat(parts)
    every = torch.empty_like(by_rank)
    every[torch.from_numpy(topology.experts_by_rank.copy())] = by_rank
    return every
