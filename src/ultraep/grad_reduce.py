"""Stage 8, in backward: gradients of replicas -> summed into the home expert.

Every copy sends its gradient to the home of its expert. The home adds them to its own in the order
of the plan, by host rank: the same sum in every run, whatever arrives first.

Shapes: H home experts of this rank, L spare slots, P parameters of an expert.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ultraep.comm import Communicator, Message
from ultraep.plan import Plan


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients of that type are summed and sent."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def reduce_gradients(
    gradients_HP: torch.Tensor,
    replica_gradients_LP: torch.Tensor,
    plan: Plan,
    comm: Communicator,
    *,
    staging: Callable[[int], torch.Tensor],
) -> int:
    """Add the gradients of all copies to those of the home experts, in place; the bytes sent.

    staging: gives `[n, P]` rows to receive in.
    """
    homes = plan.topology.home_of_expert
    mine = plan.topology.home_experts(comm.rank)
    sends, arriving = [], []
    for expert, host, slot in plan.replicas.tolist():
        if host == comm.rank:
            sends.append(Message(int(homes[expert]), replica_gradients_LP[slot]))
        if homes[expert] == comm.rank:
            arriving.append((int(np.searchsorted(mine, expert)), host))
    rows = staging(len(arriving))
    comm.exchange(
        sends, [Message(host, row) for (_, host), row in zip(arriving, rows, strict=True)]
    )
    for (index, _), row in zip(arriving, rows, strict=True):
        gradients_HP[index] += row
    return sum(message.tensor.numel() * message.tensor.element_size() for message in sends)
