"""Twins of the rules in `reference/members.py`: one domain, one program, in registers.

The ranks of the domain stand in columns, their home experts in rows: `home_HG` are the tokens still
at home (-1 where a rank has no such expert) and `load_G` the tokens of every rank. A reduction over
experts then stays inside a thread, and one over ranks is one instruction of a warp.

Every copy is noted at its host: `hosted` is one attempt, see `state.py`. The answer is the loads in
the end and the number of copies; of `alias` also the tokens at home and the most copies of a rank.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.state import MOST, quotas_of

MOST_LONG = tl.constexpr(2**63 - 1)


@triton.jit
def free_all(hosted, held, HELD: tl.constexpr):
    """Forget the copies of an earlier attempt; `held` slots are all that there are."""
    slot = tl.arange(0, HELD)
    tl.debug_barrier()
    tl.store(hosted + slot, slot * 0 - 1, mask=slot < held)
    tl.debug_barrier()


@triton.jit
def alias(
    load_G,
    home_HG,
    hosted,
    threshold,
    slack,
    ranks,
    slots,
    usable,
    min_tokens,
    limit,
    H: tl.constexpr,
    G: tl.constexpr,
    HELD: tl.constexpr,
    ONE_SLOT: tl.constexpr,
    THRIFTY: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The emptiest rank takes from the fullest, exactly what it lacks.

    With `THRIFTY`, a surplus that fits tightly into one host goes there alone: see `tightest_pair`.
    With `PACKED`, tokens and ranks share a number, and one reduction finds both; tokens and rows
    of experts likewise.   usable: slots of a rank that may be used.
    """
    rank = tl.arange(0, G)
    row = tl.arange(0, H)[:, None]
    if PACKED:
        home_HG = home_HG * H + (H - 1 - row)
    free_all(hosted, ranks * slots, HELD)
    free_G = tl.where(rank < ranks, usable, 0)
    used_G = rank * 0
    made = 0
    going = limit > 0
    while going:
        most_G = tl.max(home_HG, 0)
        if PACKED:
            heat_G, hot_G = unpack(most_G, H)
        else:
            heat_G = most_G
            hot_G = tl.min(tl.where(home_HG == most_G[None, :], row, H), 0)
        room_G = tl.where(free_G > 0, threshold - load_G, -1)
        if THRIFTY:  # before `choose`, which branches: the reductions of both can overlap
            tight, tight_host, tight_donor, surplus, wasted = tightest_pair(
                room_G, load_G, heat_G, threshold, slack, min_tokens, G, PACKED
            )
        host, donor, quota = choose(room_G, load_G, heat_G, threshold, G, PACKED)
        filled = 1
        if THRIFTY:
            host = tl.where(tight, tight_host, host)
            donor = tl.where(tight, tight_donor, donor)
            quota = tl.where(tight, surplus, quota)
            filled = tl.where(tight, usable, 1)
            slack -= tl.where(tight, wasted, 0)
        going = quota >= min_tokens
        donor = tl.where(going, donor, G)  # nobody
        host = tl.where(going, host, G)
        slot = host
        if not ONE_SLOT:
            slot = host * slots + tl.max(tl.where(rank == host, used_G, 0), 0)
        tl.store(hosted + slot + rank * 0, hot_G * G + rank, mask=rank == donor)
        tl.store(quotas_of(hosted, ranks * slots) + slot, quota, mask=going)
        if PACKED:
            hit_HG = (home_HG == most_G[None, :]) & (rank == donor)[None, :]
            home_HG -= tl.where(hit_HG, quota * H, 0)
        else:
            hit_HG = (row == hot_G[None, :]) & (rank == donor)[None, :]
            home_HG -= tl.where(hit_HG, quota, 0)
        load_G += tl.where(rank == host, quota, 0) - tl.where(rank == donor, quota, 0)
        free_G -= tl.where(rank == host, filled, 0)
        used_G += tl.where(rank == host, 1, 0)
        made += going.to(tl.int32)
        going = going & (made < limit)
    if PACKED:
        home_HG = unpack(home_HG, H)[0]
    return load_G, home_HG, made, tl.max(used_G, 0)


