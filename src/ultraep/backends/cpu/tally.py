"""Twin of `reference/tally.py`."""

import numpy as np
from numba import njit


@njit(cache=True)
def tally(expert_loads, home_of_expert, placed_C3, ranks):
    """[R] tokens served by every rank, and [C] the spare slot of every copy."""
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
