"""Launches of stage 8 on the GPU: gradients of copies, summed into the home expert."""

from __future__ import annotations

import torch
import triton.language as tl

from ultraep.backends.triton.kernels import gradients
from ultraep.backends.triton.launch import quick
from ultraep.backends.triton.streamer import Streamer
from ultraep.comm import Region

NUMBERS, WARPS = 4096, 8  # of a tile
# Times as many, where a program has a multiprocessor for itself: its most threads.
LARGE = 4 if torch.version.hip is None else 2
AHEAD = 3  # copies whose gradients are loaded together: 1 or 3


def pull(
    gradients_HP: torch.Tensor,
    rows: Region,
    schedule: torch.Tensor,
    streamer: Streamer,
    *,
    programs: int,
    large: bool = False,
    own_HP: torch.Tensor | None = None,
    zero: bool = False,
) -> None:
    """The gradients of home experts that have copies, from their own and those of the copies.

    own_HP: their own; None: those that stand in `gradients_HP`.
    rows: `[slots, P]` of every rank, of that type.   zero: and leave zeros there.
    large: programs are as large as a multiprocessor.
    """
    own = gradients_HP if own_HP is None else own_HP
    assert own.stride() == gradients_HP.stride(), (own.stride(), gradients_HP.stride())
    double = own.dtype == torch.float64
    size = LARGE if large and not double else 1
    quick(gradients.pull)[(programs,)](
        gradients_HP,
        own,
        rows.addresses,
        schedule,
        streamer.topology.slots,
        streamer.copies,
        len(gradients_HP),
        gradients_HP.shape[1],
        gradients_HP.stride(0),
        ACCUMULATOR=tl.float64 if double else tl.float32,
        ZERO=zero,
        AHEAD=AHEAD,
        ALIGNED=own.shape[1] * own.element_size() % 16 == 0,
        W=NUMBERS * size,
        PROGRAMS=programs,
        num_warps=WARPS * size,
    )
