"""Twin of `reference/reroute.py`: the slot of every row, and its position in the sending order.

    lay_lines   where every slot begins on the line of its expert, and in the sending order
    assign      slot and position of every row
    receive     rows that every rank sends to each slot of one rank

Shapes: N rows, E experts, C replicas, S slots of all ranks, R ranks, B rows of a tile.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ultraep.backends.triton.kernels import plan as layout
from ultraep.backends.triton.kernels.count import bin_of, offsets_of
from ultraep.backends.triton.kernels.plan import EXPERT, Homes, Plan


class Lines(NamedTuple):
    """How the rows of one source rank are divided: every expert has a line of its rows."""

    away: Any  # [E] rows that leave the home of their expert
    first_replica: Any  # [E] first replica; valid where rows go away
    end_replica: Any  # [E]
    first_place: Any  # [C] where a replica begins on the line of its expert
    rows_of_slot: Any  # [S]
    first_row: Any  # [S + 1] where a slot begins in the sending order
    send_counts: Any  # [R]


@triton.jit(do_not_specialize=["rank", "ranks", "experts", "num_slots", "stride"])
def lay_lines(
    loads,
    totals,
    plan: Plan,
    homes: Homes,
    lines: Lines,
    faults,
    rank,
    ranks,
    experts,
    num_slots,
    stride,
    E: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    R: tl.constexpr,
):
    """Write the lines of one source rank. One program.

    Rank 1 has four rows for expert 0; three of them go to the replica in slot 5:

    >>> example(lay_lines, 1, loads=[[2, 1, 0, 1], [4, 0, 1, 0]], totals=[4, 0, 1, 0, 0],
    ...         replicas=[[0, 1, 0], [-1, -1, -1]], slot_of_replica=[5, -1], split=[[0, 3], [0, 0]],
    ...         num_replicas=[1], away=empty(4), first_replica=empty(4), end_replica=empty(4),
    ...         first_place=empty(2), rows_of_slot=empty(6), first_row=empty(7),
    ...         send_counts=empty(2), rank=1, E=4, S=8)
    away = [3, 0, 0, 0]
    first_replica = [0, _, _, _]
    end_replica = [1, _, _, _]
    first_place = [1, _]
    rows_of_slot = [1, 0, 0, 1, 0, 3]
    first_row = [0, 1, 1, 1, 2, 2, 5]
    send_counts = [1, 4]
    """
    expert, slot, replica = tl.arange(0, E), tl.arange(0, S), tl.arange(0, C)
    mask_e = expert < experts
    tl.store(lines.away + expert, expert * 0, mask=mask_e)
    tl.store(lines.rows_of_slot + slot, slot * 0, mask=slot < num_slots)
    number = tl.load(plan.num_replicas)
    expert_C, rows_C, end_C, begin_C, all_C, away_E = gather_replicas(
        plan, lines, number, rank, ranks, experts, E, C
    )
    length_E = tl.load(totals + expert, mask=mask_e, other=0)
    count_mismatches(loads, length_E, faults, rank, experts, stride, E)
    home_E = tl.load(homes.home_slot_of_expert + expert, mask=mask_e, other=0)
    tl.store(lines.rows_of_slot + home_E, length_E - away_E, mask=mask_e)
    mask_c = replica < number
    slot_C = tl.load(plan.slot_of_replica + replica, mask=mask_c, other=0)
    tl.store(lines.rows_of_slot + slot_C, rows_C, mask=mask_c)
    length_C = tl.load(totals + expert_C, mask=mask_c, other=0)
    at_home_C = length_C - (all_C - begin_C)
    place_C = at_home_C + end_C - rows_C - begin_C
    tl.store(lines.first_place + replica, place_C, mask=mask_c)
    tl.debug_barrier()
    order_slots(lines, num_slots, S)
    tl.debug_barrier()
    count_sent(homes.first_slot_of_rank, lines, ranks, R)


@triton.jit
def gather_replicas(plan, lines, number, rank, ranks, experts, E: tl.constexpr, C: tl.constexpr):
    """Write the replicas of every expert, and the rows that go away, initially 0.

    Returns [C] experts and rows of the replicas, their running sum, where it begins and ends for
    the replica's expert, and [E] the rows that go away.
    """
    away, first_row = lines.away, lines.first_row
    replica, expert = tl.arange(0, C), tl.arange(0, E)
    mask_c, mask_e = replica < number, expert < experts
    expert_ptr = layout.replica_at(plan.replicas, replica, EXPERT)
    expert_C = tl.load(expert_ptr, mask=mask_c, other=experts)
    before_C = tl.load(expert_ptr - 3, mask=mask_c & (replica > 0), other=-1)
    after_C = tl.load(expert_ptr + 3, mask=replica + 1 < number, other=-1)
    rows_C = tl.load(layout.split_at(plan.split, replica, rank, ranks), mask=mask_c, other=0)
    end_C = tl.cumsum(rows_C, 0)
    begins_C = mask_c & (expert_C != before_C)
    ends_C = mask_c & (expert_C != after_C)
    tl.debug_barrier()
    # `away` first holds where the replicas of an expert end; then their beginning is subtracted.
    tl.store(away + expert_C, end_C, mask=ends_C)
    tl.store(lines.first_replica + expert_C, replica, mask=begins_C)
    tl.store(first_row + expert_C, end_C - rows_C, mask=begins_C)
    tl.store(lines.end_replica + expert_C, replica + 1, mask=ends_C)
    tl.debug_barrier()
    begin_E = tl.load(first_row + expert, mask=mask_e, other=0)
    end_E = tl.load(away + expert, mask=mask_e, other=0)
    begin_C = tl.load(first_row + expert_C, mask=mask_c, other=0)
    all_C = tl.load(away + expert_C, mask=mask_c, other=0)
    tl.debug_barrier()
    away_E = tl.where(end_E > 0, end_E - begin_E, 0)
    tl.store(away + expert, away_E, mask=mask_e)
    return expert_C, rows_C, end_C, begin_C, all_C, away_E


@triton.jit
def count_mismatches(loads, length_E, faults, rank, experts, stride, E: tl.constexpr):
    """Count experts whose number of rows differs from the plan's."""
    expert = tl.arange(0, E)
    planned_E = tl.load(layout.load_at(loads, rank, expert, stride), mask=expert < experts, other=0)
    wrong = tl.sum((length_E != planned_E).to(tl.int32), 0)
    tl.atomic_add(faults, wrong, mask=wrong > 0, sem="relaxed")


