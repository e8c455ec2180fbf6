"""Which slot serves each routed row of one source rank, and in which order rows are sent.

The i-th row of an expert goes to place `i * stride mod n` on the line of its n rows; home and
copies divide that line by their counts. The stride is about the golden section of n and has no
factor in common with it, so neighbouring tokens spread over all copies and every count is met.
Where no row leaves for a copy there is nothing to spread: the i-th row has place i.

Rows are sent by slot, then by place: a row's position follows from its own i alone.

Shapes: N routed rows, M of them that are no padding, E experts, C copies, S slots of all ranks.
"""

from __future__ import annotations

import math

import numpy as np

from ultraep.arrays import PADDING, IntArray


def count(ids_N: IntArray, experts: int) -> tuple[IntArray, int]:
    """[E] rows of every expert, and the number of ids out of range. Padding is neither.

    >>> count(np.array([0, 2, 2, 7, PADDING]), 3)
    (array([1, 0, 2]), 1)
    """
    known = (ids_N >= 0) & (ids_N < experts)
    counts: IntArray = np.bincount(ids_N[known], minlength=experts).astype(np.int64)
    return counts, int((~known & (ids_N != PADDING)).sum())


def reroute(
    ids_N: IntArray,
    loads_E: IntArray,
    home_slot_of_expert: IntArray,
    expert_of_copy: IntArray,
    slot_of_copy: IntArray,
    rows_of_copy: IntArray,
    num_slots: int,
) -> tuple[IntArray, IntArray] | None:
    """[M] the rows in the order of sending, and [S] the rows of every slot.

    loads_E: rows of every expert, as the plan knows them; None is returned if the ids differ.
    expert_of_copy: in rising order.
    rows_of_copy: rows that this source rank sends to each copy; the rest goes home.

    Four rows for expert 1, at places 0, 3, 2, 1, and padding; the last place is for its copy in
    slot 0:

    >>> reroute(*map(np.array, ([1, 1, -1, 1, 1], [0, 4], [2, 1], [1], [0], [1])), 3)
    (array([1, 0, 4, 3]), array([1, 3, 0]))
    """
    counts, unknown = count(ids_N, len(loads_E))
    if unknown or not np.array_equal(counts, loads_E):
        return None
    row_M = np.flatnonzero(ids_N != PADDING)
    expert_M, place_M = ids_N[row_M], np.arange(len(row_M))
    slot_M = home_slot_of_expert[expert_M]
    for expert in sorted(set(expert_of_copy[rows_of_copy > 0].tolist())):
        mine = np.flatnonzero(expert_M == expert)
        copies = np.flatnonzero(expert_of_copy == expert)
        at_home = len(mine) - rows_of_copy[copies].sum()
        ends = at_home + np.cumsum(rows_of_copy[copies])
        places = np.arange(len(mine)) * stride(len(mine)) % len(mine)
        copied = places >= at_home
        served_by = copies[np.searchsorted(ends, places[copied], side="right")]
        slot_M[mine[copied]] = slot_of_copy[served_by]
        place_M[mine] = places
    order = np.lexsort((place_M, slot_M))
    return row_M[order], np.bincount(slot_M, minlength=num_slots)


def stride(length: int) -> int:
    """The first number from the golden section of `length` upwards that is coprime to it."""
    step = max(1, length * 618 // 1000)
    while math.gcd(step, length) != 1:
        step += 1
    return step
