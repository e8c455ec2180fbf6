"""Loads of ranks with all tokens at home, and what no rank shall exceed."""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.state import MOST


@triton.jit
def rank_loads_of(home_HG):
    """[G] tokens of every rank, with all of them at home."""
    return tl.sum(tl.maximum(home_HG, 0), 0)


@triton.jit
def mean_of(load_G, ranks):
    """The mean load of a rank, rounded up."""
    return ((tl.sum(load_G.to(tl.int64), 0) + ranks - 1) // ranks).to(tl.int32)


@triton.jit
def shared_threshold(
    load_G, home, domains, ranks, parts, H: tl.constexpr, G: tl.constexpr, STEP: tl.constexpr
):
    """What no rank shall exceed: the heaviest domain's mean, rounded up, and the tolerance.

    load_G: of one of the domains.
    """
    most = tl.sum(load_G.to(tl.int64), 0)
    if domains > 1:
        place = tl.arange(0, H * G)[None, :]
        for begin in range(0, domains, STEP):
            domain = begin + tl.arange(0, STEP)[:, None]
            tokens = tl.load(home + domain * (H * G) + place, mask=domain < domains, other=0)
            total = tl.sum(tl.maximum(tokens, 0).to(tl.int64), 1)
            most = tl.maximum(most, tl.max(total, 0))
    return threshold_of(most, ranks, parts)


@triton.jit
def threshold_of(total, ranks, parts):
    """The mean load of a rank, rounded up, and as many millionths of it more."""
    mean = (total + ranks - 1) // ranks
    allowed = total * (1000000 + parts) // (ranks.to(tl.int64) * 1000000)
    # More than all tokens is never exceeded either, and needs more than 32 bits.
    return tl.minimum(tl.maximum(mean, allowed), MOST).to(tl.int32)
