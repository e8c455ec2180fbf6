"""Twin of `alias` in `reference/place.py` for large domains: one warp, and groups of 32 ranks.

In `attempts.py` every step looks at all ranks. Here the state is in memory, and in registers are
only three numbers of every group:

    room    of its emptiest rank, and which one that is
    load    of its fullest rank above the threshold that has an expert hot enough, likewise
    wait    the hottest expert of its ranks above the threshold that have none hot enough

A step looks at these, and then again at the two groups that have changed. What is needed only ever
falls, so a rank that waits is looked at again when it has fallen to the heat of its group.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.attempts import MOST, choose_donor, free_all, unpack
from ultraep.backends.triton.kernels.place import BUFFERS, FACTS, threshold_of

GROUP = tl.constexpr(32)


@triton.jit
def total_of(home, domain, H: tl.constexpr, G: tl.constexpr):
    """Tokens of a domain."""
    place = tl.arange(0, G)
    total = tl.zeros((), tl.int64)
    for row in range(H):
        tokens = tl.load(home + (domain * H + row) * G + place)
        total += tl.sum(tl.maximum(tokens, 0).to(tl.int64), 0)
    return total


@triton.jit(
    do_not_specialize=["domains", "ranks", "slots", "parts", "min_tokens", "limit"],
)
def first_by_groups(
    home,
    work,
    hosted,
    rank_loads,
    facts,
    domains,
    ranks,
    slots,
    parts,
    min_tokens,
    limit,
    H: tl.constexpr,
    G: tl.constexpr,
    HELD: tl.constexpr,
    ONE_SLOT: tl.constexpr,
):
    """Program d: the attempt of the first member at domain d, into buffer 0. See `first_try`."""
    domain = tl.program_id(0)
    most = tl.zeros((), tl.int64)
    for other in range(domains):
        most = tl.maximum(most, total_of(home, other, H, G))
    threshold = threshold_of(most, ranks, parts)
    own_mean = (total_of(home, domain, H, G) + ranks - 1) // ranks
    known = facts + domain * FACTS
    tl.store(known, threshold)
    tl.store(known + 1, (threshold > own_mean).to(tl.int32))

    home += domain * H * G
    work += domain * (H + 2) * G
    hosted += domain * BUFFERS * 2 * ranks * slots
    rank_loads += domain * BUFFERS * ranks
    free_all(hosted, ranks * slots, HELD)
    peak = set_out(home, work, rank_loads, ranks, slots, H, G)
    made = 0
    if tl.maximum(peak, threshold) < (1 << 31) // G - 1:
        made = alias_by_groups(
            work, hosted, rank_loads, threshold, ranks, slots, min_tokens, limit,
            H, G, ONE_SLOT, tl.int32
        )  # fmt: skip
    else:
        made = alias_by_groups(
            work, hosted, rank_loads, threshold, ranks, slots, min_tokens, limit,
            H, G, ONE_SLOT, tl.int64
        )  # fmt: skip
    rank = tl.arange(0, G)
    load_G = tl.load(rank_loads + rank, mask=rank < ranks, other=0)
    tl.store(known + 2, tl.max(load_G, 0))
    tl.store(known + 4, made)


@triton.jit
def set_out(home, work, rank_loads, ranks, slots, H: tl.constexpr, G: tl.constexpr):
    """All tokens at home, all slots free; the load of the fullest rank.

    work: [H + 2, G] tokens at home, then the hottest of them, then the free slots.
    """
    lane = tl.arange(0, GROUP)
    row = tl.arange(0, H)[:, None]
    peak = 0
    for group in range(G // GROUP):
        rank = group * GROUP + lane
        home_HR = tl.load(home + row * G + rank[None, :])
        tl.store(work + row * G + rank[None, :], home_HR)
        tl.store(work + H * G + rank, tl.max(home_HR, 0))
        tl.store(work + (H + 1) * G + rank, tl.where(rank < ranks, slots, 0))
        load_R = tl.sum(tl.maximum(home_HR, 0), 0)
        tl.store(rank_loads + rank, load_R, mask=rank < ranks)
        peak = tl.maximum(peak, tl.max(load_R, 0))
    tl.debug_barrier()
    return peak


@triton.jit
def emptiest(load_R, free_R, rank, threshold, G: tl.constexpr, KEY: tl.constexpr):
    """Of a group: the room of its emptiest rank, and which one that is, in one number."""
    room_R = tl.where(free_R > 0, threshold - load_R, -1)
    return tl.max(room_R.to(KEY) * G + (G - 1 - rank), 0)


@triton.jit
def fullest(load_R, heat_R, rank, need, threshold, G: tl.constexpr, KEY: tl.constexpr):
    """Of a group: the load of its fullest rank that can give, likewise; and the heat that waits."""
    over_R = load_R > threshold
    donor_R = tl.where(over_R & (heat_R >= need), load_R, -1)
    wait = tl.max(tl.where(over_R & (heat_R < need), heat_R, -1), 0)
    return tl.max(donor_R.to(KEY) * G + (G - 1 - rank), 0), wait


@triton.jit
def hottest(home_H, H: tl.constexpr, KEY: tl.constexpr):
    """Tokens of the hottest expert, and where it stands; the first one on a tie."""
    tokens, row = unpack(tl.max(home_H.to(KEY) * H + (H - 1 - tl.arange(0, H)), 0), H)
    return tokens.to(tl.int32), row.to(tl.int32)


@triton.jit
def alias_by_groups(
    work,
    hosted,
    loads,
    threshold,
    ranks,
    slots,
    min_tokens,
    limit,
    H: tl.constexpr,
    G: tl.constexpr,
    ONE_SLOT: tl.constexpr,
    KEY: tl.constexpr,
):
    """The emptiest rank takes from the fullest, exactly what it lacks. The number of copies."""
    lane = tl.arange(0, GROUP)
    row = tl.arange(0, H)
    group = tl.arange(0, G // GROUP)
    heats = work + H * G
    free = work + (H + 1) * G
    room_Q = tl.zeros((G // GROUP,), KEY)
    load_Q = tl.zeros((G // GROUP,), KEY) - G
    wait_Q = tl.zeros((G // GROUP,), tl.int32) + MOST  # nobody was looked at yet
    for q in range(G // GROUP):
        rank = q * GROUP + lane
        load_R = tl.load(loads + rank, mask=rank < ranks, other=0)
        free_R = tl.load(free + rank)
        room_Q = tl.where(group == q, emptiest(load_R, free_R, rank, threshold, G, KEY), room_Q)
    made = 0
    going = limit > 0
    while going:
        need, host = unpack(tl.max(room_Q, 0), G)
        need = need.to(tl.int32)
        host = host.to(tl.int32)
        wait = tl.max(wait_Q, 0)
        while wait >= tl.maximum(need, 0):
            q = tl.min(tl.where(wait_Q == wait, group, G), 0)
            rank = q * GROUP + lane
            load_R = tl.load(loads + rank, mask=rank < ranks, other=0)
            heat_R = tl.load(heats + rank)
            load, heat = fullest(load_R, heat_R, rank, need, threshold, G, KEY)
            load_Q = tl.where(group == q, load, load_Q)
            wait_Q = tl.where(group == q, heat, wait_Q)
            wait = tl.max(wait_Q, 0)
        most, donor = unpack(tl.max(load_Q, 0), G)
        donor = donor.to(tl.int32)
        quota = need
        if most < 0:
            donor, quota = look_at_all(work, loads, need, threshold, ranks, H, G, KEY)
        going = quota >= min_tokens
        rank_h = (host // GROUP) * GROUP + lane
        rank_d = (donor // GROUP) * GROUP + lane
        home_H = tl.load(work + row * G + donor)
        load_h = tl.load(loads + rank_h, mask=rank_h < ranks, other=0)
        load_d = tl.load(loads + rank_d, mask=rank_d < ranks, other=0)
        free_h = tl.load(free + rank_h)
        free_d = tl.load(free + rank_d)
        heat_d = tl.load(heats + rank_d)
        slot = host
        if not ONE_SLOT:
            slot = host * slots + slots - tl.load(free + host)
        # All that is needed has been read: now it may change.
        tl.debug_barrier()
        load_h += tl.where(rank_h == host, quota, 0) - tl.where(rank_h == donor, quota, 0)
        load_d += tl.where(rank_d == host, quota, 0) - tl.where(rank_d == donor, quota, 0)
        free_h -= tl.where(rank_h == host, 1, 0)
        free_d -= tl.where(rank_d == host, 1, 0)
        hot = hottest(home_H, H, KEY)[1]
        home_H -= tl.where(row == hot, quota, 0)
        heat_d = tl.where(rank_d == donor, hottest(home_H, H, KEY)[0], heat_d)
        if going:
            tl.store(hosted + slot, hot * G + donor)
            tl.store(hosted + ranks * slots + slot, quota)
            tl.store(loads + rank_h, load_h, mask=rank_h < ranks)
            tl.store(loads + rank_d, load_d, mask=rank_d < ranks)
            tl.store(free + rank_h, free_h)
            tl.store(work + row * G + donor, home_H)
            tl.store(heats + rank_d, heat_d)
            made += 1
        room_h = emptiest(load_h, free_h, rank_h, threshold, G, KEY)
        room_d = emptiest(load_d, free_d, rank_d, threshold, G, KEY)
        load, heat = fullest(load_d, heat_d, rank_d, need, threshold, G, KEY)
        room_Q = tl.where(group == host // GROUP, room_h, room_Q)
        room_Q = tl.where(group == donor // GROUP, room_d, room_Q)
        load_Q = tl.where(group == donor // GROUP, load, load_Q)
        wait_Q = tl.where(group == donor // GROUP, heat, wait_Q)
        going = going & (made < limit)
        tl.debug_barrier()
    return made


@triton.jit
def look_at_all(
    work, loads, need, threshold, ranks, H: tl.constexpr, G: tl.constexpr, KEY: tl.constexpr
):
    """The donor among all ranks, and what it gives: nobody has an expert hot enough."""
    rank = tl.arange(0, G)
    load_G = tl.load(loads + rank, mask=rank < ranks, other=0)
    heat_G = tl.load(work + H * G + rank)
    return choose_donor(need, load_G, heat_G, threshold, G, KEY == tl.int32)  # noqa: SIM300
