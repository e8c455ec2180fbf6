"""Stages 3 and 8 by messages: weights to the replicas, gradients of the replicas back home.

The way of the weights is data: `hops` (hops.py) lists who hands which expert to whom. In mode
`direct` the home sends every copy itself. In mode `chain` the copies of an expert stand in a row;
each passes a chunk on while the next one arrives, so that no rank sends an expert more than once
and the last copy is complete about when the first is. Ranks that have experts of their own to send
come last. Mode `auto` takes the one that is done sooner, plan by plan.

In backward every replica sends its gradient to the home of its expert, all its tensors in one row
of bytes. The home adds them to its own in the order of the plan, by host rank: the same sum in
every run, whatever arrives first. Experts without replicas are not touched.

Shapes: H home experts of this rank, L spare slots, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import numpy as np
import torch

from ultraep.bundle import Layout, Stack
from ultraep.comm import Communicator, Message
from ultraep.hops import HOME, Hop
from ultraep.ops.products import accumulator
from ultraep.plan import Plan


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


def reduce_gradients(
    homes: Mapping[str, Stack],
    own: Mapping[str, Stack],
    rows_LB: torch.Tensor,
    layout: Layout,
    plan: Plan,
    comm: Communicator,
    *,
    staging: Callable[[int], torch.Tensor],
) -> int:
    """The gradients of home experts that have copies, from their own and those; the bytes sent.

    homes, own: `[H, ...]` or H tensors for every tensor of the layout; may be the same.
    rows_LB: gradients of the copies of this rank.   staging: gives `[n, B]` rows to receive in.
    """
    home_of_expert = plan.topology.home_of_expert
    mine = plan.topology.home_experts(comm.rank)
    sends, arriving = [], []
    for expert, host, slot in plan.replicas.tolist():
        if host == comm.rank:
            sends.append(Message(int(home_of_expert[expert]), rows_LB[slot]))
        if home_of_expert[expert] == comm.rank:
            arriving.append((int(np.searchsorted(mine, expert)), host))
    staged = staging(len(arriving))
    comm.exchange(
        sends, [Message(host, row) for (_, host), row in zip(arriving, staged, strict=True)]
    )
    views = layout.views(staged)
    for index, group in groupby(enumerate(arriving), key=lambda found: found[1][0]):
        numbers = [number for number, _ in group]
        for name, stack in homes.items():
            others = [views[name][number] for number in numbers]
            _add(stack[index], own[name][index], others)
    return len(sends) * layout.nbytes


def _add(home: torch.Tensor, own: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
    """Into `home`, an expert's own gradient with those of its copies; rounded once."""
    total = own.to(accumulator(own.dtype))
    for other in others:
        total = total + other.to(total.dtype)
    home.copy_(total)
