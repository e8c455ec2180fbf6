"""Twins of the heuristics in `reference/heuristics.py`: one program per domain, in registers.

Axis 1 of a tile are the ranks of the domain, axis 0 their home experts: `home_HG` are the rows
still at home (-1: no expert) and `load_G` the rows of every rank. A reduction over experts then
stays inside a thread, and one over ranks is one instruction of a warp.

Every replica is stored at its host: `hosted` is one attempt, see `state.py`. `alias` returns the
final loads, the rows at home, the number of replicas and the most replicas of one rank.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.state import MOST, held_by, quotas_of


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
    num_replicas = 0
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
        num_replicas += going.to(tl.int32)
        going = going & (num_replicas < limit)
    if PACKED:
        home_HG = unpack(home_HG, SHAPE.H)[0]
    return load_G, home_HG, num_replicas, tl.max(used_G, 0)


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
    """Return the emptiest rank, its donor, and the quota.

    The donor is the fullest rank that can give all that the host lacks, or else the most.
    """
    need, host = largest(room_G, G, PACKED)
    over_G = load_G > threshold
    enough_G = over_G & (heat_G >= need)
    fullest, donor = largest(tl.where(enough_G, load_G, -1), G, PACKED)
    quota = need
    if fullest < 0:
        heat = tl.max(tl.where(over_G, heat_G, -1), 0)
        fullest, donor = largest(tl.where(over_G & (heat_G == heat), load_G, -1), G, PACKED)
        quota = tl.minimum(need, heat)
    return host, donor, quota


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
    num_replicas = 0
    received = 0
    if most < (1 << 31) // max(SHAPE.H, SHAPE.G) - 1:
        load_G, home_HG, num_replicas, received = alias(
            load_G, home_HG, hosted, threshold, slack, usable, problem, SHAPE, THRIFTY, True
        )
    else:
        load_G, home_HG, num_replicas, received = alias(
            load_G, home_HG, hosted, threshold, slack, usable, problem, SHAPE, THRIFTY, False
        )
    return load_G, home_HG, num_replicas, received