@triton.jit
def order_slots(lines, num_slots, S: tl.constexpr):
    """[S + 1] where the rows of every slot begin, and their total."""
    slot = tl.arange(0, S)
    rows_S = tl.load(lines.rows_of_slot + slot, mask=slot < num_slots, other=0)
    end_S = tl.cumsum(rows_S, 0)
    tl.store(lines.first_row + slot, end_S - rows_S, mask=slot < num_slots)
    tl.store(lines.first_row + num_slots, tl.sum(rows_S, 0))


@triton.jit
def count_sent(first_slot_of_rank, lines, ranks, R: tl.constexpr):
    """[R] rows that go to the slots of every rank."""
    to = tl.arange(0, R)
    begin_R = tl.load(first_slot_of_rank + to, mask=to < ranks, other=0)
    end_R = tl.load(first_slot_of_rank + to + 1, mask=to < ranks, other=0)
    sent_R = tl.load(lines.first_row + end_R, mask=to < ranks, other=0)
    sent_R -= tl.load(lines.first_row + begin_R, mask=to < ranks, other=0)
    tl.store(lines.send_counts + to, sent_R, mask=to < ranks)


@triton.jit
def place_on_line(number, length, gone, strides, known, PRODUCT: tl.constexpr):
    """Return the place of row i of n: i * stride mod n, or i if no row goes away.

    PRODUCT: a dtype that holds n * n; a 64-bit division takes many times longer than a 32-bit one.
    """
    step = tl.load(strides + length, mask=known & (gone > 0), other=1).to(PRODUCT)
    spread = number.to(PRODUCT) * step % tl.maximum(length, 1).to(PRODUCT)
    return tl.where(gone > 0, spread.to(tl.int32), number)


@triton.jit(do_not_specialize=["rows", "experts", "num_slots", "halvings"])
def assign(
    ids,
    offsets,
    totals,
    strides,
    plan: Plan,
    homes: Homes,
    lines: Lines,
    slots,
    order,
    positions,
    rows,
    experts,
    num_slots,
    halvings,
    PRODUCT: tl.constexpr,
    B: tl.constexpr,
):
    """Program t: the rows of tile t, sorted by expert. `slots` may be the tensor `ids`.

    slots: [N] slot of every row.   positions: [N] position of every row in the sending order.
    order: [N] rows in that order; rows without an expert have no slot, and come last, as -1.

    >>> example(assign, 1, ids=[0, 2, 0, 0, 0], offsets=[[0, 0, 0, 0, 0]], totals=[4, 0, 1, 0, 0],
    ...         away=[3, 0, 0, 0], first_replica=[0, 0, 0, 0], end_replica=[1, 0, 0, 0],
    ...         first_place=[1, 0], slot_of_replica=[5, -1], first_row=[0, 1, 1, 1, 2, 2, 5],
    ...         slots=empty(5), order=empty(5), positions=empty(5), rows=5, halvings=1,
    ...         PRODUCT=tl.uint32, B=8)
    slots = [0, 3, 5, 5, 5]
    order = [0, 1, 4, 3, 2]
    positions = [0, 1, 4, 3, 2]
    """
    bin_B, row, number = sort_by_expert(ids, offsets, rows, experts, B)
    there = bin_B <= experts
    known = bin_B < experts
    length = tl.load(totals + bin_B, mask=known, other=0)
    gone = tl.load(lines.away + bin_B, mask=known, other=0)
    place = place_on_line(number, length, gone, strides, known, PRODUCT)
    replicated = known & (place >= length - gone)
    replica = replica_on_line(bin_B, place, replicated, lines, halvings)
    slot = tl.load(homes.home_slot_of_expert + bin_B, mask=known, other=num_slots)
    slot = tl.where(
        replicated, tl.load(plan.slot_of_replica + replica, mask=replicated, other=0), slot
    )
    begin_place = tl.load(lines.first_place + replica, mask=replicated, other=0)
    # The slot is -1 if these are not the ids that were counted.
    first_row = tl.load(lines.first_row + slot, mask=there & (slot >= 0), other=-1)
    position = first_row + place - begin_place
    safe = there & (position >= 0) & (position < rows)
    tl.store(slots + row, tl.where(known, slot, -1), mask=there)
    tl.store(positions + row, tl.where(known, position, -1), mask=there)
    tl.store(order + position, tl.where(known, row, -1), mask=safe)


