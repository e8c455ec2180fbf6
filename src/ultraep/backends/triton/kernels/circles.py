"""Twin of `reference/circles.py`: ranks that can keep to the threshold among themselves.

Circles are named by one of their ranks. Heights are kept by that rank, while the circle is open.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.attempts import choose_donor, free_all
from ultraep.backends.triton.kernels.state import circles_of, load_domain, quotas_of
from ultraep.backends.triton.kernels.thresholds import mean_of, rank_loads_of, shared_threshold

NEVER = tl.constexpr(1 << 44)  # higher than any circle


@triton.jit
def first_with(chosen_G, G: tl.constexpr):
    """The first rank for which this is true; G: none."""
    return tl.min(tl.where(chosen_G, tl.arange(0, G), G), 0)


@triton.jit(do_not_specialize=["domains", "ranks"])
def draw_circles(
    home,
    ladder,
    circles,
    domains,
    ranks,
    H: tl.constexpr,
    G: tl.constexpr,
    STEP: tl.constexpr,
    RUNGS: tl.constexpr,
):
    """Program (d, v, r): the circles of domain d, as variant v draws them for rung r.

    11 tokens are allowed. Rank 2 has 2 too many, and ranks 0 and 3 have room for them:

    >>> example(draw_circles, (1, 3, 1), home=[[[8, 10, 13, 8]]], ladder=[150000],
    ...         circles=room(1, 1, 3, 4), domains=1, ranks=4, H=1, G=4, STEP=1, RUNGS=1)
    circles = [[[[0, 1, 0, 3], [0, 1, 0, 3], [0, 1, 0, 3]]]]
    """
    domain = tl.program_id(0)
    variant = tl.program_id(1)
    rung = tl.program_id(2)
    rank = tl.arange(0, G)
    load_G = rank_loads_of(load_domain(home, domain, H, G))
    parts = tl.load(ladder + rung)
    threshold = shared_threshold(home, domains, ranks, parts, H, G, STEP)
    circle_G = rank
    if threshold > mean_of(load_G, ranks):
        halves = tl.where(variant == 2, 1, 4)
        sign = tl.where(variant == 0, -1, 1)  # 1: the smallest donor chooses first
        height_G = tl.where(rank < ranks, load_G.to(tl.int64) - threshold, 0)
        circle_G = draw(height_G, ranks, halves, sign, G)
    own = circles_of(circles, domain, rung, variant, RUNGS, G)
    tl.store(own + rank, circle_G)


@triton.jit
def draw(height_G, ranks, halves, sign, G: tl.constexpr):
    """[G] the circle of every rank."""
    rank = tl.arange(0, G)
    circle_G = rank
    open_G = (rank < ranks).to(tl.int32)
    going = tl.max(height_G, 0) > 0
    while going:
        is_open_G = open_G > 0
        over_G = is_open_G & (height_G > 0)
        first = tl.min(tl.where(over_G, height_G * sign, NEVER), 0)
        donor = first_with(over_G & (height_G * sign == first), G)
        surplus = first * sign
        slack = -tl.sum(tl.where(is_open_G, height_G, 0), 0)
        allowed = slack * halves // (2 * tl.sum(over_G.to(tl.int32), 0))
        # The others, and the highest of them that takes the surplus.
        other_G = tl.where(is_open_G & (rank != donor), height_G, NEVER)
        tight = tl.max(tl.where(other_G <= -surplus, other_G, -NEVER), 0)
        host = first_with(other_G == tight, G)
        second = host * 0 + G
        closed = (host < G) & (-surplus - tight <= allowed)
        if not closed:
            together, higher = tightest_pair(other_G, -surplus, G)
            closed = -surplus - together <= allowed
            if closed:
                host = first_with(other_G == higher, G)
                second = first_with((other_G == together - higher) & (rank != host), G)
        if host == G:
            lowest = tl.min(other_G, 0)
            host = first_with((other_G == lowest) & (other_G < 0), G)
        height_G += tl.where(rank == host, surplus, 0)
        shut_G = (rank == donor) | (rank == second) | (closed & (rank == host))
        open_G = tl.where(shut_G, 0, open_G)
        joining_G = (circle_G == donor) | (circle_G == second)
        circle_G = tl.where(joining_G & (host < G), host, circle_G)
        going = (host < G) & (tl.max(tl.where(open_G > 0, height_G, 0), 0) > 0)
    return circle_G


@triton.jit
def tightest_pair(other_G, most, G: tl.constexpr):
    """The height of two circles together, as high as they may be; and of the higher of them."""
    rank = tl.arange(0, G)
    one = other_G[:, None]
    two = other_G[None, :]
    may = (one + two <= most) & (rank[:, None] != rank[None, :])
    sums = tl.where(may, one + two, -NEVER)
    together = tl.max(tl.max(sums, 1), 0)
    higher = tl.where(sums == together, tl.maximum(one, two), -NEVER)
    return together, tl.max(tl.max(higher, 1), 0)


@triton.jit
def within_circles(
    load_G,
    home_HG,
    circle_G,
    hosted,
    threshold,
    ranks,
    slots,
    min_tokens,
    limit,
    H: tl.constexpr,
    G: tl.constexpr,
    HELD: tl.constexpr,
):
    """As `alias`, but inside the circle of the fullest rank, as long as anyone there has room."""
    rank = tl.arange(0, G)
    row = tl.arange(0, H)[:, None]
    free_all(hosted, ranks * slots, HELD)
    free_G = tl.where(rank < ranks, slots, 0)
    made = 0
    peak = tl.max(load_G, 0)
    going = (limit > 0) & (peak > threshold)
    while going:
        heat_G = tl.max(home_HG, 0)
        hot_G = tl.min(tl.where(home_HG == heat_G[None, :], row, H), 0)
        fullest = first_with(load_G == peak, G)
        circle = tl.max(tl.where(rank == fullest, circle_G, -1), 0)
        room_G = tl.where((free_G > 0) & (threshold - load_G >= min_tokens), threshold - load_G, 0)
        inside = tl.max(tl.where(circle_G == circle, room_G, 0), 0)
        need = tl.where(inside > 0, inside, tl.max(room_G, 0))
        host = first_with((room_G == need) & ((circle_G == circle) | (inside == 0)), G)
        joining = tl.max(tl.where(rank == host, circle_G, -1), 0)
        circle_G = tl.where(circle_G == joining, circle, circle_G)
        of_circle_G = tl.where(circle_G == circle, load_G, -1)
        donor, quota = choose_donor(need, of_circle_G, heat_G, threshold, G, False)
        going = (need > 0) & (quota >= min_tokens)
        donor = tl.where(going, donor, G)  # nobody
        host = tl.where(going, host, G)
        used = slots - tl.max(tl.where(rank == host, free_G, 0), 0)
        slot = host * slots + used
        tl.store(hosted + slot + rank * 0, hot_G * G + rank, mask=rank == donor)
        tl.store(quotas_of(hosted, ranks * slots) + slot, quota, mask=going)
        hit_HG = (row == hot_G[None, :]) & (rank == donor)[None, :]
        home_HG -= tl.where(hit_HG, quota, 0)
        load_G += tl.where(rank == host, quota, 0) - tl.where(rank == donor, quota, 0)
        free_G -= tl.where(rank == host, 1, 0)
        made += going.to(tl.int32)
        peak = tl.max(load_G, 0)
        going = going & (made < limit) & (peak > threshold)
    return load_G, made
