"""Twin of `reference/reroute.py`: walks both sets of intervals side by side, and sorts by counting.

Loops replace slice assignments, which numba takes seconds to compile.
"""

import math

import numpy as np
from numba import njit

from ultraep.arrays import PADDING


@njit(cache=True)
def count(ids_N, experts):
    """[E] rows of every expert, and the number of ids out of range. Padding counts as neither."""
    counts = np.zeros(experts, np.int64)
    unknown = 0
    for expert in ids_N:
        if 0 <= expert < experts:
            counts[expert] += 1
        elif expert != PADDING:
            unknown += 1
    return counts, unknown


@njit(cache=True)
def stride(length):
    step = max(1, length * 618 // 1000)
    while math.gcd(step, length) != 1:
        step += 1
    return step


@njit(cache=True)
def reroute(
    ids_N, loads_E, home_slot_of_expert, expert_of_copy, slot_of_copy, rows_of_copy, num_slots
):
    """[M] the rows in sending order, and [S] the rows of every slot."""
    length, unknown = count(ids_N, len(home_slot_of_expert))
    if unknown or not np.array_equal(length, loads_E):
        return None
    rows_of_slot = np.zeros(num_slots, np.int64)
    for expert in range(len(length)):
        rows_of_slot[home_slot_of_expert[expert]] = length[expert]
    for copy in range(len(expert_of_copy)):
        rows_of_slot[slot_of_copy[copy]] = rows_of_copy[copy]
        rows_of_slot[home_slot_of_expert[expert_of_copy[copy]]] -= rows_of_copy[copy]
    first_of_slot = np.cumsum(rows_of_slot) - rows_of_slot
    by_expert, first = sort_by_expert(ids_N, length)
    order_M = np.empty(len(by_expert), np.int64)
    copy = 0
    for expert in range(len(length)):
        rows = by_expert[first[expert] : first[expert + 1]]
        home, begin = home_slot_of_expert[expert], copy
        while copy < len(expert_of_copy) and expert_of_copy[copy] == expert:
            copy += 1
        if rows_of_slot[home] == len(rows):
            own = order_M[first_of_slot[home] :]
            for index in range(len(rows)):
                own[index] = rows[index]
        else:
            deal_out(rows, home, slot_of_copy[begin:copy], rows_of_slot, first_of_slot, order_M)
    return order_M, rows_of_slot


@njit(cache=True)
def sort_by_expert(ids_N, length):
    """[M] rows by expert, then by token, and [E + 1] where each expert begins."""
    first = np.zeros(len(length) + 1, np.int64)
    for expert in range(len(length)):
        first[expert + 1] = first[expert] + length[expert]
    next_row = first[:-1].copy()
    rows_M = np.empty(first[-1], np.int64)
    for row in range(len(ids_N)):
        expert = ids_N[row]
        if expert != PADDING:
            rows_M[next_row[expert]] = row
            next_row[expert] += 1
    return rows_M, first


@njit(cache=True)
def deal_out(rows, home, copies, rows_of_slot, first_of_slot, order_M):
    """Distribute the rows of one expert to its home and replicas, by their places."""
    place, step = 0, stride(len(rows))
    for row in rows:
        slot, rest, copy = home, place, 0
        while rest >= rows_of_slot[slot]:
            rest -= rows_of_slot[slot]
            slot = copies[copy]
            copy += 1
        order_M[first_of_slot[slot] + rest] = row
        place += step
        if place >= len(rows):
            place -= len(rows)


@njit(cache=True)
def split(loads_RE, home_of_expert, placed_C3, locality):
    """[C, R] rows of every source rank served by each replica (expert, host, quota)."""
    ranks, num_copies = len(loads_RE), len(placed_C3)
    split_CR = np.zeros((num_copies, ranks), np.int64)
    sources = np.empty(ranks, np.int64)
    begin = 0
    while begin < num_copies:
        expert = placed_C3[begin, 0]
        end = begin
        at_home = 0
        while end < num_copies and placed_C3[end, 0] == expert:
            at_home -= placed_C3[end, 2]
            end += 1
        for source in range(ranks):
            sources[source] = loads_RE[source, expert]
            at_home += sources[source]
        if locality:
            home = home_of_expert[expert]
            kept = min(sources[home], at_home)
            sources[home] -= kept
            at_home -= kept
            for copy in range(begin, end):
                host = placed_C3[copy, 1]
                kept = min(sources[host], placed_C3[copy, 2])
                sources[host] -= kept
                split_CR[copy, host] = kept
        overlap(split_CR, sources, placed_C3, begin, end, at_home)
        begin = end
    return split_CR


@njit(cache=True)
def overlap(split_CR, sources, placed_C3, begin, end, at_home):
    """Overlap the remaining sources with what is left at home, then with each quota."""
    source = 0
    while source < len(sources) and sources[source] <= at_home:
        at_home -= sources[source]
        source += 1
    if source == len(sources):
        return
    left = sources[source] - at_home
    for copy in range(begin, end):
        open_quota = placed_C3[copy, 2] - split_CR[copy, placed_C3[copy, 1]]
        while open_quota > 0:
            tokens = min(left, open_quota)
            split_CR[copy, source] += tokens
            open_quota -= tokens
            left -= tokens
            while left == 0:
                source += 1
                if source == len(sources):
                    return
                left = sources[source]


@njit(cache=True)
def tally(expert_loads, home_of_expert, placed_C3, ranks):
    """[R] rows served by every rank, and [C] the spare slot of every replica."""
    rank_loads = np.zeros(ranks, np.int64)
    for expert in range(len(expert_loads)):
        rank_loads[home_of_expert[expert]] += expert_loads[expert]
    used = np.zeros(ranks, np.int64)
    slots = np.empty(len(placed_C3), np.int64)
    for copy in range(len(placed_C3)):
        expert, host, quota = placed_C3[copy, 0], placed_C3[copy, 1], placed_C3[copy, 2]
        rank_loads[home_of_expert[expert]] -= quota
        rank_loads[host] += quota
        slots[copy] = used[host]
        used[host] += 1
    return rank_loads, slots
