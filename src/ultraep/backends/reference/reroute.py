"""Which source ranks each replica serves, and which slot serves each routed row of one rank.

`split`, `stride` and `tally` are plain loops, which the `cpu` backend compiles as they are.

Splitting is exact. Put the rows of an expert on a line, ordered by source rank, and its quotas on
the same line, home first. Where the interval of a source overlaps the interval of a replica, these
rows go there. Both sets of intervals cover the line once, so that sources and quotas are met. With
locality, rows that a host can send to itself are taken off the line first.

Rerouting puts row i of an expert at place `i * stride mod n` on the line of its n rows; home and
replicas divide that line by their counts. The stride is about the golden section of n and coprime
to it, so that neighbouring tokens spread over all replicas and every count is met. If no row leaves
for a replica, row i has place i. Rows are sent by slot, then by place: the position of a row
follows from its own i alone.

Shapes: N routed rows, M of them without padding, R ranks, E experts, C replicas, S slots of all
ranks.
"""

from __future__ import annotations

import math

import numpy as np

from ultraep.arrays import PADDING, IntArray


def count(ids_N: IntArray, experts: int) -> tuple[IntArray, int]:
    """[E] rows of every expert, and the number of ids out of range. Padding counts as neither.

    >>> count(np.array([0, 2, 2, 7, PADDING]), 3)
    (array([1, 0, 2]), 1)
    """
    counts, unknown = np.zeros(experts, np.int64), 0
    for expert in ids_N:
        if 0 <= expert < experts:
            counts[expert] += 1
        elif expert != PADDING:
            unknown += 1
    return counts, unknown


def reroute(
    ids_N: IntArray,
    loads_E: IntArray,
    home_slot_of_expert: IntArray,
    expert_of_replica: IntArray,
    slot_of_replica: IntArray,
    rows_of_replica: IntArray,
    num_slots: int,
) -> tuple[IntArray, IntArray] | None:
    """[M] the rows in sending order, and [S] the rows of every slot.

    loads_E: rows of every expert in the plan; returns None if the ids differ.
    expert_of_replica: ascending.
    rows_of_replica: rows that this source rank sends to each replica.

    Four rows for expert 1, at places 0, 3, 2, 1, and padding; the last place belongs to the replica
    in slot 0:

    >>> reroute(*map(np.array, ([1, 1, -1, 1, 1], [0, 4], [2, 1], [1], [0], [1])), 3)
    (array([1, 0, 4, 3]), array([1, 3, 0]))
    """
    counts, unknown = count(ids_N, len(loads_E))
    if unknown or not np.array_equal(counts, loads_E):
        return None
    rows_of_slot = np.zeros(num_slots, np.int64)
    for expert in range(len(counts)):
        rows_of_slot[home_slot_of_expert[expert]] = counts[expert]
    for replica in range(len(expert_of_replica)):
        rows_of_slot[slot_of_replica[replica]] = rows_of_replica[replica]
        rows_of_slot[home_slot_of_expert[expert_of_replica[replica]]] -= rows_of_replica[replica]
    first_of_slot = np.cumsum(rows_of_slot) - rows_of_slot
    by_expert, first = sort_by_expert(ids_N, counts)
    order_M = np.empty(len(by_expert), np.int64)
    replica = 0
    for expert in range(len(counts)):
        rows = by_expert[first[expert] : first[expert + 1]]
        home, begin = home_slot_of_expert[expert], replica
        while replica < len(expert_of_replica) and expert_of_replica[replica] == expert:
            replica += 1
        if rows_of_slot[home] == len(rows):
            for index in range(len(rows)):
                order_M[first_of_slot[home] + index] = rows[index]
        else:
            deal_out(
                rows, home, slot_of_replica[begin:replica], rows_of_slot, first_of_slot, order_M
            )
    return order_M, rows_of_slot


