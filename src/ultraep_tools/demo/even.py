"""Forced even routing: experts in turn instead of the router's choices.

Shapes: T tokens, K experts per token.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ultraep.topology import Topology


class EvenTurns:
    """The choices of one rank, which continue where the rank before it ends."""

    def __init__(self, topology: Topology, rank: int) -> None:
        self.turns, self.rank = in_turn(topology), rank

    def replace(self, ids_TK: torch.Tensor) -> torch.Tensor:
        """[T, K] the choices that replace the router's."""
        self.turns = self.turns.to(ids_TK)  # once: a later call would wait for the device
        first = self.rank * ids_TK.numel()
        rows = torch.arange(first, first + ids_TK.numel(), device=ids_TK.device) % len(self.turns)
        return self.turns[rows].reshape(ids_TK.shape)


def in_turn(topology: Topology) -> torch.Tensor:
    """Return experts in an order that visits all ranks, and each rank's experts, in turn.

    >>> in_turn(Topology(ranks=2, experts=4)).tolist()
    [0, 2, 1, 3]
    """
    homes = [topology.home_experts(rank) for rank in range(topology.ranks)]
    turns = math.lcm(*(len(experts) for experts in homes))
    table = np.stack([np.resize(experts, turns) for experts in homes], axis=1)
    return torch.from_numpy(table.reshape(-1))
