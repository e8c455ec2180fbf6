"""Twin of `reference/bound.py`.

Shapes: R ranks, E experts.
"""

import numpy as np
from numba import njit


@njit(cache=True)
def lower_bound(expert_loads, experts_by_rank, first_of_rank, domain, slots, max_replicas):
    """Tokens on the fullest rank that no plan can go below."""
    best = 0
    loads = expert_loads[experts_by_rank]
    for begin in range(0, len(first_of_rank) - 1, domain):
        first = first_of_rank[begin : begin + domain + 1]
        of_domain = bound_of_domain(
            loads[first[0] : first[-1]], first - first[0], slots, max_replicas
        )
        best = max(best, of_domain)
    return best


@njit(cache=True)
def bound_of_domain(loads, first_of_rank, slots, max_replicas):
    """The bound of one domain; `loads` lists its experts rank by rank."""
    ranks = len(first_of_rank) - 1
    rank_of_expert = np.empty(len(loads), np.int64)
    rank_loads = np.zeros(ranks, np.int64)
    for rank in range(ranks):
        for expert in range(first_of_rank[rank], first_of_rank[rank + 1]):
            rank_of_expert[expert] = rank
            rank_loads[rank] += loads[expert]
    emptiest_first, position = np.arange(ranks), np.empty(ranks, np.int64)
    sort_again(emptiest_first, rank_loads)
    for place in range(ranks):
        position[emptiest_first[place]] = place
    hottest_first = np.argsort(-loads, kind="mergesort")
    rest, best = rank_loads.sum(), 0
    for k in range(ranks):
        movable, taken, wanted = 0, 0, min(k * slots, max_replicas)
        for expert in hottest_first:
            if taken == wanted or loads[expert] == 0:
                break
            if position[rank_of_expert[expert]] >= k:
                movable += loads[expert]
                taken += 1
        best = max(best, -(-(rest - movable) // (ranks - k)))
        rest -= rank_loads[emptiest_first[k]]
    return best


@njit(cache=True)
def sort_again(emptiest_first, rank_loads):
    """Insertion sort by load, then rank: after the first time, few ranks have moved."""
    for index in range(1, len(emptiest_first)):
        rank, place = emptiest_first[index], index
        while place > 0:
            before = emptiest_first[place - 1]
            if rank_loads[before] < rank_loads[rank] or (
                rank_loads[before] == rank_loads[rank] and before < rank
            ):
                break
            emptiest_first[place] = before
            place -= 1
        emptiest_first[place] = rank
