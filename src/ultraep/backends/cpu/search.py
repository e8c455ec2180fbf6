"""Twin of the search in `reference/place.py`: the least threshold that alias planning meets."""

import numpy as np
from numba import njit

from ultraep.backends.cpu.bound import bound_of_domain
from ultraep.backends.cpu.members import alias
from ultraep.backends.reference.place import GUESSES
from ultraep.config import PARTS, UNLIMITED


@njit(cache=True)
def shared_threshold(every, size, tolerance_parts):
    """What no rank shall exceed: the heaviest domain's mean, rounded up, and the tolerance."""
    threshold = 0
    for begin in range(0, len(every.rank_loads), size):
        total = every.rank_loads[begin : begin + size].sum()
        mean = -(-total // size)
        threshold = max(threshold, mean, total * (PARTS + tolerance_parts) // (size * PARTS))
    return threshold


@njit(cache=True)
def solve(domain, threshold, placed, peak, made, transfers):
    """The attempt in `placed`, or one at the least threshold above it that `alias` meets.

    Its peak, copies and transfers; the copies stand in the first rows of `placed`.
    """
    if peak <= threshold:
        return peak, made, transfers
    trial = np.empty_like(placed)
    bound = bound_of_domain(domain.loads, domain.first, domain.slots, domain.max_replicas)
    failed, last = max(threshold, bound - 1), threshold
    last_peak, count, _ = alias(domain, threshold, UNLIMITED, False, trial)
    middle = max(failed + 1, last + excess_share(domain, trial, count, last))
    met, tries = 0, 0
    while peak - failed > 1:
        middle = min(middle, peak - 1)
        trial_peak, count, links = alias(domain, middle, UNLIMITED, False, trial)
        tries += 1
        if trial_peak < peak:
            peak, made, transfers = trial_peak, count, links
            copy_rows(placed, trial, made)
        if trial_peak <= middle:
            met += 1
            middle = peak - 1 if met == 1 else (failed + peak) // 2
            continue
        above = trial_peak - middle
        gain = last_peak - last - above
        if gain > 0:
            step = -(-above * (middle - last) // gain)
        else:
            step = excess_share(domain, trial, count, middle)
        last, last_peak, failed = middle, trial_peak, middle
        middle = middle + max(1, step) if met == 0 and tries < GUESSES else (failed + peak) // 2
    return peak, made, transfers


@njit(cache=True)
def excess_share(domain, placed, made, threshold):
    """What is too much, shared among the ranks that are full, rounded up."""
    rank_loads = domain.rank_loads.copy()
    for copy in range(made):
        home = np.searchsorted(domain.first, placed[copy, 0], side="right") - 1
        rank_loads[home] -= placed[copy, 2]
        rank_loads[placed[copy, 1]] += placed[copy, 2]
    over, full = 0, 0
    for load in rank_loads:
        if load >= threshold:
            over += load - threshold
            full += 1
    return -(-over // full)


@njit(cache=True)
def copy_rows(target, source, count):
    for row in range(count):
        for column in range(3):
            target[row, column] = source[row, column]


@njit(cache=True)
def append(found, total, placed, made, first_expert, first_rank):
    """Write the copies of a domain behind those of all before it."""
    for index in range(made):
        found[total + index, 0] = first_expert + placed[index, 0]
        found[total + index, 1] = first_rank + placed[index, 1]
        found[total + index, 2] = placed[index, 2]
    return total + made
