"""Twin of `reference/reroute.py`: two passes over the rows, and no sorting."""

import math

import numpy as np
from numba import njit


@njit(cache=True)
def stride(length):
    step = max(1, length * 618 // 1000)
    while math.gcd(step, length) != 1:
        step += 1
    return step


@njit(cache=True)
def reroute(ids_N, home_slot_of_expert, expert_of_copy, slot_of_copy, rows_of_copy, num_slots):
    """[N] slot of every row, and [N] the rows in the order of their slots."""
    experts = len(home_slot_of_expert)
    first_copy = np.zeros(experts + 1, np.int64)
    for expert in expert_of_copy:
        first_copy[expert + 1] += 1
    first_copy = np.cumsum(first_copy)
    length = np.zeros(experts, np.int64)
    for expert in ids_N:
        length[expert] += 1
    at_home = length.copy()
    for copy in range(len(expert_of_copy)):
        at_home[expert_of_copy[copy]] -= rows_of_copy[copy]
    step = np.ones(experts, np.int64)
    first_row = np.zeros(num_slots + 1, np.int64)
    for expert in range(experts):
        first_row[home_slot_of_expert[expert] + 1] += at_home[expert]
        if first_copy[expert] < first_copy[expert + 1]:
            step[expert] = stride(length[expert])
    for copy in range(len(expert_of_copy)):
        first_row[slot_of_copy[copy] + 1] += rows_of_copy[copy]
    next_row = np.cumsum(first_row)
    next_place = np.zeros(experts, np.int64)
    slot_N = np.empty(len(ids_N), np.int64)
    order_N = np.empty(len(ids_N), np.int64)
    for row in range(len(ids_N)):
        expert = ids_N[row]
        slot = home_slot_of_expert[expert]
        copy = first_copy[expert]
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
        slot_N[row] = slot
        order_N[next_row[slot]] = row
        next_row[slot] += 1
    return slot_N, order_N