def sort_by_expert(ids_N: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """[M] rows by expert, then by token, and [E + 1] where each expert begins."""
    first = np.zeros(len(counts) + 1, np.int64)
    for expert in range(len(counts)):
        first[expert + 1] = first[expert] + counts[expert]
    next_row, rows_M = first.copy(), np.empty(first[-1], np.int64)
    for row in range(len(ids_N)):
        expert = ids_N[row]
        if expert != PADDING:
            rows_M[next_row[expert]] = row
            next_row[expert] += 1
    return rows_M, first


def deal_out(
    rows: IntArray,
    home: int,
    replicas: IntArray,
    rows_of_slot: IntArray,
    first_of_slot: IntArray,
    order_M: IntArray,
) -> None:
    """Write the rows of one expert to its home and replicas in `order_M`, by their places."""
    place, step = 0, stride(len(rows))
    for row in rows:
        slot, rest, replica = home, place, 0
        while rest >= rows_of_slot[slot]:
            rest -= rows_of_slot[slot]
            slot = replicas[replica]
            replica += 1
        order_M[first_of_slot[slot] + rest] = row
        place = (place + step) % len(rows)


def stride(length: int) -> int:
    """Return the first number from the golden section of `length` on that is coprime to it."""
    step = max(1, length * 618 // 1000)
    while math.gcd(step, length) != 1:
        step += 1
    return step


def split(
    loads_RE: IntArray, home_of_expert: IntArray, placed_C3: IntArray, locality: bool
) -> IntArray:
    """[C, R] rows of every source rank served by each replica (expert, host, quota).

    Two source ranks with 3 rows each for expert 0, at home on rank 0; rank 1 serves 2 of them:

    >>> replicas = np.array([[0, 1, 2]])
    >>> split(np.array([[3], [3]]), np.array([0]), replicas, locality=True)
    array([[0, 2]])
    """
    ranks, replicas = len(loads_RE), len(placed_C3)
    split_CR = np.zeros((replicas, ranks), dtype=np.int64)
    left_R = np.empty(ranks, dtype=np.int64)
    begin = 0
    while begin < replicas:
        expert, end, at_home = placed_C3[begin, 0], begin, 0
        for source in range(ranks):
            left_R[source] = loads_RE[source, expert]
            at_home += left_R[source]
        while end < replicas and placed_C3[end, 0] == expert:
            at_home -= placed_C3[end, 2]
            end += 1
        if locality:
            home = home_of_expert[expert]
            local = min(left_R[home], at_home)
            left_R[home] -= local
            at_home -= local
            for replica in range(begin, end):
                host = placed_C3[replica, 1]
                split_CR[replica, host] = min(left_R[host], placed_C3[replica, 2])
                left_R[host] -= split_CR[replica, host]
        # Walk along the line, behind the rows that stay at home.
        source, source_end, position = 0, left_R[0], at_home
        for replica in range(begin, end):
            host, quota = placed_C3[replica, 1], placed_C3[replica, 2]
            replica_end = position + quota - split_CR[replica, host]
            while position < replica_end:
                while source_end <= position:
                    source += 1
                    source_end += left_R[source]
                rows = min(source_end, replica_end) - position
                split_CR[replica, source] += rows
                position += rows
        begin = end
    return split_CR


def tally(
    expert_loads: IntArray, home_of_expert: IntArray, placed_C3: IntArray, ranks: int
) -> tuple[IntArray, IntArray]:
    """[R] rows served by every rank, and [C] the spare slot of every replica (expert, host, quota).

    The replicas of one host are numbered in their order.

    >>> tally(np.array([6, 1]), np.array([0, 1]), np.array([[0, 1, 2]]), 2)
    (array([4, 3]), array([0]))
    """
    rank_loads, used = np.zeros(ranks, dtype=np.int64), np.zeros(ranks, dtype=np.int64)
    for expert in range(len(expert_loads)):
        rank_loads[home_of_expert[expert]] += expert_loads[expert]
    slots = np.empty(len(placed_C3), dtype=np.int64)
    for replica in range(len(placed_C3)):
        home, host = home_of_expert[placed_C3[replica, 0]], placed_C3[replica, 1]
        rank_loads[home] -= placed_C3[replica, 2]
        rank_loads[host] += placed_C3[replica, 2]
        slots[replica] = used[host]
        used[host] += 1
    return rank_loads, slots
