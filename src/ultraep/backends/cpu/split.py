"""Twin of `reference/split.py`: the two sets of intervals are walked side by side.

Shapes: R ranks, E experts, C copies.
"""

import numpy as np
from numba import njit


@njit(cache=True)
def split(loads_RE, home_of_expert, placed_C3, locality):
    """[C, R] tokens of every source rank served by each copy (expert, host, quota)."""
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
    """Lay what is left of the sources over what is left at home, then of each copy's quota."""
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
