"""Twin of `alias` in `reference/place.py` for large domains: one warp, and groups of 32 ranks.

In `attempts.py` every step looks at all ranks. Here the state is in memory, and only the emptiest
and the fullest rank of every group are in registers: a step looks at these, then again at the two
groups that have changed. Only where the fullest rank has no expert hot enough, it looks at all.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.attempts import MOST, choose_donor, free_all, unpack

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
    BUFFERS: tl.constexpr,
    FACTS: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    HELD: tl.constexpr,
):
    """Program d: the attempt of the first member at domain d, into buffer 0. See `first_try`."""
    domain = tl.program_id(0)
    most = tl.zeros((), tl.int64)
    for other in range(domains):
        most = tl.maximum(most, total_of(home, other, H, G))
    mean = (most + ranks - 1) // ranks
    allowed = most * (1000000 + parts) // (ranks.to(tl.int64) * 1000000)
    threshold = tl.minimum(tl.maximum(mean, allowed), MOST).to(tl.int32)
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
            work, hosted, rank_loads, threshold, ranks, slots, min_tokens, limit, H, G, tl.int32
        )
    else:
        made = alias_by_groups(
            work, hosted, rank_loads, threshold, ranks, slots, min_tokens, limit, H, G, tl.int64
        )
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
def fullest(load_R, rank, threshold, G: tl.constexpr, KEY: tl.constexpr):
    """Of a group: the load of its fullest rank above the threshold, likewise."""
    load_R = tl.where(load_R > threshold, load_R, -1)
    return tl.max(load_R.to(KEY) * G + (G - 1 - rank), 0)


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
    KEY: tl.constexpr,
):
    """The emptiest rank takes from the fullest, exactly what it lacks. The number of copies."""
    lane = tl.arange(0, GROUP)
    row = tl.arange(0, H)
    group = tl.arange(0, G // GROUP)
    free = work + (H + 1) * G
    room_Q = tl.zeros((G // GROUP,), KEY)
    load_Q = tl.zeros((G // GROUP,), KEY)
    for q in range(G // GROUP):
        rank = q * GROUP + lane
        load_R = tl.load(loads + rank, mask=rank < ranks, other=0)
        free_R = tl.load(free + rank)
        room_Q = tl.where(group == q, emptiest(load_R, free_R, rank, threshold, G, KEY), room_Q)
        load_Q = tl.where(group == q, fullest(load_R, rank, threshold, G, KEY), load_Q)
    made = 0
    going = limit > 0
    while going:
        need, host = unpack(tl.max(room_Q, 0), G)
        most, donor = unpack(tl.max(load_Q, 0), G)
        need = need.to(tl.int32)
        host = host.to(tl.int32)
        donor = donor.to(tl.int32)
        quota = need
        home_H = tl.load(work + row * G + donor)
        if (most < 0) | (tl.max(home_H, 0) < need):
            donor, quota = look_at_all(work, loads, need, threshold, ranks, H, G, KEY)
            home_H = tl.load(work + row * G + donor)
        going = quota >= min_tokens
        hot = tl.min(tl.where(home_H == tl.max(home_H, 0), row, H), 0)
        rank_h = (host // GROUP) * GROUP + lane
        rank_d = (donor // GROUP) * GROUP + lane
        load_h = tl.load(loads + rank_h, mask=rank_h < ranks, other=0)
        load_d = tl.load(loads + rank_d, mask=rank_d < ranks, other=0)
        free_h = tl.load(free + rank_h)
        free_d = tl.load(free + rank_d)
        slot = host * slots + slots - tl.load(free + host)
        # All that is needed has been read: now it may change.
        tl.debug_barrier()
        load_h += tl.where(rank_h == host, quota, 0) - tl.where(rank_h == donor, quota, 0)
        load_d += tl.where(rank_d == host, quota, 0) - tl.where(rank_d == donor, quota, 0)
        free_h -= tl.where(rank_h == host, 1, 0)
        free_d -= tl.where(rank_d == host, 1, 0)
        home_H -= tl.where(row == hot, quota, 0)
        if going:
            tl.store(hosted + slot, hot * G + donor)
            tl.store(hosted + ranks * slots + slot, quota)
            tl.store(loads + rank_h, load_h, mask=rank_h < ranks)
            tl.store(loads + rank_d, load_d, mask=rank_d < ranks)
            tl.store(free + rank_h, free_h)
            tl.store(work + row * G + donor, home_H)
            tl.store(work + H * G + donor, tl.max(home_H, 0))
            made += 1
        room_h = emptiest(load_h, free_h, rank_h, threshold, G, KEY)
        room_d = emptiest(load_d, free_d, rank_d, threshold, G, KEY)
        top_d = fullest(load_d, rank_d, threshold, G, KEY)
        room_Q = tl.where(group == host // GROUP, room_h, room_Q)
        room_Q = tl.where(group == donor // GROUP, room_d, room_Q)
        load_Q = tl.where(group == donor // GROUP, top_d, load_Q)
        going = going & (made < limit)
        tl.debug_barrier()
    return made


@triton.jit
def look_at_all(
    work, loads, need, threshold, ranks, H: tl.constexpr, G: tl.constexpr, KEY: tl.constexpr
):
    """The donor among all ranks, and what it gives."""
    rank = tl.arange(0, G)
    load_G = tl.load(loads + rank, mask=rank < ranks, other=0)
    heat_G = tl.load(work + H * G + rank)
    return choose_donor(need, load_G, heat_G, threshold, G, tl.int32 == KEY)
