"""Twin of `reference/reroute.py`: compiles its loops, and sorts rows by counting.

Loops replace slice assignments, which numba takes seconds to compile.
"""

import numpy as np
from numba import njit

from ultraep.arrays import PADDING
from ultraep.backends.reference.reroute import split, stride, tally

split, stride, tally = (njit(cache=True)(function) for function in (split, stride, tally))


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
