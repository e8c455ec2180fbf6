"""What every rank serves and holds once the copies are made.

Shapes: R ranks, E experts, C copies.
"""

from __future__ import annotations

import numpy as np

from ultraep.arrays import IntArray


def tally(
    expert_loads: IntArray, home_of_expert: IntArray, placed_C3: IntArray, ranks: int
) -> tuple[IntArray, IntArray]:
    """[R] tokens served by every rank, and [C] the spare slot of every copy (expert, host, quota).

    The copies that one rank holds are numbered in their order.

    >>> tally(np.array([6, 1]), np.array([0, 1]), np.array([[0, 1, 2]]), 2)
    (array([4, 3]), array([0]))
    """
    rank_loads = np.zeros(ranks, dtype=np.int64)
    for expert, tokens in enumerate(expert_loads):
        rank_loads[home_of_expert[expert]] += tokens
    used = np.zeros(ranks, dtype=np.int64)
    slots = np.zeros(len(placed_C3), dtype=np.int64)
    for copy, (expert, host, quota) in enumerate(placed_C3):
        rank_loads[home_of_expert[expert]] -= quota
        rank_loads[host] += quota
        slots[copy] = used[host]
        used[host] += 1
    return rank_loads, slots