@triton.jit
def sort_by_expert(ids, offsets, rows, experts, B: tl.constexpr):
    """Return expert, row and number within the expert of the rows of this tile, sorted by expert.

    Rows without an expert get the number `experts`, rows behind the end a larger one.
    """
    tile = tl.program_id(0)
    within = tl.arange(0, B)
    there = tile * B + within < rows
    ids_B = tl.load(ids + tile * B + within, mask=there, other=-1)
    bin_B, _unknown_B = bin_of(ids_B, there, experts)
    key_B = tl.sort(tl.where(there, bin_B, experts + 1) * B + within, 0)
    bin_B = key_B // B
    before_B = tl.gather(bin_B, tl.maximum(within - 1, 0), 0)
    begins_B = (bin_B != before_B) | (within == 0)
    first_B = tl.associative_scan(tl.where(begins_B, within, 0), 0, later)
    at = offsets_of(offsets, tile, experts) + bin_B
    number_B = tl.load(at, mask=bin_B <= experts, other=0) + within - first_B
    return bin_B, tile * B + key_B % B, number_B


@triton.jit
def replica_on_line(expert, place, replicated, lines, halvings):
    """Find the replica whose part of the line holds the place, by bisection."""
    low = tl.load(lines.first_replica + expert, mask=replicated, other=0)
    high = tl.load(lines.end_replica + expert, mask=replicated, other=1)
    for _ in range(halvings):
        middle = (low + high) // 2
        right = tl.load(lines.first_place + middle, mask=replicated, other=0) <= place
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    return low


@triton.jit
def later(left, right):
    return tl.maximum(left, right)


@triton.jit(do_not_specialize=["rank", "ranks", "num_local", "max_replicas", "stride"])
def receive(
    loads,
    plan: Plan,
    homes: Homes,
    received,
    rank,
    ranks,
    num_local,
    max_replicas,
    stride,
    C: tl.constexpr,
    R: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program l: [R] rows that every rank sends to slot l of this rank.

    >>> example(receive, 3, loads=[[2, 1, 0, 1], [4, 0, 1, 0]], replicas=[[0, 1, 0], [-1, -1, -1]],
    ...         slot_of_replica=[5, -1], split=[[0, 3], [0, 0]], expert_of_slot=[0, 1, -1, 2, 3, 0],
    ...         received=empty(2, 3), rank=1, num_local=3, max_replicas=2, STEP=2)
    received = [[0, 1, 0], [1, 0, 3]]
    """
    local = tl.program_id(0)
    slot = tl.load(homes.first_slot_of_rank + rank) + local
    expert = tl.load(homes.expert_of_slot + slot)
    source = tl.arange(0, R)
    replica = tl.arange(0, C)
    mask_c, mask_r = replica < max_replicas, source < ranks
    rows_R = source * 0
    if expert >= 0:
        if tl.load(homes.home_of_expert + expert) == rank:
            column = layout.load_at(loads, source, expert, stride)
            rows_R = tl.load(column, mask=mask_r, other=0).to(tl.int32)
            expert_ptr = layout.replica_at(plan.replicas, replica, EXPERT)
            expert_C = tl.load(expert_ptr, mask=mask_c, other=-1)
            same_C = (expert_C == expert).to(tl.int32)
            first = tl.min(tl.where(same_C != 0, replica, C), 0)
            for begin in range(first, first + tl.sum(same_C, 0), STEP):
                other = begin + tl.arange(0, STEP)
                listed = other < first + tl.sum(same_C, 0)
                rows = layout.split_at(plan.split, other[:, None], source[None, :], ranks)
                gone = tl.load(rows, mask=listed[:, None] & mask_r[None, :], other=0)
                rows_R -= tl.sum(gone, 0)
        else:
            slot_C = tl.load(plan.slot_of_replica + replica, mask=mask_c, other=-1)
            own = tl.sum(tl.where(slot_C == slot, replica, 0), 0)
            row = layout.split_at(plan.split, own, source, ranks)
            rows_R = tl.load(row, mask=mask_r, other=0)
    tl.store(layout.received_at(received, source, local, num_local), rows_R, mask=mask_r)
