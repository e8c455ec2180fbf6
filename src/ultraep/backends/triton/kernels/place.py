"""Twin of `reference/place.py`: one program per domain, against a shared threshold.

    sum_loads       rows of every expert over all source ranks, by home
    first_try       one attempt per heuristic, side by side
    search          the best attempt; if none meets the threshold, the least threshold that is met
    split           twin of `reference/split.py`: the sources of every replica

With rates, `try_rungs` in `rungs.py` replaces `first_try` and `search`.

Shapes: R ranks, E experts, D domains of `ranks` ranks; H experts and G ranks of a domain and HELD
spare slots, padded to powers of two. Integers have 32 bits, sums over many ranks 64.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels import plan as layout
from ultraep.backends.triton.kernels import state
from ultraep.backends.triton.kernels.attempts import alias_packed_or_not, close_circles, window
from ultraep.backends.triton.kernels.plan import EXPERT, HOST, SLOT, Homes, Plan
from ultraep.backends.triton.kernels.search import note
from ultraep.backends.triton.kernels.state import MOST, Attempts


@triton.jit(do_not_specialize=["ranks", "experts", "stride"])
def sum_loads(
    loads,
    place_of_expert,
    expert_loads,
    home,
    faults,
    ranks,
    experts,
    stride,
    BR: tl.constexpr,
    BE: tl.constexpr,
):
    """[E] rows of every expert, and [D, H, G] the same by home; -1: padding.

    `faults` counts loads that are negative or too large, and sums that are too large.

    >>> example(sum_loads, 1, loads=[[2, 1, 0, 1], [4, 0, 1, 0]], place_of_expert=[0, 2, 1, 3],
    ...         expert_loads=empty(4), home=empty(1, 2, 2), BR=2, BE=4)
    expert_loads = [6, 1, 1, 1]
    home = [[[6, 1], [1, 1]]]
    """
    expert = tl.program_id(0) * BE + tl.arange(0, BE)
    known = expert < experts
    place_E = tl.load(place_of_expert + expert, mask=known, other=0)
    total_E = tl.zeros((BE,), tl.int64)
    bad_E = tl.zeros((BE,), tl.int32)
    for begin in range(0, ranks, BR):
        rank = begin + tl.arange(0, BR)
        at = layout.load_at(loads, rank[:, None], expert[None, :], stride)
        mask = (rank < ranks)[:, None] & known[None, :]
        tokens = tl.load(at, mask=mask, other=0).to(tl.int64)
        bad_E += tl.sum(((tokens < 0) | (tokens > MOST)).to(tl.int32), 0)
        total_E += tl.sum(tokens, 0)
    bad = tl.sum(bad_E + (total_E > MOST).to(tl.int32), 0)
    tl.atomic_add(faults, bad, mask=bad > 0, sem="relaxed")
    total_E = tl.minimum(tl.maximum(total_E, 0), MOST).to(tl.int32)
    tl.store(expert_loads + expert, total_E, mask=known)
    tl.store(home + place_E, total_E, mask=known)


# The first load of a tile determines its layout. A wide load spreads the experts of a rank over
# several threads; without a known alignment of `home`, they stay in one thread.
@triton.jit(
    do_not_specialize=["domains", "ranks", "slots", "min_tokens", "limit", "parts"],
    do_not_specialize_on_alignment=["home"],
)
def first_try(
    home,
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
    BY_GROUPS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program (d, m): the attempt of heuristic m at domain d.

    BY_GROUPS: `first_by_groups` has made the attempt of the first heuristic.

    A tolerance of 40 % allows 6 rows. One heuristic fills rank 1, the other moves the surplus only:

    >>> example(first_try, (1, 2), home=[[[6, 1], [1, 1]]], attempts=empty(1, 2, 2, 2),
    ...         attempt_loads=empty(1, 2, 2), facts=empty(1, 10), parts=400000, STEP=1,
    ...         SHAPE=shape(BUFFERS=2, MEMBERS=2))
    attempts = [[[[-1, 0], [_, 4]], [[-1, 0], [_, 1]]]]
    attempt_loads = [[[3, 6], [6, 3]]]
    facts = [[6, 1, 6, 1, 1, 1, 6, 1, 1, 1]]
    """
    domain = tl.program_id(0)
    member = tl.program_id(1) + BY_GROUPS
    rank = tl.arange(0, SHAPE.G)
    problem = state.problem_of(domain, ranks, slots, min_tokens, limit, speeds, SHAPE)
    home_HG = state.load_domain(home, domain, SHAPE)
    if SHAPE.EITHER:  # noqa: SIM102 - only a separate condition is left out at compile time
        if state.planned_elsewhere(speeds, SHAPE):
            return
    load_G = state.rank_loads_of(home_HG)
    threshold = state.shared_threshold(load_G, home, domain, domains, parts, problem, SHAPE, STEP)
    slack = threshold > state.mean_of(load_G, domain, problem, SHAPE)
    start_G, most_of_rank = state.relative_to(load_G, threshold, problem, SHAPE)
    end_G = start_G
    tried = state.at_domain(tried, domain, problem, SHAPE)
    hosted = state.attempt_of(tried.attempts, member, problem)
    num_copies = 0
    if member == 0 and not BY_GROUPS:
        state.store_threshold(tried, threshold, slack)
        most = state.most_rows(load_G, start_G, most_of_rank, SHAPE)
        end_G, _home_HG, num_copies, _received = alias_packed_or_not(
            start_G, home_HG, hosted, most_of_rank, most, tl.zeros((), tl.int64), slots, problem,
            SHAPE, False
        )  # fmt: skip
    elif slack and member == 1:
        end_G, num_copies = window(start_G, home_HG, hosted, most_of_rank, problem, SHAPE)
    elif slack:  # noqa: SIM102 - only a separate condition is left out at compile time
        if SHAPE.MEMBERS > 2:
            end_G, num_copies = close_circles(
                start_G, home_HG, hosted, most_of_rank, member - 2, problem, SHAPE
            )
    load_G = state.loads_after(load_G, start_G, end_G, SHAPE)
    tl.store(tried.attempt_loads + member * ranks + rank, load_G, mask=rank < ranks)
    if slack or member == 0:
        counts = state.counts_of(counts, domain, member, SHAPE)
        note(tried, hosted, counts, load_G, num_copies, member, problem, SHAPE)


