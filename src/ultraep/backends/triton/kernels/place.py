"""Twin of `reference/place.py`: a domain is solved by one program, against a shared threshold.

    sum_loads    tokens of every expert over all source ranks, laid out by homes
    first_try    all members, side by side
    search       the best of them; if none meets the threshold, the least one that can be met
    split        twin of `reference/split.py`: the sources of every copy

Where time decides, `try_rungs` in `rungs.py` takes the place of `first_try` and `search`.

Shapes: R ranks, E experts, D domains of `ranks` ranks, H experts and G ranks padded to powers of
two, HELD spare slots of a domain, padded likewise. Numbers are 32-bit, but for sums of many.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.attempts import alias_packed_or_not, close_circles, window
from ultraep.backends.triton.kernels.plan import (
    EXPERT,
    HOST,
    SLOT,
    load_at,
    replica_at,
    split_at,
)
from ultraep.backends.triton.kernels.search import (
    PlanOut,
    best_of_members,
    bound,
    least_that_is_met,
    note,
    publish,
)
from ultraep.backends.triton.kernels.state import (
    MOST,
    PEAK,
    SLACK,
    THRESHOLD,
    Problem,
    attempt_of,
    attempts_of,
    counts_of,
    fact_of,
    found_quotas_of,
    home_of,
    load_domain,
    loads_of,
    mean_of,
    measure_of,
    rank_loads_of,
    scratch_of,
    shape_of,
    shared_threshold,
)


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
    """[E] tokens of every expert, and [D, H, G] the same by homes; -1 where there is no expert.

    Counts loads that are negative, too many, or add up to too many.

    >>> example(sum_loads, 1, loads=[[2, 1, 0, 1], [4, 0, 1, 0]], place_of_expert=[0, 2, 1, 3],
    ...         expert_loads=room(4), home=room(1, 2, 2), BR=2, BE=4)
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
        at = load_at(loads, rank[:, None], expert[None, :], stride)
        mask = (rank < ranks)[:, None] & known[None, :]
        tokens = tl.load(at, mask=mask, other=0).to(tl.int64)
        bad_E += tl.sum(((tokens < 0) | (tokens > MOST)).to(tl.int32), 0)
        total_E += tl.sum(tokens, 0)
    bad = tl.sum(bad_E + (total_E > MOST).to(tl.int32), 0)
    tl.atomic_add(faults, bad, mask=bad > 0, sem="relaxed")
    total_E = tl.minimum(tl.maximum(total_E, 0), MOST).to(tl.int32)
    tl.store(expert_loads + expert, total_E, mask=known)
    tl.store(home + place_E, total_E, mask=known)


