"""Twin of `reference/reroute.py`: two passes over the rows, and no sorting."""

import math

import numpy as np
from numba import njit

from ultraep.backends.cpu.count import count


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
    """[N] the rows in the order of their slots, and [S] the rows of every slot."""
    experts, copies = len(home_slot_of_expert), len(expert_of_copy)
    length, unknown = count(ids_N, experts)
    if unknown or not np.array_equal(length, loads_E):
        return None
    first_copy = np.zeros(experts + 1, np.int64)
    rows_of_slot = np.zeros(num_slots, np.int64)
    at_home = length.copy()
    for copy in range(copies):
        first_copy[expert_of_copy[copy] + 1] += 1
        at_home[expert_of_copy[copy]] -= rows_of_copy[copy]
        rows_of_slot[slot_of_copy[copy]] = rows_of_copy[copy]
    first_copy = np.cumsum(first_copy)
    step = np.ones(experts, np.int64)
    for expert in range(experts):
        rows_of_slot[home_slot_of_expert[expert]] = at_home[expert]
        if first_copy[expert] < first_copy[expert + 1]:
            step[expert] = stride(length[expert])
    next_row = np.cumsum(rows_of_slot) - rows_of_slot
    next_place = np.zeros(experts, np.int64)
    order_N = np.empty(len(ids_N), np.int64)
    for row in range(len(ids_N)):
        expert = ids_N[row]
        slot, copy = home_slot_of_expert[expert], first_copy[expert]
        if copy < first_copy[expert + 1]:
            place = next_place[expert]
            after = place + step[expert]
            next_place[expert] = after if after < length[expert] else after - length[expert]
            place -= at_home[expert]
            if place >= 0:
                while place >= rows_of_copy[copy]:
                    place -= rows_of_copy[copy]
                    copy += 1
                slot = slot_of_copy[copy]
        order_N[next_row[slot]] = row
        next_row[slot] += 1
    return order_N, rows_of_slot
