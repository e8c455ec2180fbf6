"""Twin of `reference/bound.py`, for one domain in one program."""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.state import MOST


@triton.jit
def place_in_line(key_N, keys, N: tl.constexpr, STEP: tl.constexpr):
    """[N] how many keys are larger, or equal and earlier. `keys` are the same ones in memory."""
    number = tl.arange(0, N)
    place_N = number * 0
    for begin in range(0, N, STEP):
        other = begin + tl.arange(0, STEP)
        key_S = tl.load(keys + other)
        ahead = key_S[:, None] > key_N[None, :]
        tied = (key_S[:, None] == key_N[None, :]) & (other[:, None] < number[None, :])
        place_N += tl.sum((ahead | tied).to(tl.int32), 0)
    return place_N


@triton.jit
def bound(
    load_G,
    home,
    scratch,
    ranks,
    slots,
    limit,
    H: tl.constexpr,
    G: tl.constexpr,
    STEP: tl.constexpr,
):
    """The least that the fullest rank can hold.

    home: [H * G] tokens of the home experts.   scratch: room for 2 * H * G + 2 * G numbers.
    """
    rank = tl.arange(0, G)
    # The emptiest rank first; columns without a rank come last.
    key_G = tl.where(rank < ranks, -load_G, -MOST - 1)
    tl.store(scratch + rank, key_G)
    tl.debug_barrier()
    place_G = place_in_line(key_G, scratch, G, min(STEP * H, G))
    tl.debug_barrier()  # all keys have been read
    tl.store(scratch + G + place_G, load_G)
    tl.store(scratch + rank, place_G)
    tl.debug_barrier()
    emptiest_G = tl.load(scratch + G + rank, mask=rank < ranks, other=0)
    rest_G = tl.sum(emptiest_G, 0) - tl.cumsum(emptiest_G, 0) + emptiest_G
    number = tl.arange(0, H * G)
    tokens_N = tl.load(home + number)
    rank_place_N = tl.load(scratch + number % G)
    line_N = place_in_line(tokens_N, home, H * G, STEP)
    hottest = scratch + 2 * G
    tl.store(hottest + line_N, tl.maximum(tokens_N, 0))
    tl.store(hottest + H * G + line_N, rank_place_N)
    tl.debug_barrier()
    tokens_N = tl.load(hottest + number)
    rank_place_N = tl.load(hottest + H * G + number)
    best = 0
    for k in range(ranks):
        wanted = tl.minimum(slots * k, limit)
        outside_N = rank_place_N >= k
        taken_N = outside_N & (tl.cumsum(outside_N.to(tl.int32), 0) <= wanted)
        movable = tl.sum(tl.where(taken_N, tokens_N, 0), 0)
        rest = tl.sum(tl.where(rank == k, rest_G, 0), 0)
        best = tl.maximum(best, (rest - movable + ranks - k - 1) // (ranks - k))
    return best
