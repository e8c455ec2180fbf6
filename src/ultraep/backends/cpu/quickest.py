"""Twin of `quickest` in `reference/place.py`, with as few attempts as the same answer allows.

A rank above a threshold gives away at least as many of its hottest experts as hold its surplus, and
all of it must find room. So a plan that meets the threshold takes at least some time. Thresholds
whose least time is shortest are tried first, until no other can be quicker.
"""

import numpy as np
from numba import njit

from ultraep.backends.cpu.members import alias, domain_at
from ultraep.backends.cpu.search import append, copy_rows, shared_threshold, solve
from ultraep.config import LADDER, LINKS, UNLIMITED

NEVER = (1 << 63) - 1  # longer than any time


@njit(cache=True)
def quickest(every, size, tolerance_parts, rates, found):
    """The quickest plan in `found`; the number of its copies."""
    row, copy, each, layer = rates
    parts_of_rung, links_of_limit = rungs_and_limits(every, tolerance_parts)
    rungs, placed = len(parts_of_rung), np.empty((every.max_replicas, 3), np.int64)
    thresholds = np.empty(rungs, np.int64)
    for rung, parts in enumerate(parts_of_rung):
        thresholds[rung] = shared_threshold(every, size, parts)
    at_home = every.rank_loads.max()
    peak, made, transfers = exact(every, size, thresholds[0], placed, found)
    time = row * peak + copy * transfers + each * made + (layer if made else 0)
    if row * at_home <= time:
        time, made = row * at_home, 0
    least = least_times(every, size, thresholds, links_of_limit, rates)
    trial, chosen = np.empty_like(found), -1
    while True:
        number = np.argmin(least)
        if least[number] > time or least[number] == NEVER:
            return made
        least[number] = NEVER
        threshold, links = thresholds[number % rungs], links_of_limit[number // rungs]
        peak, count, transfers = attempt_all(every, size, threshold, links, placed, trial)
        if peak < 0:
            continue
        trial_time = row * peak + copy * transfers + each * count + layer
        if (trial_time, count, number) < (time, made, chosen):
            time, made, chosen = trial_time, count, number
            copy_rows(found, trial, made)


@njit(cache=True)
def rungs_and_limits(every, tolerance_parts):
    """The tolerances and the limits of links, as `rungs_of` and `links_of` have them."""
    rungs, most = [tolerance_parts], every.slots
    for parts in LADDER:
        if parts > tolerance_parts:
            rungs.append(parts)
    for rank in range(len(every.rank_loads)):
        most = max(most, every.first[rank + 1] - every.first[rank])
    limits = [links for links in LINKS if links < most]
    limits.append(UNLIMITED)
    return np.array(rungs), np.array(limits)


@njit(cache=True)
def exact(every, size, threshold, placed, found):
    """All domains solved, in `found`; their peak, copies, and most transfers of one rank."""
    peak, total, transfers = 0, 0, 0
    for begin in range(0, len(every.rank_loads), size):
        domain = domain_at(every, begin, size)
        first_try = alias(domain, threshold, UNLIMITED, False, placed)
        own_peak, made, links = solve(domain, threshold, placed, *first_try)
        peak, transfers = max(peak, own_peak), max(transfers, links)
        total = append(found, total, placed, made, every.first[begin], begin)
    return peak, total, transfers


@njit(cache=True)
def attempt_all(every, size, shared, links, placed, found):
    """All domains attempted once, in `found`; their highest threshold, copies and transfers.

    The threshold is -1 if a domain does not meet its own.
    """
    highest, total, transfers = 0, 0, 0
    for begin in range(0, len(every.rank_loads), size):
        domain = domain_at(every, begin, size)
        threshold = max(shared, least_peak(domain, links))
        peak, made, most = alias(domain, threshold, links, True, placed)
        if peak > threshold:
            return -1, 0, 0
        highest, transfers = max(highest, threshold), max(transfers, most)
        total = append(found, total, placed, made, every.first[begin], begin)
    return highest, total, transfers


@njit(cache=True)
def least_peak(domain, links):
    """The peak that is left if every rank gives away all tokens of its hottest experts."""
    peak = 0
    for rank, load in enumerate(domain.rank_loads):
        begin, end = domain.first[rank], domain.first[rank + 1]
        for place in range(begin, min(end, begin + links)):
            load -= domain.loads[domain.hottest_first[place]]
        peak = max(peak, load)
    return peak


@njit(cache=True)
def least_times(every, size, thresholds, links_of_limit, rates):
    """The least time of every attempt; `NEVER` where it cannot be the quickest, or is one again."""
    row, copy, each, layer = rates
    rungs, at_home = len(thresholds), every.rank_loads.max()
    least = np.full(len(links_of_limit) * rungs, NEVER, np.int64)
    for limit, links in enumerate(links_of_limit):
        for rung, shared in enumerate(thresholds):
            highest, lowest, transfers, copies = 0, at_home, 0, 0
            for begin in range(0, len(every.rank_loads), size):
                domain = domain_at(every, begin, size)
                floor = least_peak(domain, links)
                most, needed = least_transfers(domain, max(shared, floor))
                highest, lowest = max(highest, shared, floor), min(lowest, floor)
                transfers, copies = max(transfers, most), copies + needed
            again = shared <= lowest if rung > 0 else links == UNLIMITED
            if copies > 0 and not again:
                least[limit * rungs + rung] = (
                    row * highest + copy * transfers + each * copies + layer
                )
    return least


@njit(cache=True)
def least_transfers(domain, threshold):
    """The least transfers of one rank, and the fewest copies, of a plan that meets a threshold.

    A copy serves no more than the emptiest rank lacks.
    """
    widest = threshold - domain.rank_loads[domain.emptiest_first[0]]
    most, copies, left = 0, 0, 0
    for rank in domain.fullest_first:
        surplus, given = domain.rank_loads[rank] - threshold, 0
        if surplus <= 0:
            break
        left += surplus
        fewest = -(-surplus // widest)
        while surplus > 0:
            surplus -= domain.loads[domain.hottest_first[domain.first[rank] + given]]
            given += 1
        most, copies = max(most, given), copies + max(given, fewest)
    hosts = 0
    for rank in domain.emptiest_first:
        if left <= 0:
            break
        left -= threshold - domain.rank_loads[rank]
        hosts += 1
    return most, max(copies, hosts)