@triton.jit
def tightest_pair(
    room_G, load_G, heat_G, threshold, slack, min_tokens, G: tl.constexpr, PACKED: tl.constexpr
):
    """The smallest surplus that one expert can carry, and the host with the least room for it.

    Whether there are such, and waste no more than an even share of the slack; host, donor, the
    surplus, and what is wasted.
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
    """The smallest value of those chosen, and the last rank that has it; `MOST`, -1: there is none.

    Chosen are only values that are not negative.
    """
    rank = tl.arange(0, G)
    if PACKED:
        key = tl.min(tl.where(chosen_G, value_G * G + (G - 1 - rank), MOST), 0)
        value, last = unpack(key, G)
        none = key == MOST
        return tl.where(none, MOST, value), tl.where(none, -1, last)
    else:  # noqa: RET505 - both are compiled where this is not an else
        value = tl.min(tl.where(chosen_G, value_G, MOST), 0)
        return value, tl.max(tl.where(chosen_G & (value_G == value), rank, -1), 0)


@triton.jit
def choose(room_G, load_G, heat_G, threshold, G: tl.constexpr, PACKED: tl.constexpr):
    """The emptiest rank, who gives to it, and how much."""
    need, host = largest(room_G, G, PACKED)
    donor, quota = choose_donor(need, load_G, heat_G, threshold, G, PACKED)
    return host, donor, quota


@triton.jit
def choose_donor(need, load_G, heat_G, threshold, G: tl.constexpr, PACKED: tl.constexpr):
    """The fullest rank that can give what is needed, or the one that can give most."""
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
    """The largest value, and the first rank that has it."""
    rank = tl.arange(0, G)
    if PACKED:
        return unpack(tl.max(value_G * G + (G - 1 - rank), 0), G)
    else:  # noqa: RET505 - both are compiled where this is not an else
        value = tl.max(value_G, 0)
        return value, tl.min(tl.where(value_G == value, rank, G), 0)


@triton.jit
def unpack(key, G: tl.constexpr):
    last = key & (G - 1)
    return (key - last) // G, G - 1 - last


@triton.jit
def alias_packed_or_not(
    load_G, home_HG, hosted, threshold, slack, ranks, slots, usable, min_tokens, limit,
    H: tl.constexpr, G: tl.constexpr, HELD: tl.constexpr, ONE_SLOT: tl.constexpr,
    THRIFTY: tl.constexpr
):  # fmt: skip
    """`alias`, packed if tokens times ranks, or times rows, fit into 32 bits."""
    made = 0
    received = 0
    if tl.maximum(tl.max(load_G, 0), threshold) < (1 << 31) // max(H, G) - 1:
        load_G, home_HG, made, received = alias(
            load_G, home_HG, hosted, threshold, slack, ranks, slots, usable, min_tokens, limit,
            H, G, HELD, ONE_SLOT, THRIFTY, True
        )  # fmt: skip
    else:
        load_G, home_HG, made, received = alias(
            load_G, home_HG, hosted, threshold, slack, ranks, slots, usable, min_tokens, limit,
            H, G, HELD, ONE_SLOT, THRIFTY, False
        )  # fmt: skip
    return load_G, home_HG, made, received


@triton.jit
def window(
    load_G,
    home_HG,
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
    """Every donor gives its surplus to as few hosts as possible, and to the tightest such."""
    rank = tl.arange(0, G)
    row = tl.arange(0, H)[:, None]
    free_all(hosted, ranks * slots, HELD)
    free_G = tl.where(rank < ranks, slots, 0)
    made = 0
    going = tl.max(load_G, 0) > threshold
    while going:
        over_G = load_G > threshold
        least = tl.min(tl.where(over_G, load_G, MOST), 0)
        donor = tl.min(tl.where(over_G & (load_G == least), rank, G), 0)
        heat_G = tl.max(home_HG, 0)
        hot_G = tl.min(tl.where(home_HG == heat_G[None, :], row, H), 0)
        heat = tl.max(tl.where(rank == donor, heat_G, -1), 0)
        hot = tl.max(tl.where(rank == donor, hot_G, -1), 0)
        surplus = tl.minimum(least - threshold, heat)
        room_G = tl.where((free_G > 0) & (threshold - load_G >= min_tokens), threshold - load_G, 0)
        # Unique, and in the order of the line of hosts: the roomiest first, then the lower rank.
        key_G = (room_G.to(tl.int64) << 32) | (G - rank)
        wanted, kept, first, last = tightest(room_G, key_G, surplus, limit - made, G)
        host_G = (key_G <= first) & (key_G >= last)
        # All but the last one are filled up.
        final = tl.where(kept == wanted, last, -1)
        filled = tl.sum(tl.where(host_G & (key_G != final), room_G, 0), 0)
        rest = tl.minimum((last >> 32).to(tl.int32), tl.maximum(surplus - filled, min_tokens))
        # The last one may ask for more than is left at home: then it, and all after it, is off.
        whole = (kept == wanted) & (heat - filled >= rest)
        host_G = host_G & (key_G != tl.where(whole, -1, final))
        quota_G = tl.where(host_G, tl.where(key_G == final, rest, room_G), 0)
        slot_G = rank * slots + slots - free_G
        tl.store(hosted + slot_G, hot * G + donor + rank * 0, mask=host_G)
        tl.store(quotas_of(hosted, ranks * slots) + slot_G, quota_G, mask=host_G)
        given = tl.sum(quota_G, 0)
        home_HG -= tl.where((row == hot) & (rank == donor)[None, :], given, 0)
        load_G += quota_G - tl.where(rank == donor, given, 0)
        free_G -= host_G.to(tl.int32)
        made += tl.sum(host_G.to(tl.int32), 0)
        going = whole & (tl.max(load_G, 0) > threshold)
    return load_G, made


@triton.jit
def tightest(room_G, key_G, surplus, allowed, G: tl.constexpr):
    """The last run of as few neighbours as possible that hold the surplus.

    How many that are, how many of them are allowed, and the keys of the first and last allowed one.
    None are allowed if there is no such run.
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
