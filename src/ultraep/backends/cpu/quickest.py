"""Twin of `quickest` in `reference/place.py`, with as few attempts as the same answer allows.

A rank above a threshold gives away at least as many of its hottest experts as hold its surplus, and
all of it must find room. So a plan that meets the threshold takes at least some time. Thresholds
whose least time is shortest are tried first, until no other can be quicker.
"""

import numpy as np
from numba import njit

from ultraep.backends.cpu.members import alias, domain_at
from ultraep.backends.cpu.search import append, copy_rows, shared_threshold, solve
from ultraep.backends.reference.place import LINKS
from ultraep.config import LADDER, UNLIMITED

NEVER = (1 << 63) - 1  # longer than any time
FEWEST = 0  # links: as few as the threshold needs


@njit(cache=True)
def quickest(every, size, tolerance_parts, rates, found):
    """The quickest plan in `found`; the number of its copies."""
    row, copy, each, layer = rates
    thresholds, links = attempts_to_make(every, size, tolerance_parts, copy > 0)
    placed, trial = np.empty((every.max_replicas, 3), np.int64), np.empty_like(found)
    at_home = every.rank_loads.max()
    peak, made, exact_transfers = exact(every, size, thresholds[0], placed, found)
    time = row * peak + copy * exact_transfers + each * made + (layer if made else 0)
    if row * at_home <= time:
        time, made = row * at_home, 0
    least = least_times(every, size, thresholds, links, rates, time, exact_transfers)
    chosen = -1
    while True:
        number = np.argmin(least)
        if least[number] > time or least[number] == NEVER:
            return made
        least[number] = NEVER
        peak, count, transfers = attempt_all(
            every, size, thresholds[number], links[number], placed, trial
        )
        if peak < 0 or (number < LIMITED and transfers >= exact_transfers):
            continue
        trial_time = row * peak + copy * transfers + each * count + layer
        if (trial_time, count, number) < (time, made, chosen):
            time, made, chosen = trial_time, count, number
            copy_rows(found, trial, made)


LIMITED = 1 + len(LINKS)  # attempts at the lowest rung, with few links


@njit(cache=True)
def attempts_to_make(every, size, tolerance_parts, few_links):
    """Thresholds that all domains share, and links, of all attempts."""
    thresholds = np.empty(LIMITED + len(LADDER), np.int64)
    links = np.full(len(thresholds), FEWEST if few_links else UNLIMITED, np.int64)
    thresholds[:LIMITED] = shared_threshold(every, size, tolerance_parts)
    for index, number in enumerate(LINKS):
        links[1 + index] = number
    count = LIMITED
    for parts in LADDER:
        if parts > tolerance_parts:
            thresholds[count] = shared_threshold(every, size, parts)
            count += 1
    return thresholds[:count], links[:count]


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
        threshold = threshold_with(domain, shared, links)
        own_links = links
        if links == FEWEST:
            own_links = max(1, least_transfers(domain, threshold)[0])
        peak, made, most = alias(domain, threshold, own_links, True, placed)
        if peak > threshold:
            return -1, 0, 0
        highest, transfers = max(highest, threshold), max(transfers, most)
        total = append(found, total, placed, made, every.first[begin], begin)
    return highest, total, transfers


@njit(cache=True)
def threshold_with(domain, shared, links):
    """The shared threshold, or the least peak that so few links leave, if that is higher."""
    if links in (FEWEST, UNLIMITED):
        return shared
    peak = shared
    for rank, load in enumerate(domain.rank_loads):
        begin, end = domain.first[rank], domain.first[rank + 1]
        for place in range(begin, min(end, begin + links)):
            load -= domain.loads[domain.hottest_first[place]]
        peak = max(peak, load)
    return peak


@njit(cache=True)
def least_times(every, size, thresholds, links, rates, time, exact_transfers):
    """The least time of every attempt; `NEVER` where that is longer than `time`."""
    row, copy, each, layer = rates
    attempts, at_home = len(thresholds), every.rank_loads.max()
    # With no rank above the threshold there is nothing to plan; else there is at least one copy.
    highest = min(at_home - 1, (time - copy - each - layer) // row)
    peak, most = thresholds.copy(), np.zeros(attempts, np.int64)
    copies = np.zeros(attempts, np.int64)
    for begin in range(0, len(every.rank_loads), size):
        domain = domain_at(every, begin, size)
        for number in range(attempts):
            threshold = threshold_with(domain, thresholds[number], links[number])
            peak[number] = max(peak[number], threshold)
            if peak[number] <= highest:
                own_most, needed = least_transfers(domain, threshold)
                most[number] = max(most[number], own_most)
                copies[number] += needed
    least = np.full(attempts, NEVER, np.int64)
    for number in range(attempts):
        possible = number >= LIMITED or (copy > 0 and most[number] < exact_transfers)
        # So many links are the fewest for the lowest rung: the first attempt has them, too.
        known = most[number] == links[number] and peak[number] == thresholds[0]
        if len(every.rank_loads) == size and known:
            continue
        if possible and peak[number] <= highest:
            least[number] = row * peak[number] + copy * most[number] + each * copies[number] + layer
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
