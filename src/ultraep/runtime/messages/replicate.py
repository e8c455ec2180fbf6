"""Stage 3: Plan + home weights -> filled spare slots, in forward and again before backward.

The way of the weights is data: `hops` (hops.py) lists who hands which expert to whom. In mode
`direct` the home sends every copy itself. In mode `chain` the copies of an expert stand in a row;
each passes a chunk on while the next one arrives, so that no rank sends an expert more than once
and the last copy is complete about when the first is. Ranks that have experts of their own to send
come last. Mode `auto` takes the one that is done sooner, plan by plan.

Shapes: R ranks, C copies.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ultraep.bundle import Layout, Stack
from ultraep.comm import Communicator, Message
from ultraep.hops import HOME, MODES, Hop, choose, hops
from ultraep.plan import Plan

__all__ = ["HOME", "MODES", "Hop", "choose", "hops", "send_weights"]


def send_weights(
    found: list[Hop],
    weights: Mapping[str, Stack],
    rows: torch.Tensor,
    *,
    layout: Layout,
    plan: Plan,
    comm: Communicator,
    chunks: int = 1,
) -> int:
    """Carry out the hops: fill this rank's spare slots (`rows` of bytes); the bytes it sent.

    Chunk c of a hop at depth d travels in round c + d; all messages of a round go at once.
    """
    me = comm.rank
    mine = plan.topology.home_experts(me)
    packed = {
        hop.expert: layout.pack(weights, int(np.searchsorted(mine, hop.expert)))
        for hop in found
        if hop.sender == me and hop.sender_slot == HOME
    }
    chunks = chunks if any(hop.depth for hop in found) else 1
    rounds = chunks + max((hop.depth for hop in found), default=-1)
    sent = 0
    for moment in range(rounds):
        sends, receives = [], []
        for hop in found:
            piece = _chunk(layout.nbytes, moment - hop.depth, chunks)
            if hop.sender == me and piece is not None:
                held = packed[hop.expert] if hop.sender_slot == HOME else rows[hop.sender_slot]
                sends.append(Message(hop.receiver, held[piece]))
            if hop.receiver == me and piece is not None:
                receives.append(Message(hop.sender, rows[hop.slot][piece]))
        comm.exchange(sends, receives)
        sent += sum(message.tensor.numel() for message in sends)
    return sent


def _chunk(nbytes: int, index: int, chunks: int) -> slice | None:
    """The bytes of one chunk, or None if it is not this hop's turn."""
    if not 0 <= index < chunks:
        return None
    size = -(-nbytes // chunks)
    return slice(index * size, min(nbytes, (index + 1) * size))
