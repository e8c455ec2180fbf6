"""Stage 8, in backward: gradients of copies -> summed into the home expert.

Every copy sends its gradient to the home of its expert, all its tensors in one row of bytes. The
home adds them to its own in the order of the plan, by host rank: the same sum in every run,
whatever arrives first. Experts without copies are not touched.

Shapes: H home experts of this rank, L spare slots, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import numpy as np
import torch

from ultraep.bundle import Layout, Stack
from ultraep.comm import Communicator, Message
from ultraep.ops.products import accumulator
from ultraep.plan import Plan


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
