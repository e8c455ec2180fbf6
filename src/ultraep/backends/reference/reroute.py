"""Which slot serves each routed row of one source rank: rows are sent in the order of slots.

The i-th row of an expert goes to place `i * stride mod n` on the line of its n rows; home and
copies divide that line by their counts. The stride is about the golden section of n and has no
factor in common with it, so neighbouring tokens spread over all copies and every count is met.

Shapes: N routed rows, E experts, C copies, S slots of all ranks.
"""

from __future__ import annotations

import math

import numpy as np

from ultraep.arrays import IntArray
from ultraep.backends.reference.count import count


def reroute(
    ids_N: IntArray,
    loads_E: IntArray,
    home_slot_of_expert: IntArray,
    expert_of_copy: IntArray,
    slot_of_copy: IntArray,
    rows_of_copy: IntArray,
    num_slots: int,
) -> tuple[IntArray, IntArray] | None:
    """[N] the rows in the order of their slots, and [S] the rows of every slot.

    loads_E: rows of every expert, as the plan knows them; None is returned if the ids differ.
    rows_of_copy: rows that this source rank sends to each copy; the rest goes home.

    Three rows for expert 1, one of them, the third, for its copy in slot 0:

    >>> reroute(*map(np.array, ([1, 1, 1], [0, 3], [2, 1], [1], [0], [1])), 3)
    (array([2, 0, 1]), array([1, 2, 0]))
    """
    counts, unknown = count(ids_N, len(loads_E))
    if unknown or not np.array_equal(counts, loads_E):
        return None
    slot_N = home_slot_of_expert[ids_N]
    for expert in sorted(set(expert_of_copy.tolist())):
        rows = np.flatnonzero(ids_N == expert)
        copies = np.flatnonzero(expert_of_copy == expert)
        at_home = len(rows) - rows_of_copy[copies].sum()
        ends = at_home + np.cumsum(rows_of_copy[copies])
        places = np.arange(len(rows)) * stride(len(rows)) % max(1, len(rows))
        copied = places >= at_home
        served_by = copies[np.searchsorted(ends, places[copied], side="right")]
        slot_N[rows[copied]] = slot_of_copy[served_by]
    return np.argsort(slot_N, kind="stable"), np.bincount(slot_N, minlength=num_slots)


def stride(length: int) -> int:
    """The first number from the golden section of `length` upwards that is coprime to it."""
    step = max(1, length * 618 // 1000)
    while math.gcd(step, length) != 1:
        step += 1
    return step
