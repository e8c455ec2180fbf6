"""Launches of stage 8 on the GPU: gradients of copies, summed into the home expert."""

from __future__ import annotations

import torch
import triton.language as tl

from ultraep.backends.triton.kernels import gradients
from ultraep.backends.triton.launch import quick
from ultraep.backends.triton.streamer import Streamer
from ultraep.comm import Region

NUMBERS, WARPS = 4096, 8  # of a tile
AHEAD = 3  # copies whose gradients are loaded together: 1 or 3


def pull(
    gradients_HP: torch.Tensor,
    rows: Region,
    schedule: torch.Tensor,
    streamer: Streamer,
    *,
    programs: int,
    zero: bool = False,
) -> None:
    """Add the gradients of all copies to those of the home experts, in place.

    rows: `[slots, P]` of every rank, of the type of `gradients_HP`.   zero: and leave zeros there.
    """
    double = gradients_HP.dtype == torch.float64
    quick(gradients.pull)[(programs,)](
        gradients_HP,
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
        ALIGNED=gradients_HP.shape[1] * gradients_HP.element_size() % 16 == 0,
        W=NUMBERS,
        PROGRAMS=programs,
        num_warps=WARPS,
    )