# The layout of a tile follows its first load. Where that may be wide, the experts of a rank end up
# in several threads; where the address is not known to be aligned, they stay in one.
@triton.jit(
    do_not_specialize=["domains", "ranks", "slots", "min_tokens", "limit", "parts"],
    do_not_specialize_on_alignment=["home"],
)
def first_try(
    home,
    counts,
    attempts,
    attempt_loads,
    facts,
    domains,
    ranks,
    slots,
    min_tokens,
    limit,
    parts,
    H: tl.constexpr,
    G: tl.constexpr,
    HELD: tl.constexpr,
    ONE_SLOT: tl.constexpr,
    BUFFERS: tl.constexpr,
    MEMBERS: tl.constexpr,
    BY_GROUPS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program (d, m): the attempt of member m at domain d.

    With `BY_GROUPS`, the first member has made its attempt already.

    A tolerance of 40 % allows 6 tokens. One member fills rank 1 up, the other takes what is above:

    >>> example(first_try, (1, 2), home=[[[6, 1], [1, 1]]], attempts=room(1, 2, 2, 2),
    ...         attempt_loads=room(1, 2, 2), facts=room(1, 10), parts=400000, BUFFERS=2, MEMBERS=2,
    ...         STEP=1)
    attempts = [[[[-1, 0], [_, 4]], [[-1, 0], [_, 1]]]]
    attempt_loads = [[[3, 6], [6, 3]]]
    facts = [[6, 1, 6, 1, 1, 1, 6, 1, 1, 1]]
    """
    domain = tl.program_id(0)
    member = tl.program_id(1) + BY_GROUPS
    rank = tl.arange(0, G)
    problem = Problem(ranks, slots, min_tokens, limit)
    SHAPE: tl.constexpr = shape_of(H, G, HELD, ONE_SLOT, BUFFERS)
    home_HG = load_domain(home, domain, SHAPE)
    load_G = rank_loads_of(home_HG)
    threshold = shared_threshold(load_G, home, domains, parts, problem, SHAPE, STEP)
    slack = threshold > mean_of(load_G, ranks)
    attempts = attempts_of(attempts, domain, problem, SHAPE)
    hosted = attempt_of(attempts, member, problem)
    made = 0
    if member == 0 and not BY_GROUPS:
        tl.store(fact_of(facts, domain, THRESHOLD, MEMBERS), threshold)
        tl.store(fact_of(facts, domain, SLACK, MEMBERS), slack.to(tl.int32))
        load_G, _home_HG, made, _received = alias_packed_or_not(
            load_G, home_HG, hosted, threshold, tl.zeros((), tl.int64), slots, problem,
            SHAPE, False
        )  # fmt: skip
    elif slack and member == 1:
        load_G, made = window(load_G, home_HG, hosted, threshold, problem, SHAPE)
    elif slack:  # noqa: SIM102 - only what is a condition of its own is left out when compiled
        if MEMBERS > 2:
            load_G, made = close_circles(
                load_G, home_HG, hosted, threshold, member - 2, problem, SHAPE
            )
    served = loads_of(attempt_loads, domain, member, problem, SHAPE)
    tl.store(served + rank, load_G, mask=rank < ranks)
    if slack or member == 0:
        counts = counts_of(counts, domain, member, MEMBERS, SHAPE)
        note(facts, hosted, counts, load_G, made, domain, member, problem, SHAPE, MEMBERS)


@triton.jit(
    do_not_specialize=["ranks", "slots", "min_tokens", "limit"],
    do_not_specialize_on_alignment=["home"],
)
def search(
    home,
    expert_of_place,
    first_slot_of_rank,
    attempts,
    attempt_loads,
    facts,
    scratch,
    found,
    planned_loads,
    expert_of_slot,
    ranks,
    slots,
    min_tokens,
    limit,
    FIRST: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    HELD: tl.constexpr,
    ONE_SLOT: tl.constexpr,
    BUFFERS: tl.constexpr,
    MEMBERS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program d: the best attempt at domain d, or at the least threshold that can be met.

    With `FIRST`, it makes the first attempt itself.

    Rank 1 hosts expert 0 for 3 tokens, as in the plan of `split`:

    >>> example(search, 1, home=[[[6, 1], [1, 1]]], found=room(2, 2), planned_loads=room(2),
    ...         expert_of_slot=[0, 1, 0, 2, 3, 0], FIRST=True)
    found = [[2147483647, 0], [0, 3]]
    planned_loads = [4, 5]
    expert_of_slot = [0, 1, -1, 2, 3, -1]
    """
    domain = tl.program_id(0)
    problem = Problem(ranks, slots, min_tokens, limit)
    SHAPE: tl.constexpr = shape_of(H, G, HELD, ONE_SLOT, BUFFERS)
    attempts = attempts_of(attempts, domain, problem, SHAPE)
    attempt_loads = loads_of(attempt_loads, domain, 0, problem, SHAPE)
    if FIRST:  # there is one domain, and no tolerance
        threshold, peak = try_alone(home, attempts, attempt_loads, domain, problem, SHAPE)
        best = threshold * 0
        alias_peak = peak
    else:
        best, threshold, peak = best_of_members(facts, domain, MEMBERS)
        alias_peak = tl.load(measure_of(facts, domain, 0, PEAK, MEMBERS))
    if peak > threshold:
        best = least_that_is_met(
            home, attempts, attempt_loads, scratch, domain, best, peak, alias_peak, threshold,
            problem, SHAPE, STEP
        )  # fmt: skip
    tl.debug_barrier()
    plan = PlanOut(found, planned_loads, expert_of_slot, expert_of_place, first_slot_of_rank)
    publish(plan, attempts, attempt_loads, domain, best, problem, SHAPE)


@triton.jit
def try_alone(home, hosted, served, domain, problem, SHAPE: tl.constexpr):
    """The first attempt at the mean of the domain; that mean, and the peak that is left."""
    rank = tl.arange(0, SHAPE.G)
    home_HG = load_domain(home, domain, SHAPE)
    load_G = rank_loads_of(home_HG)
    threshold = mean_of(load_G, problem.ranks)
    load_G, _home_HG, _made, _received = alias_packed_or_not(
        load_G, home_HG, hosted, threshold, tl.zeros((), tl.int64), problem.slots, problem,
        SHAPE, False
    )  # fmt: skip
    tl.store(served + rank, load_G, mask=rank < problem.ranks)
    return threshold, tl.max(load_G, 0)


@triton.jit(do_not_specialize=["ranks", "slots", "limit"])
def lower_bounds(
    home,
    scratch,
    bounds,
    ranks,
    slots,
    limit,
    H: tl.constexpr,
    G: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program d: the bound of domain d.

    >>> example(lower_bounds, 1, home=[[[6, 1], [1, 1]]], bounds=room(1))
    bounds = [5]
    """
    domain = tl.program_id(0)
    problem = Problem(ranks, slots, 1, limit)
    SHAPE: tl.constexpr = shape_of(H, G, 0, False, 0)
    load_G = rank_loads_of(load_domain(home, domain, SHAPE))
    scratch = scratch_of(scratch, domain, SHAPE)
    least = bound(load_G, home_of(home, domain, SHAPE), scratch, problem, SHAPE, STEP)
    tl.store(bounds + domain, least)


@triton.jit(do_not_specialize=["ranks", "stride"])
def split(
    loads,
    expert_loads,
    home_of_expert,
    first_slot_of_rank,
    found,
    replicas,
    quotas,
    slot_of_copy,
    expert_of_slot,
    split_CR,
    num_replicas,
    ranks,
    stride,
    SLOTS: tl.constexpr,
    LOCALITY: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
):
    """Program c: the copy held in spare slot c, if any; rows behind the last copy are cleared.

    `search` leaves the copies where they are held: [R, slots] experts and quotas. In this form the
    copies of one expert stand in the order of their hosts, and what a host keeps of its own tokens
    is found without looking elsewhere. Every program finds the place of its copy among all of them.

    >>> example(split, 2, loads=[[2, 1, 0, 1], [4, 0, 1, 0]], expert_loads=[6, 1, 1, 1],
    ...         found=[[2147483647, 0], [0, 3]], replicas=room(2, 3), quotas=room(2),
    ...         slot_of_copy=room(2), expert_of_slot=[0, 1, -1, 2, 3, -1], split_CR=room(2, 2),
    ...         num_replicas=room(1), SLOTS=1, LOCALITY=True)
    replicas = [[0, 1, 0], [-1, -1, -1]]
    quotas = [3, 0]
    slot_of_copy = [5, -1]
    expert_of_slot = [0, 1, -1, 2, 3, 0]
    split_CR = [[0, 3], [0, 0]]
    num_replicas = [1]
    """
    own = tl.program_id(0)
    copy = tl.arange(0, C)
    rank = tl.arange(0, R)
    there = copy < ranks * SLOTS
    expert = tl.load(found + own)
    expert_C = tl.load(found + copy, mask=there, other=MOST)
    held = tl.sum((expert_C != MOST).to(tl.int32), 0)
    if own == 0:
        tl.store(num_replicas, held)
    if expert == MOST:
        empty_before = there & (expert_C == MOST) & (copy < own)
        place = held + tl.sum(empty_before.to(tl.int32), 0)
        write_copy(replicas, quotas, slot_of_copy, place, -1, -1, -1, 0, -1)
        row_R = rank * 0
    else:
        host = own // SLOTS
        before_C = (expert_C < expert) | ((expert_C == expert) & (copy < own))
        place = tl.sum(before_C.to(tl.int32), 0)
        index_C = (copy // SLOTS == host) & (expert_C < expert)
        index = tl.sum(index_C.to(tl.int32), 0)
        slot = tl.load(first_slot_of_rank + host + 1) - SLOTS + index
        quota = tl.load(found_quotas_of(found, ranks * SLOTS) + own)
        write_copy(replicas, quotas, slot_of_copy, place, expert, host, index, quota, slot)
        tl.store(expert_of_slot + slot, expert)
        row_R = sources_of_copy(
            loads, expert_loads, home_of_expert, found, expert, host, ranks, stride,
            SLOTS, LOCALITY, R
        )  # fmt: skip
    tl.store(split_at(split_CR, place, rank, ranks), row_R, mask=rank < ranks)


@triton.jit
def write_copy(replicas, quotas, slot_of_copy, place, expert, host, index, quota, slot):
    """One row of the plan."""
    tl.store(replica_at(replicas, place, EXPERT), expert)
    tl.store(replica_at(replicas, place, HOST), host)
    tl.store(replica_at(replicas, place, SLOT), index)
    tl.store(quotas + place, quota)
    tl.store(slot_of_copy + place, slot)


@triton.jit
def sources_of_copy(
    loads, expert_loads, home_of_expert, found, expert, host, ranks, stride,
    SLOTS: tl.constexpr, LOCALITY: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """[R] tokens of every source rank that the copy of this expert on this host serves."""
    rank = tl.arange(0, R)
    known = rank < ranks
    source_R = tl.load(load_at(loads, rank, expert, stride), mask=known, other=0).to(tl.int32)
    quota_R = rank * 0  # of the copy on every rank
    for index in range(SLOTS):
        at_R = found + rank * SLOTS + index
        same_R = tl.load(at_R, mask=known, other=MOST) == expert
        quota_R += tl.load(found_quotas_of(at_R, ranks * SLOTS), mask=same_R, other=0)
    at_home = tl.load(expert_loads + expert) - tl.sum(quota_R, 0)
    kept_R = rank * 0
    if LOCALITY:
        home = tl.load(home_of_expert + expert)
        at_home_R = tl.where(rank == home, tl.minimum(source_R, at_home), 0)
        kept_R = tl.minimum(source_R, quota_R)
        at_home -= tl.sum(at_home_R, 0)
        source_R -= at_home_R + kept_R
        quota_R -= kept_R
    # The tokens that are left, over what is left at home, then over the quotas.
    end_R = tl.cumsum(source_R, 0)
    begin = at_home + tl.sum(tl.where(rank < host, quota_R, 0), 0)
    end = begin + tl.sum(tl.where(rank == host, quota_R, 0), 0)
    overlap_R = tl.minimum(end_R, end) - tl.maximum(end_R - source_R, begin)
    return tl.maximum(overlap_R, 0) + tl.where(rank == host, kept_R, 0)