@triton.jit(do_not_specialize=["ranks", "stride"])
def split(
    loads,
    expert_loads,
    placed,
    homes: Homes,
    plan: Plan,
    ranks,
    stride,
    SLOTS: tl.constexpr,
    LOCALITY: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
):
    """Program c: the replica in spare slot c, if any; rows behind the last replica are cleared.

    `search` leaves experts and quotas by spare slot, [R, slots]. In that order the replicas of one
    expert are sorted by host, and every program finds the index of its replica among all of them.

    >>> example(split, 2, loads=[[2, 1, 0, 1], [4, 0, 1, 0]], expert_loads=[6, 1, 1, 1],
    ...         placed=[[2147483647, 0], [0, 3]], replicas=empty(2, 3), quotas=empty(2),
    ...         slot_of_copy=empty(2), expert_of_slot=[0, 1, -1, 2, 3, -1], split=empty(2, 2),
    ...         num_replicas=empty(1), SLOTS=1, LOCALITY=True)
    expert_of_slot = [0, 1, -1, 2, 3, 0]
    replicas = [[0, 1, 0], [-1, -1, -1]]
    quotas = [3, 0]
    slot_of_copy = [5, -1]
    split = [[0, 3], [0, 0]]
    num_replicas = [1]
    """
    own = tl.program_id(0)
    copy = tl.arange(0, C)
    rank = tl.arange(0, R)
    mask = copy < ranks * SLOTS
    expert = tl.load(placed + own)
    expert_C = tl.load(placed + copy, mask=mask, other=MOST)
    held = tl.sum((expert_C != MOST).to(tl.int32), 0)
    if own == 0:
        tl.store(plan.num_replicas, held)
    if expert == MOST:
        empty_before = mask & (expert_C == MOST) & (copy < own)
        place = held + tl.sum(empty_before.to(tl.int32), 0)
        write_replica(plan, place, -1, -1, -1, 0, -1)
        row_R = rank * 0
    else:
        host = own // SLOTS
        before_C = (expert_C < expert) | ((expert_C == expert) & (copy < own))
        place = tl.sum(before_C.to(tl.int32), 0)
        index_C = (copy // SLOTS == host) & (expert_C < expert)
        index = tl.sum(index_C.to(tl.int32), 0)
        slot = tl.load(homes.first_slot_of_rank + host + 1) - SLOTS + index
        quota = tl.load(placed + ranks * SLOTS + own)
        write_replica(plan, place, expert, host, index, quota, slot)
        tl.store(homes.expert_of_slot + slot, expert)
        row_R = sources_of_replica(
            loads, expert_loads, homes, placed, expert, host, ranks, stride, SLOTS, LOCALITY, R
        )
    tl.store(layout.split_at(plan.split, place, rank, ranks), row_R, mask=rank < ranks)


@triton.jit
def write_replica(plan, place, expert, host, index, quota, slot):
    """Write one row of the plan."""
    tl.store(layout.replica_at(plan.replicas, place, EXPERT), expert)
    tl.store(layout.replica_at(plan.replicas, place, HOST), host)
    tl.store(layout.replica_at(plan.replicas, place, SLOT), index)
    tl.store(plan.quotas + place, quota)
    tl.store(plan.slot_of_copy + place, slot)


@triton.jit
def sources_of_replica(
    loads, expert_loads, homes, placed, expert, host, ranks, stride,
    SLOTS: tl.constexpr, LOCALITY: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """[R] rows of every source rank that the replica of this expert on this host serves."""
    rank = tl.arange(0, R)
    mask = rank < ranks
    source_R = tl.load(layout.load_at(loads, rank, expert, stride), mask=mask, other=0).to(tl.int32)
    quota_R = rank * 0  # of the replica on every rank
    for index in range(SLOTS):
        slot_R = placed + rank * SLOTS + index
        same_R = tl.load(slot_R, mask=mask, other=MOST) == expert
        quota_R += tl.load(slot_R + ranks * SLOTS, mask=same_R, other=0)
    at_home = tl.load(expert_loads + expert) - tl.sum(quota_R, 0)
    kept_R = rank * 0
    if LOCALITY:
        home = tl.load(homes.home_of_expert + expert)
        at_home_R = tl.where(rank == home, tl.minimum(source_R, at_home), 0)
        kept_R = tl.minimum(source_R, quota_R)
        at_home -= tl.sum(at_home_R, 0)
        source_R -= at_home_R + kept_R
        quota_R -= kept_R
    # Overlap the remaining rows with what is left at home, then with the quotas.
    end_R = tl.cumsum(source_R, 0)
    begin = at_home + tl.sum(tl.where(rank < host, quota_R, 0), 0)
    end = begin + tl.sum(tl.where(rank == host, quota_R, 0), 0)
    overlap_R = tl.minimum(end_R, end) - tl.maximum(end_R - source_R, begin)
    return tl.maximum(overlap_R, 0) + tl.where(rank == host, kept_R, 0)
