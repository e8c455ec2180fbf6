"""Twin of `reference/split.py`: one program for every copy.

`search` leaves the copies where they are held: [R, slots] experts and quotas. In this form the
copies of one expert stand in the order of their hosts, and what a host keeps of its own tokens is
found without looking elsewhere. Every program finds the place of its copy among all of them.

Shapes: R ranks, E experts, C = R * slots copies at most; both padded to powers of two.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.plan import (
    EXPERT,
    HOST,
    SLOT,
    load_at,
    replica_at,
    split_at,
)
from ultraep.backends.triton.kernels.state import MOST, found_quotas_of


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
