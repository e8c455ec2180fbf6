"""What comes before and after the placement of replicas in `search.py` or `by_time.py`.

    sum_loads       rows of every expert over all source ranks, by home
    split           twin of `reference/split.py`: the sources of every replica

Shapes: R ranks, E experts, D domains of `ranks` ranks; H experts and G ranks of a domain, padded to
powers of two. Integers have 32 bits, sums over many ranks 64.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels import plan as layout
from ultraep.backends.triton.kernels.plan import EXPERT, HOST, SLOT, Homes, Plan
from ultraep.backends.triton.kernels.state import MOST


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
    ...         slot_of_replica=empty(2), expert_of_slot=[0, 1, -1, 2, 3, -1], split=empty(2, 2),
    ...         num_replicas=empty(1), SLOTS=1, LOCALITY=True)
    expert_of_slot = [0, 1, -1, 2, 3, 0]
    replicas = [[0, 1, 0], [-1, -1, -1]]
    quotas = [3, 0]
    slot_of_replica = [5, -1]
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
    tl.store(plan.slot_of_replica + place, slot)


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
