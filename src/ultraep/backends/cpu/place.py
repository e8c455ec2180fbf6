"""Twin of `reference/place.py`. Rows of `placed` and numbers of experts are as in `members.py`."""

import numpy as np
from numba import njit

from ultraep.backends.cpu.members import (
    alias,
    domain_at,
    limits_at,
    peak_of,
    relative_to,
    sort_all,
)
from ultraep.backends.reference.place import GUESSES, LINKS, SHORT
from ultraep.config import LADDER, PARTS, UNITS_PER_ROW, UNLIMITED

NEVER = (1 << 63) - 1  # longer than any time
FEWEST = 0  # as links: as few as the threshold needs
LIMITED = 1 + len(LINKS)  # attempts at the lowest rung with few links


@njit(cache=True)
def solve_all(every, size, threshold, by_time, placed, plan):
    """Write the solved domains to `plan`; return peak, replicas, and most transfers of a rank.

    by_time: do not try `thrifty` first.
    """
    peak, total, transfers = 0, 0, 0
    for begin in range(0, len(every.rank_loads), size):
        domain = domain_at(every, begin, size)
        own_peak, num_copies, most = alias(domain, threshold, UNLIMITED, not by_time, placed)
        if own_peak > threshold:
            own_peak, num_copies, most = solve(domain, threshold, placed)
        peak, transfers = max(peak, own_peak), max(transfers, most)
        total = append(plan, total, placed, num_copies, every.first[begin], begin)
    return peak, total, transfers


