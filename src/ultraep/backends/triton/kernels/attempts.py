"""Twins of the heuristics in `reference/members.py`: one program per domain, in registers.

Axis 1 of a tile are the ranks of the domain, axis 0 their home experts: `home_HG` are the rows
still at home (-1: no expert) and `load_G` the rows of every rank. A reduction over experts then
stays inside a thread, and one over ranks is one instruction of a warp.

Every replica is stored at its host: `hosted` is one attempt, see `state.py`. The functions return
the final loads and the number of replicas; `alias` also the rows at home and the most replicas of
one rank.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.state import MOST, held_by, quotas_of

MOST_LONG = tl.constexpr(2**63 - 1)
EMPTIEST, FULLEST, SMALLEST = (tl.constexpr(number) for number in range(3))


@triton.jit
def free_all(hosted, problem, SHAPE: tl.constexpr):
    """Clear the replicas of an earlier attempt."""
    slot = tl.arange(0, SHAPE.HELD)
    tl.debug_barrier()
    tl.store(hosted + slot, slot * 0 - 1, mask=slot < held_by(problem))
    tl.debug_barrier()


@triton.jit
def alias(
    load_G, home_HG, hosted, threshold, slack, usable, problem,
    SHAPE: tl.constexpr, THRIFTY: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """Let the emptiest rank take exactly what it lacks from the fullest.

    THRIFTY: a surplus that fits tightly into one host goes there alone, see `tightest_pair`.
    PACKED: rows and rank share one integer, so that one reduction finds both; likewise rows and
    expert.   usable: slots per rank that may be used.
    """
    rank = tl.arange(0, SHAPE.G)
    row = tl.arange(0, SHAPE.H)[:, None]
    if PACKED:
        home_HG = home_HG * SHAPE.H + (SHAPE.H - 1 - row)
    free_all(hosted, problem, SHAPE)
    free_G = tl.where(rank < problem.ranks, usable, 0)
    used_G = rank * 0
    # The result of a reduction stays in a register; a parameter is loaded again in every step.
    min_tokens = tl.max(rank * 0 + problem.min_tokens, 0)
    limit = tl.max(rank * 0 + problem.limit, 0)
    num_copies = 0
    going = limit > 0
    while going:
        most_G = tl.max(home_HG, 0)
        if PACKED:
            heat_G, hot_G = unpack(most_G, SHAPE.H)
        else:
            heat_G = most_G
            hot_G = tl.min(tl.where(home_HG == most_G[None, :], row, SHAPE.H), 0)
        room_G = tl.where(free_G > 0, threshold - load_G, -1)
        if THRIFTY:  # before the branch in `choose`: the reductions of both can overlap
            tight, tight_host, tight_donor, surplus, wasted = tightest_pair(
                room_G, load_G, heat_G, threshold, slack, min_tokens, SHAPE.G, PACKED
            )
        host, donor, quota = choose(room_G, load_G, heat_G, threshold, SHAPE.G, PACKED)
        filled = 1
        if THRIFTY:
            host = tl.where(tight, tight_host, host)
            donor = tl.where(tight, tight_donor, donor)
            quota = tl.where(tight, surplus, quota)
            filled = tl.where(tight, usable, 1)
            slack -= tl.where(tight, wasted, 0)
        going = quota >= min_tokens
        donor = tl.where(going, donor, SHAPE.G)  # none
        host = tl.where(going, host, SHAPE.G)
        slot = host
        if not SHAPE.ONE_SLOT:
            slot = host * problem.slots + tl.max(tl.where(rank == host, used_G, 0), 0)
        tl.store(hosted + slot + rank * 0, hot_G * SHAPE.G + rank, mask=rank == donor)
        tl.store(quotas_of(hosted, problem) + slot, quota, mask=going)
        if PACKED:
            hit_HG = (home_HG == most_G[None, :]) & (rank == donor)[None, :]
            home_HG -= tl.where(hit_HG, quota * SHAPE.H, 0)
        else:
            hit_HG = (row == hot_G[None, :]) & (rank == donor)[None, :]
            home_HG -= tl.where(hit_HG, quota, 0)
        load_G += tl.where(rank == host, quota, 0) - tl.where(rank == donor, quota, 0)
        free_G -= tl.where(rank == host, filled, 0)
        used_G += tl.where(rank == host, 1, 0)
        num_copies += going.to(tl.int32)
        going = going & (num_copies < limit)
    if PACKED:
        home_HG = unpack(home_HG, SHAPE.H)[0]
    return load_G, home_HG, num_copies, tl.max(used_G, 0)


@triton.jit
def tightest_pair(
    room_G, load_G, heat_G, threshold, slack, min_tokens, G: tl.constexpr, PACKED: tl.constexpr
):
    """Find the smallest surplus that one expert can carry, and the host with the least room for it.

    Returns whether they waste at most an even share of the slack, host, donor, surplus and waste.
    """
    surplus_G = load_G - threshold
    ready_G = (surplus_G >= min_tokens) & (surplus_G <= heat_G)
    surplus, donor = smallest(surplus_G, ready_G, G, PACKED)
    room, host = smallest(room_G, room_G >= surplus, G, PACKED)
    donors = tl.sum((surplus_G > 0).to(tl.int32), 0)
    wasted = (room - surplus).to(tl.int64)
    tight = (host >= 0) & (wasted * donors <= slack)
    return tight, host, donor, surplus, wasted


@triton.jit
def smallest(value_G, chosen_G, G: tl.constexpr, PACKED: tl.constexpr):
    """Return the smallest chosen value and the last rank that has it; MOST and -1: none.

    Chosen values are never negative.
    """
    rank = tl.arange(0, G)
    if PACKED:
        key = tl.min(tl.where(chosen_G, value_G * G + (G - 1 - rank), MOST), 0)
        value, last = unpack(key, G)
        none = key == MOST
        return tl.where(none, MOST, value), tl.where(none, -1, last)
    else:  # noqa: RET505 - without `else`, Triton compiles both
        value = tl.min(tl.where(chosen_G, value_G, MOST), 0)
        return value, tl.max(tl.where(chosen_G & (value_G == value), rank, -1), 0)


@triton.jit
def choose(room_G, load_G, heat_G, threshold, G: tl.constexpr, PACKED: tl.constexpr):
    """Return the emptiest rank, its donor, and the quota."""
    need, host = largest(room_G, G, PACKED)
    donor, quota = choose_donor(need, load_G, heat_G, threshold, G, PACKED)
    return host, donor, quota


@triton.jit
def choose_donor(need, load_G, heat_G, threshold, G: tl.constexpr, PACKED: tl.constexpr):
    """Return the fullest rank that can give `need`, or else the most; and the quota."""
    over_G = load_G > threshold
    enough_G = over_G & (heat_G >= need)
    fullest, donor = largest(tl.where(enough_G, load_G, -1), G, PACKED)
    quota = need
    if fullest < 0:
        heat = tl.max(tl.where(over_G, heat_G, -1), 0)
        fullest, donor = largest(tl.where(over_G & (heat_G == heat), load_G, -1), G, PACKED)
        quota = tl.minimum(need, heat)
    return donor, quota


@triton.jit
def largest(value_G, G: tl.constexpr, PACKED: tl.constexpr):
    """Return the largest value, and the first rank that has it."""
    rank = tl.arange(0, G)
    if PACKED:
        return unpack(tl.max(value_G * G + (G - 1 - rank), 0), G)
    else:  # noqa: RET505 - without `else`, Triton compiles both
        value = tl.max(value_G, 0)
        return value, tl.min(tl.where(value_G == value, rank, G), 0)


@triton.jit
def unpack(key, G: tl.constexpr):
    last = key & (G - 1)
    return (key - last) // G, G - 1 - last


@triton.jit
def alias_packed_or_not(
    load_G, home_HG, hosted, threshold, most, slack, usable, problem,
    SHAPE: tl.constexpr, THRIFTY: tl.constexpr
):  # fmt: skip
    """Call `alias`, packed if rows times ranks or experts fit into 32 bits.

    most: rows that a rank has or may have.
    """
    num_copies = 0
    received = 0
    if most < (1 << 31) // max(SHAPE.H, SHAPE.G) - 1:
        load_G, home_HG, num_copies, received = alias(
            load_G, home_HG, hosted, threshold, slack, usable, problem, SHAPE, THRIFTY, True
        )
    else:
        load_G, home_HG, num_copies, received = alias(
            load_G, home_HG, hosted, threshold, slack, usable, problem, SHAPE, THRIFTY, False
        )
    return load_G, home_HG, num_copies, received


@triton.jit
def window(load_G, home_HG, hosted, threshold, problem, SHAPE: tl.constexpr):
    """Let every donor give its surplus to the fewest hosts, and to the tightest such."""
    ranks, slots, min_tokens, limit, _speeds = problem
    rank = tl.arange(0, SHAPE.G)
    row = tl.arange(0, SHAPE.H)[:, None]
    free_all(hosted, problem, SHAPE)
    free_G = tl.where(rank < ranks, slots, 0)
    num_copies = 0
    going = tl.max(load_G, 0) > threshold
    while going:
        over_G = load_G > threshold
        least = tl.min(tl.where(over_G, load_G, MOST), 0)
        donor = tl.min(tl.where(over_G & (load_G == least), rank, SHAPE.G), 0)
        heat_G = tl.max(home_HG, 0)
        hot_G = tl.min(tl.where(home_HG == heat_G[None, :], row, SHAPE.H), 0)
        heat = tl.max(tl.where(rank == donor, heat_G, -1), 0)
        hot = tl.max(tl.where(rank == donor, hot_G, -1), 0)
        surplus = tl.minimum(least - threshold, heat)
        room_G = tl.where((free_G > 0) & (threshold - load_G >= min_tokens), threshold - load_G, 0)
        # Unique keys, in the order of hosts: the roomiest first, then the lower rank.
        key_G = (room_G.to(tl.int64) << 32) | (SHAPE.G - rank)
        wanted, kept, first, last = tightest(room_G, key_G, surplus, limit - num_copies, SHAPE.G)
        host_G = (key_G <= first) & (key_G >= last)
        # All hosts but the last are filled.
        final = tl.where(kept == wanted, last, -1)
        filled = tl.sum(tl.where(host_G & (key_G != final), room_G, 0), 0)
        rest = tl.minimum((last >> 32).to(tl.int32), tl.maximum(surplus - filled, min_tokens))
        # If the last host needs more than is left at home, it is skipped and the attempt ends.
        whole = (kept == wanted) & (heat - filled >= rest)
        host_G = host_G & (key_G != tl.where(whole, -1, final))
        quota_G = tl.where(host_G, tl.where(key_G == final, rest, room_G), 0)
        slot_G = rank * slots + slots - free_G
        tl.store(hosted + slot_G, hot * SHAPE.G + donor + rank * 0, mask=host_G)
        tl.store(quotas_of(hosted, problem) + slot_G, quota_G, mask=host_G)
        moved = tl.sum(quota_G, 0)
        home_HG -= tl.where((row == hot) & (rank == donor)[None, :], moved, 0)
        load_G += quota_G - tl.where(rank == donor, moved, 0)
        free_G -= host_G.to(tl.int32)
        num_copies += tl.sum(host_G.to(tl.int32), 0)
        going = whole & (tl.max(load_G, 0) > threshold)
    return load_G, num_copies


@triton.jit
def tightest(room_G, key_G, surplus, allowed, G: tl.constexpr):
    """Find the last run of as few neighbours as possible that have room for the surplus.

    Returns the length of the run, how many of its hosts are allowed, and the keys of the first and
    last allowed host. Without such a run, none is allowed.
    """
    place = tl.arange(0, G)
    wanted = 1
    kept = tl.minimum(allowed, 1)
    first = tl.min(tl.where(room_G >= surplus, key_G, MOST_LONG), 0)
    last = first
    if tl.max(room_G, 0) < surplus:
        line_G = tl.sort(key_G, 0, descending=True)
        rooms_G = line_G >> 32
        end_G = tl.cumsum(rooms_G, 0)
        wanted = tl.sum((end_G < surplus).to(tl.int32), 0) + 1
        hosts = tl.sum((rooms_G > 0).to(tl.int32), 0)
        reach_G = tl.gather(end_G, tl.minimum(place + wanted - 1, G - 1), 0)
        holds_G = (reach_G - end_G + rooms_G >= surplus) & (place + wanted <= hosts)
        start = tl.sum(holds_G.to(tl.int32), 0) - 1
        kept = tl.where(start >= 0, tl.minimum(allowed, wanted), 0)
        first = tl.max(tl.where(place == start, line_G, -1), 0)
        last = tl.max(tl.where(place == start + kept - 1, line_G, -1), 0)
    return wanted, kept, tl.where(kept > 0, first, -1), last


@triton.jit
def variant_of(number):
    """Return what a circle may waste, in halves of an even share, and the anchor."""
    halves = tl.where(number == 0, 1, tl.where(number == 1, 6, tl.where(number == 2, 4, 3)))
    anchor = tl.where(number < 2, EMPTIEST, tl.where(number == 2, FULLEST, SMALLEST))
    return halves, anchor


@triton.jit
def first_with(chosen_G, G: tl.constexpr):
    """Return the first rank for which this is true; G: none."""
    return tl.min(tl.where(chosen_G, tl.arange(0, G), G), 0)


@triton.jit
def at(value_G, rank, G: tl.constexpr):
    """Return the value of one rank."""
    return tl.sum(tl.where(tl.arange(0, G) == rank, value_G, 0), 0)


@triton.jit
def least_waste(rest_G, height_G, G: tl.constexpr):
    """[G] the waste if the tightest other rank closes a circle of this height; MOST if none can.

    Ranks of height 0 close no circle.
    """
    rank = tl.arange(0, G)
    rest = rest_G[None, :]
    other = height_G[:, None]
    across = ((rest > 0) & (other < 0)) | ((rest < 0) & (other > 0))
    fits = across & (rest + other <= 0) & (rank[None, :] != rank[:, None])
    return tl.min(tl.where(fits, -(rest + other), MOST), 0)


@triton.jit
def close_circles(load_G, home_HG, hosted, threshold, variant, problem, SHAPE: tl.constexpr):
    """Close a circle of two; or prepare one with a replica; or do as `alias` does."""
    halves, anchor = variant_of(variant)
    ranks, slots, min_tokens, limit, _speeds = problem
    rank = tl.arange(0, SHAPE.G)
    row = tl.arange(0, SHAPE.H)[:, None]
    free_all(hosted, problem, SHAPE)
    free_G = tl.where(rank < ranks, slots, 0)
    num_copies = 0
    going = (limit > 0) & (tl.max(load_G, 0) > threshold)
    while going:
        heat_G = tl.max(home_HG, 0)
        hot_G = tl.min(tl.where(home_HG == heat_G[None, :], row, SHAPE.H), 0)
        second_G = tl.max(tl.where(row == hot_G[None, :], -1, home_HG), 0)
        room_G = tl.where((free_G > 0) & (threshold - load_G >= min_tokens), threshold - load_G, 0)
        surplus_G = tl.maximum(load_G - threshold, 0)
        allowed = waste_allowed(surplus_G, room_G, halves)
        ready_G = tl.where((surplus_G >= min_tokens) & (surplus_G <= heat_G), surplus_G, 0)
        waste_G = least_waste(ready_G, -room_G, SHAPE.G)
        most, donor = largest(tl.where(waste_G <= allowed, ready_G, 0), SHAPE.G, False)
        closed = most > 0
        host = first_with(room_G == most + at(waste_G, donor, SHAPE.G), SHAPE.G)
        quota = most
        if not closed:
            donor, host = pair_that_leaves_one(
                surplus_G, room_G, ready_G, heat_G, second_G, min_tokens, allowed, anchor, SHAPE.G
            )
            quota = at(room_G, host, SHAPE.G)
            if host == SHAPE.G:
                host, donor, quota = choose(room_G, load_G, heat_G, threshold, SHAPE.G, False)
        going = quota >= min_tokens
        donor = tl.where(going, donor, SHAPE.G)  # none
        host = tl.where(going, host, SHAPE.G)
        slot = host * slots + slots - at(free_G, host, SHAPE.G)
        tl.store(hosted + slot + rank * 0, hot_G * SHAPE.G + rank, mask=rank == donor)
        tl.store(quotas_of(hosted, problem) + slot, quota, mask=going)
        hit_HG = (row == hot_G[None, :]) & (rank == donor)[None, :]
        home_HG -= tl.where(hit_HG, quota, 0)
        load_G += tl.where(rank == host, quota, 0) - tl.where(rank == donor, quota, 0)
        free_G -= tl.where(rank == host, tl.where(closed, free_G, 1), 0)
        num_copies += going.to(tl.int32)
        going = going & (num_copies < limit) & (tl.max(load_G, 0) > threshold)
    return load_G, num_copies


@triton.jit
def waste_allowed(surplus_G, room_G, halves):
    """Return what one circle may waste."""
    slack = tl.sum(room_G.to(tl.int64), 0) - tl.sum(surplus_G.to(tl.int64), 0)
    donors = tl.sum((surplus_G > 0).to(tl.int32), 0)
    allowed = tl.maximum(slack, 0) * halves // (2 * donors)
    return tl.minimum(allowed, MOST - 1).to(tl.int32)


@triton.jit
def pair_that_leaves_one(
    surplus_G, room_G, ready_G, heat_G, second_G, min_tokens, allowed, anchor, G: tl.constexpr
):
    """Return a donor that fills a host, so that its rest fits tightly with another rank.

    The anchor is one of the two; the other one wastes least. Returns G, G without a pair.
    """
    rank = tl.arange(0, G)
    hosted = anchor == EMPTIEST
    key_G = tl.where(hosted, room_G, surplus_G)
    key_G = tl.where((anchor == SMALLEST) & (surplus_G > 0), MOST - surplus_G, key_G)
    joined = largest(key_G, G, False)[1]
    # Values of donor and host, if one of them is the anchor and the other one this rank.
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
    none = partner == G
    donor = tl.where(none, G, tl.where(hosted, partner, joined))
    host = tl.where(none, G, tl.where(hosted, joined, partner))
    return donor, host
