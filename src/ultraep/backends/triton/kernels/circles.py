"""Twin of `reference/circles.py`: ranks that can keep to the threshold among themselves."""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.attempts import choose, free_all, largest
from ultraep.backends.triton.kernels.state import MOST, quotas_of

EMPTIEST, FULLEST, SMALLEST = (tl.constexpr(number) for number in range(3))


@triton.jit
def variant_of(number):
    """What a circle may waste, in halves of an even share; and the rank that is to be joined."""
    halves = tl.where(number == 0, 1, tl.where(number == 1, 6, tl.where(number == 2, 4, 3)))
    anchor = tl.where(number < 2, EMPTIEST, tl.where(number == 2, FULLEST, SMALLEST))
    return halves, anchor


@triton.jit
def first_with(chosen_G, G: tl.constexpr):
    """The first rank for which this is true; G: none."""
    return tl.min(tl.where(chosen_G, tl.arange(0, G), G), 0)


@triton.jit
def at(value_G, rank, G: tl.constexpr):
    """The value of one rank."""
    return tl.sum(tl.where(tl.arange(0, G) == rank, value_G, 0), 0)


@triton.jit
def least_waste(rest_G, height_G, G: tl.constexpr):
    """[G] what is wasted by a circle of this height that the tightest other rank closes.

    0 is the height of those who close none; `MOST`: nobody can.
    """
    rank = tl.arange(0, G)
    rest = rest_G[None, :]
    other = height_G[:, None]
    across = ((rest > 0) & (other < 0)) | ((rest < 0) & (other > 0))
    fits = across & (rest + other <= 0) & (rank[None, :] != rank[:, None])
    return tl.min(tl.where(fits, -(rest + other), MOST), 0)


@triton.jit
def close_circles(
    load_G,
    home_HG,
    hosted,
    threshold,
    ranks,
    slots,
    min_tokens,
    limit,
    halves,
    anchor,
    H: tl.constexpr,
    G: tl.constexpr,
    HELD: tl.constexpr,
):
    """Close a circle of two; or make a copy that leaves two that fit; or do as `alias` does."""
    rank = tl.arange(0, G)
    row = tl.arange(0, H)[:, None]
    free_all(hosted, ranks * slots, HELD)
    free_G = tl.where(rank < ranks, slots, 0)
    made = 0
    going = (limit > 0) & (tl.max(load_G, 0) > threshold)
    while going:
        heat_G = tl.max(home_HG, 0)
        hot_G = tl.min(tl.where(home_HG == heat_G[None, :], row, H), 0)
        second_G = tl.max(tl.where(row == hot_G[None, :], -1, home_HG), 0)
        room_G = tl.where((free_G > 0) & (threshold - load_G >= min_tokens), threshold - load_G, 0)
        surplus_G = tl.maximum(load_G - threshold, 0)
        allowed = waste_allowed(surplus_G, room_G, halves)
        ready_G = tl.where((surplus_G >= min_tokens) & (surplus_G <= heat_G), surplus_G, 0)
        waste_G = least_waste(ready_G, -room_G, G)
        most, donor = largest(tl.where(waste_G <= allowed, ready_G, 0), G, False)
        closed = most > 0
        host = first_with(room_G == most + at(waste_G, donor, G), G)
        quota = most
        if not closed:
            donor, host = pair_that_leaves_one(
                surplus_G, room_G, ready_G, heat_G, second_G, min_tokens, allowed, anchor, G
            )
            quota = at(room_G, host, G)
            if host == G:
                host, donor, quota = choose(room_G, load_G, heat_G, threshold, G, False)
        going = quota >= min_tokens
        donor = tl.where(going, donor, G)  # nobody
        host = tl.where(going, host, G)
        slot = host * slots + slots - at(free_G, host, G)
        tl.store(hosted + slot + rank * 0, hot_G * G + rank, mask=rank == donor)
        tl.store(quotas_of(hosted, ranks * slots) + slot, quota, mask=going)
        hit_HG = (row == hot_G[None, :]) & (rank == donor)[None, :]
        home_HG -= tl.where(hit_HG, quota, 0)
        load_G += tl.where(rank == host, quota, 0) - tl.where(rank == donor, quota, 0)
        free_G -= tl.where(rank == host, tl.where(closed, free_G, 1), 0)
        made += going.to(tl.int32)
        going = going & (made < limit) & (tl.max(load_G, 0) > threshold)
    return load_G, made


@triton.jit
def waste_allowed(surplus_G, room_G, halves):
    """What one circle may waste, of what all ranks lack together."""
    slack = tl.sum(room_G.to(tl.int64), 0) - tl.sum(surplus_G.to(tl.int64), 0)
    donors = tl.sum((surplus_G > 0).to(tl.int32), 0)
    allowed = tl.maximum(slack, 0) * halves // (2 * donors)
    return tl.minimum(allowed, MOST - 1).to(tl.int32)


@triton.jit
def pair_that_leaves_one(
    surplus_G, room_G, ready_G, heat_G, second_G, min_tokens, allowed, anchor, G: tl.constexpr
):
    """A donor that fills a host, so that what is left of it fits tightly with another rank.

    One of the two is the anchor. The other is that which wastes least; G, G: nobody does.
    """
    rank = tl.arange(0, G)
    hosted = anchor == EMPTIEST
    key_G = tl.where(hosted, room_G, surplus_G)
    key_G = tl.where((anchor == SMALLEST) & (surplus_G > 0), MOST - surplus_G, key_G)
    joined = largest(key_G, G, False)[1]
    # Of the donor and of the host, if the anchor is one of them and this rank the other.
    give_G = tl.where(hosted, surplus_G, at(surplus_G, joined, G))
    heat_G = tl.where(hosted, heat_G, at(heat_G, joined, G))
    second_G = tl.where(hosted, second_G, at(second_G, joined, G))
    take_G = tl.where(hosted, at(room_G, joined, G), room_G)
    rest_G = give_G - take_G
    gives = (give_G > 0) & (take_G > 0) & (heat_G >= take_G)
    goes_on = (rest_G >= min_tokens) & (rest_G <= tl.maximum(heat_G - take_G, second_G))
    rest_G = tl.where(gives & ((rest_G <= 0) | goes_on), rest_G, 0)
    others_G = tl.where(rank == joined, 0, ready_G - room_G)
    waste_G = least_waste(rest_G, others_G, G)
    least = tl.min(waste_G, 0)
    partner = first_with((waste_G == least) & (least <= allowed), G)
    nobody = partner == G
    donor = tl.where(nobody, G, tl.where(hosted, partner, joined))
    host = tl.where(nobody, G, tl.where(hosted, joined, partner))
    return donor, host
