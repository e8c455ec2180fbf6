"""Forced even routing: as many choices as before, dealt out to all ranks and experts in turn.

Shapes: T tokens, K experts per token.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ultraep.topology import Topology


class EvenTurns:
    """What one rank chooses when experts are dealt out in turn."""

    def __init__(self, topology: Topology, rank: int) -> None:
        self.turns, self.rank = dealt_in_turn(topology), rank

    def chosen(self, ids_TK: torch.Tensor) -> torch.Tensor:
        """[T, K] other choices; another part of the turn on every rank."""
        first = self.rank * ids_TK.numel()
        rows = torch.arange(first, first + ids_TK.numel()) % len(self.turns)
        return self.turns[rows].reshape(ids_TK.shape).to(ids_TK)


def dealt_in_turn(topology: Topology) -> torch.Tensor:
    """Experts such that consecutive choices go to all ranks, and their experts, in turn.

    >>> dealt_in_turn(Topology(ranks=2, experts=4)).tolist()
    [0, 2, 1, 3]
    """
    homes = [topology.home_experts(rank) for rank in range(topology.ranks)]
    turns = math.lcm(*(len(experts) for experts in homes))
    dealt = np.stack([np.resize(experts, turns) for experts in homes], axis=1)
    return torch.from_numpy(dealt.reshape(-1))
