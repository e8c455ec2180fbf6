"""Twin of `reference/place.py`, where it is explained.

The rows of `placed`, and the numbers of experts in it, are those of `members.py`.
"""

import numpy as np
from numba import njit

from ultraep.backends.cpu.circles import close_circles
from ultraep.backends.cpu.members import alias, domain_at, sort_all, window
from ultraep.backends.cpu.quickest import quickest
from ultraep.backends.cpu.search import append, copy_rows, shared_threshold, solve
from ultraep.backends.reference.circles import MOST_RANKS, VARIANTS
from ultraep.config import UNLIMITED


@njit(cache=True)
def sort_rows(rows, count):
    """Insertion sort by expert, then host."""
    for index in range(1, count):
        expert, host, quota = rows[index, 0], rows[index, 1], rows[index, 2]
        place = index
        while place > 0 and (
            rows[place - 1, 0] > expert
            or (rows[place - 1, 0] == expert and rows[place - 1, 1] > host)
        ):
            for column in range(3):
                rows[place, column] = rows[place - 1, column]
            place -= 1
        rows[place, 0], rows[place, 1], rows[place, 2] = expert, host, quota


@njit(cache=True)
def probe(domain, threshold, placed, spare):
    """The best attempt at this threshold; its peak and copies."""
    loads, first, ranks = domain.loads, domain.first, len(domain.rank_loads)
    peak, made, _ = alias(domain, threshold, UNLIMITED, False, placed)
    if threshold * ranks - loads.sum() < ranks:
        return peak, made
    best = cost_of(placed, made, peak, threshold, first)
    settings = (domain.slots, threshold, domain.min_tokens, domain.max_replicas)
    line = domain.emptiest_first
    for member in range(1 + len(VARIANTS) if ranks <= MOST_RANKS else 1):
        if member == 0:
            trial_peak, count = window(loads, first, *settings, line, spare)
        else:
            trial_peak, count = close_circles(
                loads, first, *settings, line, *VARIANTS[member - 1], spare
            )
        cost = cost_of(spare, count, trial_peak, threshold, first)
        if cost < best or (cost == best and member == 0):
            peak, made, best = trial_peak, count, cost
            copy_rows(placed, spare, made)
    return peak, made


@njit(cache=True)
def cost_of(found, made, peak, threshold, first):
    """What makes one attempt better than another: all of these, in this order."""
    copies_of = np.zeros(first[-1], np.int64)
    for copy in range(made):
        copies_of[found[copy, 0]] += 1
    fanout, egress = 0, 0
    for rank in range(len(first) - 1):
        given = 0
        for expert in range(first[rank], first[rank + 1]):
            fanout = max(fanout, copies_of[expert])
            given += copies_of[expert] > 0
        egress = max(egress, given)
    return max(peak, threshold), made, fanout, egress


@njit(cache=True)
def balanced(every, size, tolerance_parts, found):
    """The best attempts at all domains in `found`; the number of copies."""
    placed = np.empty((every.max_replicas, 3), np.int64)
    spare = np.empty_like(placed)
    threshold = shared_threshold(every, size, tolerance_parts)
    total = 0
    for begin in range(0, len(every.rank_loads), size):
        domain = domain_at(every, begin, size)
        peak, made = probe(domain, threshold, placed, spare)
        peak, made, _ = solve(domain, threshold, placed, peak, made, 0)
        total = append(found, total, placed, made, every.first[begin], begin)
    return total


@njit(cache=True)
def place(
    expert_loads,
    experts_by_rank,
    first_of_rank,
    domain,
    slots,
    tolerance_parts,
    min_tokens,
    max_replicas,
    row,
    copy,
    each,
    layer,
):
    """[C, 3] expert, host rank and quota of every copy, ordered by expert, then host."""
    loads = expert_loads[experts_by_rank]
    found = np.empty(((len(first_of_rank) - 1) * slots, 3), np.int64)
    limit = min(max_replicas, domain * slots)
    every = sort_all(loads, first_of_rank, domain, slots, min_tokens, limit)
    if row > 0:
        made = quickest(every, domain, tolerance_parts, (row, copy, each, layer), found)
    else:
        made = balanced(every, domain, tolerance_parts, found)
    for index in range(made):
        found[index, 0] = experts_by_rank[found[index, 0]]
    sort_rows(found, made)
    return found[:made]
