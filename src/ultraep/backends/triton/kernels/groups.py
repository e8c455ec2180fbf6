"""Twin of `alias` in `reference/members.py` for large domains: one warp, groups of 32 ranks.

In `attempts.py` every step examines all ranks. Here the state is in memory, and registers hold
three numbers per group:

    room    of its emptiest rank, with that rank
    load    of its fullest rank above the threshold with an expert hot enough, with that rank
    wait    rows of the hottest expert among ranks above the threshold that have none hot enough

A step examines these numbers, then the two groups that changed. The need of the emptiest rank only
ever falls, so a waiting rank is examined again once the need has fallen to the heat of its group.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels import state
from ultraep.backends.triton.kernels.attempts import choose_donor, free_all, unpack
from ultraep.backends.triton.kernels.search import note
from ultraep.backends.triton.kernels.state import MOST, Attempts

GROUP = tl.constexpr(32)


@triton.jit
def total_of(home, domain, SHAPE: tl.constexpr):
    """Return the rows of a domain."""
    place = tl.arange(0, SHAPE.G)
    total = tl.zeros((), tl.int64)
    for row in range(SHAPE.H):
        tokens = tl.load(state.home_of(home, domain, SHAPE) + row * SHAPE.G + place)
        total += tl.sum(tl.maximum(tokens, 0).to(tl.int64), 0)
    return total


@triton.jit(do_not_specialize=["domains", "ranks", "slots", "min_tokens", "limit", "parts"])
def first_by_groups(
    home,
    work,
    counts,
    tried: Attempts,
    domains,
    ranks,
    slots,
    min_tokens,
    limit,
    speeds,
    parts,
    SHAPE: tl.constexpr,
):
    """Program d: the attempt of the first heuristic at domain d; see `first_try`."""
    domain = tl.program_id(0)
    problem = state.problem_of(domain, ranks, slots, min_tokens, limit, speeds, SHAPE)
    if SHAPE.EITHER:  # noqa: SIM102 - only a separate condition is left out at compile time
        if state.planned_elsewhere(speeds, SHAPE):
            return
    threshold, own_mean = thresholds_of(home, domain, domains, parts, problem, SHAPE)
    tried = state.at_domain(tried, domain, problem, SHAPE)
    hosted, loads = tried.attempts, tried.attempt_loads
    state.store_threshold(tried, threshold, threshold > own_mean)
    work += domain * state.work_size(SHAPE.H, SHAPE.G)
    free_all(hosted, problem, SHAPE)
    peak = set_out(state.home_of(home, domain, SHAPE), work, loads, problem, SHAPE)
    rank = tl.arange(0, SHAPE.G)
    if SHAPE.SPEEDS:
        before_G = tl.load(loads + rank, mask=rank < ranks, other=0)
        start_G, limit_of_rank = state.relative_to(before_G, threshold, problem, SHAPE)
        most = state.most_rows(before_G, start_G, limit_of_rank, SHAPE)
        tl.debug_barrier()
        tl.store(loads + rank, start_G, mask=rank < ranks)
        tl.debug_barrier()
    else:
        limit_of_rank = threshold
        most = tl.maximum(peak, threshold)
    num_copies = 0
    if most < (1 << 31) // SHAPE.G - 1:
        num_copies = alias_by_groups(work, hosted, loads, limit_of_rank, problem, SHAPE, tl.int32)
    else:
        num_copies = alias_by_groups(work, hosted, loads, limit_of_rank, problem, SHAPE, tl.int64)
    load_G = tl.load(loads + rank, mask=rank < ranks, other=0)
    if SHAPE.SPEEDS:
        load_G = state.loads_after(before_G, start_G, load_G, SHAPE)
        tl.debug_barrier()
        tl.store(loads + rank, load_G, mask=rank < ranks)
    counts = state.counts_of(counts, domain, 0, SHAPE)
    note(tried, hosted, counts, load_G, num_copies, 0, problem, SHAPE)


@triton.jit
def thresholds_of(home, domain, domains, parts, problem, SHAPE: tl.constexpr):
    """Return the threshold of all domains with the tolerance, and the mean of this domain."""
    if SHAPE.SPEEDS:
        threshold = tl.zeros((), tl.int64)
        for other in range(domains):
            total, speeds = total_of(home, other, SHAPE), tl.load(problem.speeds.sums + other)
            own = state.threshold_of_speeds(total, other, speeds, parts, problem)
            threshold = tl.maximum(threshold, own)
        total = total_of(home, domain, SHAPE)
        mean = state.least_threshold(total, domain, problem.speeds.sum, problem)
    else:
        most = tl.zeros((), tl.int64)
        for other in range(domains):
            most = tl.maximum(most, total_of(home, other, SHAPE))
        threshold = state.threshold_of(most, problem.ranks, parts)
        mean = (total_of(home, domain, SHAPE) + problem.ranks - 1) // problem.ranks
    return threshold, mean


@triton.jit
def set_out(home, work, loads, problem, SHAPE: tl.constexpr):
    """Put all rows at home and free all slots; return the load of the fullest rank."""
    lane = tl.arange(0, GROUP)
    row = tl.arange(0, SHAPE.H)[:, None]
    peak = 0
    for group in range(SHAPE.G // GROUP):
        rank = group * GROUP + lane
        home_HR = tl.load(home + row * SHAPE.G + rank[None, :])
        tl.store(work + row * SHAPE.G + rank[None, :], home_HR)
        tl.store(state.heats_of(work, SHAPE) + rank, tl.max(home_HR, 0))
        free_R = tl.where(rank < problem.ranks, problem.slots, 0)
        tl.store(state.free_of(work, SHAPE) + rank, free_R)
        load_R = tl.sum(tl.maximum(home_HR, 0), 0)
        tl.store(loads + rank, load_R, mask=rank < problem.ranks)
        peak = tl.maximum(peak, tl.max(load_R, 0))
    tl.debug_barrier()
    return peak


@triton.jit
def emptiest(load_R, free_R, rank, threshold, G: tl.constexpr, KEY: tl.constexpr):
    """Return the room of the emptiest rank of a group and that rank, packed."""
    room_R = tl.where(free_R > 0, threshold - load_R, -1)
    return tl.max(room_R.to(KEY) * G + (G - 1 - rank), 0)


@triton.jit
def fullest(load_R, heat_R, rank, need, threshold, G: tl.constexpr, KEY: tl.constexpr):
    """Return the packed load of the fullest rank that can give, and the `wait` heat."""
    over_R = load_R > threshold
    donor_R = tl.where(over_R & (heat_R >= need), load_R, -1)
    wait = tl.max(tl.where(over_R & (heat_R < need), heat_R, -1), 0)
    return tl.max(donor_R.to(KEY) * G + (G - 1 - rank), 0), wait


@triton.jit
def hottest(home_H, H: tl.constexpr, KEY: tl.constexpr):
    """Return the rows of the hottest expert and its index; the first one on a tie."""
    tokens, row = unpack(tl.max(home_H.to(KEY) * H + (H - 1 - tl.arange(0, H)), 0), H)
    return tokens.to(tl.int32), row.to(tl.int32)


@triton.jit
def alias_by_groups(
    work, hosted, loads, threshold, problem, SHAPE: tl.constexpr, KEY: tl.constexpr
):
    """Let the emptiest rank take what it lacks from the fullest; return the number of replicas."""
    group = tl.arange(0, SHAPE.G // GROUP)
    room_Q = rooms(work, loads, threshold, problem, SHAPE, KEY)
    load_Q = tl.zeros((SHAPE.G // GROUP,), KEY) - SHAPE.G
    wait_Q = tl.zeros((SHAPE.G // GROUP,), tl.int32) + MOST  # no group was examined yet
    num_copies = 0
    going = problem.limit > 0
    while going:
        need, host = unpack(tl.max(room_Q, 0), SHAPE.G)
        need = need.to(tl.int32)
        host = host.to(tl.int32)
        load_Q, wait_Q = examine_waiting(
            load_Q, wait_Q, work, loads, need, threshold, problem, SHAPE, KEY
        )
        most, donor = unpack(tl.max(load_Q, 0), SHAPE.G)
        donor = donor.to(tl.int32)
        quota = need
        if most < 0:
            donor, quota = donor_of_all(work, loads, need, threshold, problem, SHAPE, KEY)
        going = quota >= problem.min_tokens
        rank_h = (host // GROUP) * GROUP + tl.arange(0, GROUP)
        rank_d = (donor // GROUP) * GROUP + tl.arange(0, GROUP)
        load_h, load_d, free_h, free_d, heat_d = hand_over(
            work, hosted, loads, host, donor, quota, going, rank_h, rank_d,
            problem, SHAPE, KEY
        )  # fmt: skip
        room_h = emptiest(load_h, free_h, rank_h, threshold, SHAPE.G, KEY)
        room_d = emptiest(load_d, free_d, rank_d, threshold, SHAPE.G, KEY)
        load, heat = fullest(load_d, heat_d, rank_d, need, threshold, SHAPE.G, KEY)
        room_Q = tl.where(group == host // GROUP, room_h, room_Q)
        room_Q = tl.where(group == donor // GROUP, room_d, room_Q)
        load_Q = tl.where(group == donor // GROUP, load, load_Q)
        wait_Q = tl.where(group == donor // GROUP, heat, wait_Q)
        num_copies += going.to(tl.int32)
        going = going & (num_copies < problem.limit)
        tl.debug_barrier()
    return num_copies


@triton.jit
def rooms(work, loads, threshold, problem, SHAPE: tl.constexpr, KEY: tl.constexpr):
    """Return the emptiest rank of every group, before the first step."""
    group = tl.arange(0, SHAPE.G // GROUP)
    room_Q = tl.zeros((SHAPE.G // GROUP,), KEY)
    for q in range(SHAPE.G // GROUP):
        rank = q * GROUP + tl.arange(0, GROUP)
        load_R = tl.load(loads + rank, mask=rank < problem.ranks, other=0)
        free_R = tl.load(state.free_of(work, SHAPE) + rank)
        room_Q = tl.where(
            group == q, emptiest(load_R, free_R, rank, threshold, SHAPE.G, KEY), room_Q
        )
    return room_Q


@triton.jit
def examine_waiting(
    load_Q, wait_Q, work, loads, need, threshold, problem,
    SHAPE: tl.constexpr, KEY: tl.constexpr
):  # fmt: skip
    """Update the fullest ranks of groups whose waiting ranks can give now."""
    group = tl.arange(0, SHAPE.G // GROUP)
    wait = tl.max(wait_Q, 0)
    while wait >= tl.maximum(need, 0):
        q = tl.min(tl.where(wait_Q == wait, group, SHAPE.G), 0)
        rank = q * GROUP + tl.arange(0, GROUP)
        load_R = tl.load(loads + rank, mask=rank < problem.ranks, other=0)
        heat_R = tl.load(state.heats_of(work, SHAPE) + rank)
        load, heat = fullest(load_R, heat_R, rank, need, threshold, SHAPE.G, KEY)
        load_Q = tl.where(group == q, load, load_Q)
        wait_Q = tl.where(group == q, heat, wait_Q)
        wait = tl.max(wait_Q, 0)
    return load_Q, wait_Q


@triton.jit
def hand_over(
    work, hosted, loads, host, donor, quota, going, rank_h, rank_d, problem,
    SHAPE: tl.constexpr, KEY: tl.constexpr
):  # fmt: skip
    """Host a quota of the donor's hottest expert; memory changes only if `going`.

    Returns the new loads and free slots of both groups, and the heats of the donor's group.
    """
    row = tl.arange(0, SHAPE.H)
    heats, free = state.heats_of(work, SHAPE), state.free_of(work, SHAPE)
    home_H = tl.load(work + row * SHAPE.G + donor)
    load_h = tl.load(loads + rank_h, mask=rank_h < problem.ranks, other=0)
    load_d = tl.load(loads + rank_d, mask=rank_d < problem.ranks, other=0)
    free_h = tl.load(free + rank_h)
    free_d = tl.load(free + rank_d)
    heat_d = tl.load(heats + rank_d)
    slot = host
    if not SHAPE.ONE_SLOT:
        slot = host * problem.slots + problem.slots - tl.load(free + host)
    # Everything was read; now memory may change.
    tl.debug_barrier()
    load_h += tl.where(rank_h == host, quota, 0) - tl.where(rank_h == donor, quota, 0)
    load_d += tl.where(rank_d == host, quota, 0) - tl.where(rank_d == donor, quota, 0)
    free_h -= tl.where(rank_h == host, 1, 0)
    free_d -= tl.where(rank_d == host, 1, 0)
    hot = hottest(home_H, SHAPE.H, KEY)[1]
    home_H -= tl.where(row == hot, quota, 0)
    heat_d = tl.where(rank_d == donor, hottest(home_H, SHAPE.H, KEY)[0], heat_d)
    if going:
        tl.store(hosted + slot, hot * SHAPE.G + donor)
        tl.store(state.quotas_of(hosted, problem) + slot, quota)
        tl.store(loads + rank_h, load_h, mask=rank_h < problem.ranks)
        tl.store(loads + rank_d, load_d, mask=rank_d < problem.ranks)
        tl.store(free + rank_h, free_h)
        tl.store(work + row * SHAPE.G + donor, home_H)
        tl.store(heats + rank_d, heat_d)
    return load_h, load_d, free_h, free_d, heat_d


@triton.jit
def donor_of_all(work, loads, need, threshold, problem, SHAPE: tl.constexpr, KEY: tl.constexpr):
    """Return a donor among all ranks and what it gives, if no expert is hot enough."""
    rank = tl.arange(0, SHAPE.G)
    load_G = tl.load(loads + rank, mask=rank < problem.ranks, other=0)
    heat_G = tl.load(state.heats_of(work, SHAPE) + rank)
    return choose_donor(need, load_G, heat_G, threshold, SHAPE.G, KEY == tl.int32)  # noqa: SIM300
