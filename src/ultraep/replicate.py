"""Stage 3: Plan + home weights -> filled spare slots, in forward and again before backward.

The way of the weights is data: `hops` lists who hands which expert to whom. In mode `direct` the
home sends every copy itself. In mode `chain` the copies of an expert stand in a row; each passes a
chunk on while the next one arrives, so that no rank sends an expert more than once and the last
copy is complete about when the first is. Ranks that have experts of their own to send come last.
Mode `auto` takes the one that is done sooner, plan by plan.

Shapes: R ranks, C copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
import torch

from ultraep.bundle import Layout, Stack
from ultraep.comm import Communicator, Message
from ultraep.errors import ConfigError
from ultraep.plan import Plan

MODES = ("direct", "chain", "auto")
HOME = -1


class Hop(NamedTuple):
    """One rank hands an expert to another."""

    expert: int
    sender: int
    sender_slot: int  # spare slot it is sent from, or HOME
    receiver: int
    slot: int  # spare slot it is received in
    depth: int  # hops before this one


def hops(
    plan: Plan, mode: str, *, chunks: int = 1, skip: set[tuple[int, int]] | None = None
) -> list[Hop]:
    """The hops of a plan, by expert and depth.

    chunks: pieces of an expert in a chain; mode `auto` decides by them.
    skip: slots (host, index) that are filled already.
    """
    if mode not in MODES:
        raise ConfigError(f"unknown relay mode {mode!r}; known are {', '.join(MODES)}")
    mode = choose(plan, chunks, skip) if mode == "auto" else mode
    homes = plan.topology.home_of_expert
    copies: dict[int, list[tuple[int, int]]] = {}
    for expert, host, slot in plan.replicas.tolist():
        if not skip or (host, slot) not in skip:
            copies.setdefault(expert, []).append((host, slot))
    sends = set(homes[list(copies)].tolist())
    found = []
    for expert, places in copies.items():
        sender, sender_slot = int(homes[expert]), HOME
        for depth, (host, slot) in enumerate(sorted(places, key=lambda p: (p[0] in sends, p))):
            chained = mode == "chain"
            found.append(Hop(expert, sender, sender_slot, host, slot, depth if chained else 0))
            if chained:
                sender, sender_slot = host, slot
    return found


def choose(
    plan: Plan, chunks: int, skip: set[tuple[int, int]] | None = None
) -> Literal["direct", "chain"]:
    """The faster mode for what is to be sent; decided by integers, alike on every rank.

    What takes longest is the rank that sends most. A chain of h hops also takes h - 1 chunks of
    time until its last copy gets its first one.
    """
    direct, chain = (hops(plan, mode, skip=skip) for mode in ("direct", "chain"))
    longest = max((hop.depth + 1 for hop in chain), default=0)
    rounds = _most_sent(chain) * chunks + max(0, longest - 1)
    return "chain" if rounds < _most_sent(direct) * chunks else "direct"


def _most_sent(found: list[Hop]) -> int:
    """Hops that the busiest rank sends."""
    return max(Counter(hop.sender for hop in found).values(), default=0)


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