@njit(cache=True)
def shared_threshold(every, size, tolerance_parts):
    """Return the mean of the heaviest domain, rounded up, plus the tolerance."""
    threshold, parts = 0, PARTS + tolerance_parts
    for begin in range(0, len(every.rank_loads), size):
        domain = domain_at(every, begin, size)
        total, weight = scaled_total(domain, domain.rank_loads.sum())
        # total * parts // (weight * PARTS), without products of more than 63 bits
        whole, rest = total // weight, total % weight
        above = whole % PARTS * parts + rest * parts // weight
        threshold = max(threshold, mean_of(domain), whole // PARTS * parts + above // PARTS)
    return threshold


@njit(cache=True)
def scaled_total(domain, rows):
    """Return the rows in units of thresholds, and the sum of the weights that share them."""
    if len(domain.speeds) == 0:
        return rows, len(domain.rank_loads)
    return rows * PARTS, domain.speeds.sum()


@njit(cache=True)
def mean_of(domain):
    """Return the least threshold whose limits together allow all rows."""
    rows, ranks = domain.rank_loads.sum(), len(domain.rank_loads)
    total, weight = scaled_total(domain, rows)
    if len(domain.speeds) == 0:
        return -(-total // weight)
    low, high = total // weight, total // weight + ranks * PARTS // weight + 2
    while low < high:
        middle, allowed = (low + high) // 2, 0
        for speed in domain.speeds:
            allowed += middle * speed // PARTS
        if allowed >= rows:
            high = middle
        else:
            low = middle + 1
    return low


@njit(cache=True)
def solve(domain, threshold, placed):
    """Write the attempt at the least threshold that `alias` meets to `placed`.

    Returns its peak, replicas and transfers.
    """
    peak, num_copies, transfers = alias(domain, threshold, UNLIMITED, False, placed)
    if peak <= threshold:
        return peak, num_copies, transfers
    trial = np.empty_like(placed)
    bound, unit = least_peak_of(domain), unit_of(domain)
    failed, last = max(threshold, bound - 1), threshold
    last_peak = peak
    middle = max(failed + 1, last + excess_share(domain, placed, num_copies, last))
    met, tries = 0, 0
    while peak - failed > unit:
        middle = min(middle, peak - unit)
        trial_peak, count, links = alias(domain, middle, UNLIMITED, False, trial)
        tries += 1
        if trial_peak < peak:
            peak, transfers = trial_peak, links
            num_copies = append(placed, 0, trial, count, 0, 0)
        if trial_peak <= middle:
            met += 1
            middle = peak - unit if met == 1 else (failed + peak) // 2
            continue
        above = trial_peak - middle
        gain = last_peak - last - above
        if gain > 0:
            while unit > 1 and above >= SHORT:
                above, gain = above // 2, max(1, gain // 2)
            step = -(-above * (middle - last) // gain)
        else:
            step = excess_share(domain, trial, count, middle)
        last, last_peak, failed = middle, trial_peak, middle
        middle = middle + max(1, step) if met == 0 and tries < GUESSES else (failed + peak) // 2
    return peak, num_copies, transfers


@njit(cache=True)
def excess_share(domain, placed, num_copies, threshold):
    """Return how far to raise the threshold so that full ranks may keep their surplus."""
    rank_loads = domain.rank_loads.copy()
    for copy in range(num_copies):
        home = np.searchsorted(domain.first, placed[copy, 0], side="right") - 1
        rank_loads[home] -= placed[copy, 2]
        rank_loads[placed[copy, 1]] += placed[copy, 2]
    over, full = 0, 0
    heights = rank_loads - limits_at(domain, threshold)
    for rank, rows in enumerate(heights):
        if rows >= 0:
            over += rows
            full += 1 if len(domain.speeds) == 0 else domain.speeds[rank]
    return -(-over * (1 if len(domain.speeds) == 0 else PARTS) // full)


@njit(cache=True)
def unit_of(domain):
    """Return how many units of a threshold are one row at nominal speed."""
    return 1 if len(domain.speeds) == 0 else UNITS_PER_ROW


@njit(cache=True)
def time_of(row, peak, unit):
    """Return `row * peak // unit` without a product of more than 63 bits."""
    return row * (peak // unit) + row * (peak % unit) // unit


@njit(cache=True)
def append(plan, total, placed, num_copies, first_expert, first_rank):
    """Copy replicas into `plan` behind `total` others, renumbered; return their number."""
    for index in range(num_copies):
        plan[total + index, 0] = first_expert + placed[index, 0]
        plan[total + index, 1] = first_rank + placed[index, 1]
        plan[total + index, 2] = placed[index, 2]
    return total + num_copies


@njit(cache=True)
def quickest(every, size, tolerance_parts, rates, placed, plan):
    """Write the quickest plan to `plan`; return the number of its replicas.

    Makes as few attempts as the answer allows. A rank above a threshold must give away at least the
    hottest experts that hold its surplus, so that every attempt has a least time. Attempts are made
    in the order of their least times, until no other one can be quicker.
    """
    row, copy, each, layer = rates
    thresholds, links = attempts_to_make(every, size, tolerance_parts, copy > 0)
    trial, unit = np.empty_like(plan), unit_of(every)
    time_at_home = time_of(row, peak_of(every, every.rank_loads), unit)
    peak, num_copies, exact_transfers = solve_all(every, size, thresholds[0], True, placed, plan)
    time = time_of(row, peak, unit) + copy * exact_transfers + each * num_copies
    time += layer if num_copies else 0
    if time_at_home <= time:
        time, num_copies = time_at_home, 0
    least = least_times(every, size, thresholds, links, rates, time, exact_transfers)
    chosen = -1
    while True:
        number = np.argmin(least)
        if least[number] > time or least[number] == NEVER:
            return num_copies
        least[number] = NEVER
        peak, count, transfers = attempt_all(
            every, size, thresholds[number], links[number], placed, trial
        )
        if peak < 0 or (number < LIMITED and transfers >= exact_transfers):
            continue
        trial_time = time_of(row, peak, unit) + copy * transfers + each * count + layer
        if (trial_time, count, number) < (time, num_copies, chosen):
            time, chosen = trial_time, number
            num_copies = append(plan, 0, trial, count, 0, 0)


@njit(cache=True)
def attempts_to_make(every, size, tolerance_parts, few_links):
    """Return shared threshold and links of every attempt."""
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
def attempt_all(every, size, shared, links, placed, plan):
    """Write one attempt per domain to `plan`; return the highest threshold, replicas, transfers.

    The threshold is -1 if a domain does not meet its own.
    """
    highest, total, transfers = 0, 0, 0
    for begin in range(0, len(every.rank_loads), size):
        domain = domain_at(every, begin, size)
        threshold = threshold_with(domain, shared, links)
        own_links = links
        if links == FEWEST:
            own_links = max(1, least_transfers(domain, threshold)[0])
        peak, num_copies, most = alias(domain, threshold, own_links, True, placed)
        if peak > threshold:
            return -1, 0, 0
        highest, transfers = max(highest, threshold), max(transfers, most)
        total = append(plan, total, placed, num_copies, every.first[begin], begin)
    return highest, total, transfers


@njit(cache=True)
def threshold_with(domain, shared, links):
    """Return the shared threshold, or the least peak that so few links allow."""
    if links in (FEWEST, UNLIMITED):
        return shared
    kept = domain.rank_loads.copy()
    for rank in range(len(kept)):
        begin, end = domain.first[rank], domain.first[rank + 1]
        for place in range(begin, min(end, begin + links)):
            kept[rank] -= domain.loads[domain.hottest_first[place]]
    return max(shared, peak_of(domain, kept))


@njit(cache=True)
def least_times(every, size, thresholds, links, rates, time, exact_transfers):
    """Return the least time of every attempt; `NEVER` if it is longer than `time`."""
    row, copy, each, layer = rates
    attempts, at_home, unit = len(thresholds), peak_of(every, every.rank_loads), unit_of(every)
    # A plan has at least one replica, unless no rank is above the threshold.
    left = time - copy - each - layer
    rows = min(left // row, at_home)  # times `unit`, less than 2**63
    highest = min(at_home - 1, rows * unit + (left % row + 1) * unit // row)
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
        # If these are the fewest links for the lowest rung, the first attempt has them, too.
        repeated = most[number] == links[number] and peak[number] == thresholds[0]
        if len(every.rank_loads) == size and repeated:
            continue
        if possible and peak[number] <= highest:
            least[number] = time_of(row, peak[number], unit) + copy * most[number]
            least[number] += each * copies[number] + layer
    return least


@njit(cache=True)
def least_transfers(domain, threshold):
    """Return the least transfers of one rank, and the fewest replicas, that can meet a threshold.

    A replica serves no more than the emptiest rank lacks.
    """
    domain, threshold = relative_to(domain, threshold)
    widest = threshold - domain.rank_loads[domain.emptiest_first[0]]
    most, copies, left = 0, 0, 0
    for rank in domain.fullest_first:
        surplus, num_given = domain.rank_loads[rank] - threshold, 0
        if surplus <= 0:
            break
        left += surplus
        fewest = -(-surplus // widest)
        while surplus > 0:
            surplus -= domain.loads[domain.hottest_first[domain.first[rank] + num_given]]
            num_given += 1
        most, copies = max(most, num_given), copies + max(num_given, fewest)
    hosts = 0
    for rank in domain.emptiest_first:
        if left <= 0:
            break
        left -= threshold - domain.rank_loads[rank]
        hosts += 1
    return most, max(copies, hosts)


@njit(cache=True)
def place(expert_loads, limits):
    """[C, 3] expert, host rank and quota of every replica, sorted by expert, then host."""
    every, size, tolerance_parts = (
        sort_all(expert_loads, limits),
        limits.domain,
        limits.tolerance_parts,
    )
    plan = np.empty((len(every.rank_loads) * limits.slots, 3), np.int64)
    placed = np.empty((every.max_replicas, 3), np.int64)
    if limits.rates[0] > 0:
        num_copies = quickest(every, size, tolerance_parts, limits.rates, placed, plan)
    else:
        threshold = shared_threshold(every, size, tolerance_parts)
        _, num_copies, _ = solve_all(every, size, threshold, False, placed, plan)
    order = np.empty(num_copies, np.int64)
    for index in range(num_copies):
        plan[index, 0] = limits.experts_by_rank[plan[index, 0]]
        order[index] = plan[index, 0] * len(every.rank_loads) + plan[index, 1]
    return plan[np.argsort(order, kind="mergesort")]


@njit(cache=True)
def lower_bound(expert_loads, limits):
    """Return the least threshold that any plan can meet; without speeds, in rows."""
    every, best = sort_all(expert_loads, limits), 0
    for begin in range(0, len(every.rank_loads), limits.domain):
        best = max(best, least_peak_of(domain_at(every, begin, limits.domain)))
    return best


@njit(cache=True)
def least_peak_of(domain):
    """Return the least threshold that any plan of a domain can meet."""
    loads, ranks = domain.loads, len(domain.rank_loads)
    weights, scale, emptiest_first = np.ones(ranks, np.int64), 1, domain.emptiest_first
    if len(domain.speeds):
        weights, scale = domain.speeds, PARTS
        emptiest_first = np.argsort(-(-domain.rank_loads * scale // weights), kind="mergesort")
    rank_of_expert, position = np.empty(len(loads), np.int64), np.empty(ranks, np.int64)
    for place, rank in enumerate(emptiest_first):
        position[rank] = place
        for expert in range(domain.first[rank], domain.first[rank + 1]):
            rank_of_expert[expert] = rank
    hottest_first = np.argsort(-loads, kind="mergesort")
    rest, best, weight = domain.rank_loads.sum(), mean_of(domain), weights.sum()
    for k in range(ranks):
        movable, taken, wanted = 0, 0, min(k * domain.slots, domain.max_replicas)
        for expert in hottest_first:
            if taken == wanted or loads[expert] == 0:
                break
            if position[rank_of_expert[expert]] >= k:
                movable += loads[expert]
                taken += 1
        best = max(best, -(-(rest - movable) * scale // weight))
        rest -= domain.rank_loads[emptiest_first[k]]
        weight -= weights[emptiest_first[k]]
    return best
