"""Twin of `quickest` in `reference/place.py`: the attempt that takes the least time."""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.state import (
    AT_HOME,
    MADE,
    MOST,
    REACHED,
    TRANSFERS,
    outcome_of,
)

MOST_TIME = tl.constexpr(2**63 - 1)
LIMITED = tl.constexpr(3)  # attempts behind the exact one that count if they have fewer transfers


@triton.jit
def quickest_of(outcomes, rates, domains, attempts, PADDED: tl.constexpr):
    """The number of the attempt that is quickest for all domains; -1: no copies are.

    rates: row, copy, each and layer, as 64 bits.   PADDED: the attempts, padded to a power of two.
    """
    number = tl.arange(0, PADDED)
    known = number < attempts
    peak_N = tl.zeros((PADDED,), tl.int64)
    copies_N = tl.zeros((PADDED,), tl.int64)
    transfers_N = tl.zeros((PADDED,), tl.int64)
    home_N = tl.zeros((PADDED,), tl.int64)
    for domain in range(domains):
        at = outcome_of(outcomes, domain, number, attempts)
        peak_N = tl.maximum(peak_N, load_shared(at + REACHED, known))
        copies_N += load_shared(at + MADE, known)
        transfers_N = tl.maximum(transfers_N, load_shared(at + TRANSFERS, known))
        home_N = tl.maximum(home_N, load_shared(at + AT_HOME, known))
    row = tl.load(rates)
    copy = tl.load(rates + 1)
    time_N = row * peak_N + copy * transfers_N + tl.load(rates + 2) * copies_N
    time_N += tl.where(copies_N > 0, tl.load(rates + 3), 0)
    exact = tl.sum(tl.where(number == 0, transfers_N, 0), 0)
    limited_N = (number > 0) & (number <= LIMITED)
    fewer_N = (transfers_N < exact) & (copy > 0)
    left_N = known & (~limited_N | fewer_N) & ((number == 0) | (peak_N < MOST))
    time = tl.min(tl.where(left_N, time_N, MOST_TIME), 0)
    left_N = left_N & (time_N == time)
    left_N = left_N & (copies_N == tl.min(tl.where(left_N, copies_N, MOST), 0))
    chosen = tl.min(tl.where(left_N, number, PADDED), 0)
    return tl.where(row * tl.max(home_N, 0) <= time, -1, chosen)


@triton.jit
def load_shared(at, mask):
    """What other programs of the same launch have stored."""
    return tl.load(at, mask=mask, other=0, cache_modifier=".cg")
