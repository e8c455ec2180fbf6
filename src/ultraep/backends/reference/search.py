"""The least threshold that `alias` meets, a bound for all plans, and the quickest plan by rates."""

from __future__ import annotations

import numpy as np

from ultraep.arrays import IntArray
from ultraep.backends.reference.heuristics import (
    Attempt,
    Domain,
    alias,
    limits_at,
    peak_of,
    thrifty,
)
from ultraep.config import LADDER, MAX_THRESHOLD, PARTS, UNLIMITED

GUESSES = 4  # steps of the search before it bisects
SHORT = 1 << 14  # times `MAX_THRESHOLD`, less than 2**62


def solve(domain: Domain, threshold: int) -> Attempt:
    """Return the attempt of `alias`, or one at the least threshold above it that `alias` meets.

    A failed attempt predicts the next threshold: the peak falls in proportion as the threshold
    rises. After a success, the threshold one row below it is tried, then bisection.
    """
    best = last = alias(domain, threshold)
    if best.peak <= threshold:
        return best
    failed = max(threshold, least_peak_of(domain) - 1)
    middle = max(failed + 1, threshold + excess_share(domain, last))
    met = tries = 0
    while best.peak - failed > domain.unit:
        middle = min(middle, best.peak - domain.unit)
        current = alias(domain, middle)
        if current.peak < best.peak:
            best = current
        tries += 1
        if current.peak <= middle:
            met += 1
            middle = best.peak - domain.unit if met == 1 else (failed + best.peak) // 2
        else:
            failed = middle
            guess = middle + max(1, step(domain, last, current))
            middle = guess if met == 0 and tries < GUESSES else (failed + best.peak) // 2
            last = current
    return best


def excess_share(domain: Domain, attempt: Attempt) -> int:
    """Return how far to raise the threshold so that full ranks may keep their surplus."""
    surplus = weight = 0
    for rank, height in enumerate(attempt.heights):
        if height >= 0:
            surplus += height
            weight += domain.weights[rank]
    return -(-surplus * domain.scale // weight)


def step(domain: Domain, last: Attempt, attempt: Attempt) -> int:
    """Return how far to raise the threshold if the peak falls on as since the last attempt."""
    above = attempt.peak - attempt.threshold
    gain = last.peak - last.threshold - above
    if gain <= 0:
        return excess_share(domain, attempt)
    while domain.unit > 1 and above >= SHORT:  # the product below must fit into 63 bits
        above, gain = above // 2, max(1, gain // 2)
    return -(-above * (attempt.threshold - last.threshold) // gain)


def shared_threshold(domains: list[Domain], tolerance_parts: int) -> int:
    """Return one threshold for all: a lighter domain need not be flatter than the heaviest."""
    threshold, parts = 0, PARTS + tolerance_parts
    for domain in domains:
        total, weight = domain.rank_loads.sum() * domain.scale, domain.weights.sum()
        # total * parts // (weight * PARTS), without products of more than 63 bits
        whole, rest = total // weight, total % weight
        above = whole % PARTS * parts + rest * parts // weight
        threshold = max(threshold, domain.mean, whole // PARTS * parts + above // PARTS)
    return threshold


def mean_of(rank_loads: IntArray, weights: IntArray, scale: int) -> int:
    """Return the least threshold whose limits together allow all rows.

    Rounding down takes less than a row from each limit, so the search needs to examine the
    thresholds of one row more per rank only.
    """
    rows, weight = rank_loads.sum(), weights.sum()
    low: int = rows * scale // weight
    high = low + len(weights) * scale // weight + 2
    while low < high:
        middle = (low + high) // 2
        if limits_at(middle, weights, scale).sum() >= rows:
            high = middle
        else:
            low = middle + 1
    return low


def least_peak_of(domain: Domain) -> int:
    """Return the least threshold that any plan of a domain can meet.

    The k emptiest ranks have k * slots slots, so beyond their own load they serve at most the
    k * slots hottest experts of the other ranks. The rest stays with the other ranks, whose fullest
    serves at least the mean of it. The best k gives the bound: k = 0 is the mean, and without slots
    k = G - 1 is the fullest rank. With speeds, ranks share the rest in proportion to their speeds.
    """
    weights, loads = domain.weights, domain.loads
    turn = np.empty_like(loads)  # [E] turn of the expert's home
    for place, rank in enumerate(domain.emptiest_first):
        for expert in range(domain.first[rank], domain.first[rank + 1]):
            turn[expert] = place
    hottest_first = np.argsort(-loads, kind="mergesort")
    best, rest, weight = domain.mean, domain.rank_loads.sum(), weights.sum()
    for k, rank in enumerate(domain.emptiest_first):
        movable, replicas = 0, min(k * domain.slots, domain.max_replicas)
        for expert in hottest_first:
            if replicas == 0:
                break
            if turn[expert] >= k:
                movable += loads[expert]
                replicas -= 1
        best = max(best, -(-(rest - movable) * domain.scale // weight))
        rest -= domain.rank_loads[rank]
        weight -= weights[rank]
    return best


# -- by rates --------------------------------------------------------------------------------------

Numbers = tuple[int, int, int, int]  # of `config.Rates`
LINKS = (1, 2)  # always tried, though they may not suffice for the tolerance
FEWEST = 0  # as links: as few as the threshold needs
LIMITED = 1 + len(LINKS)  # attempts that must need fewer links than `solve`
NEVER = (1 << 63) - 1  # longer than any time


def quickest(domains: list[Domain], tolerance_parts: int, rates: Numbers) -> list[Attempt]:
    """Return the quickest attempts; ties go to the fewest replicas, then to the first.

    The attempts, in the order that decides ties: `solve` at the lowest threshold; the lowest
    threshold with the fewest links that may meet it, and the lowest that LINKS may meet, if they
    need fewer links than `solve`; higher thresholds; no replicas. An attempt takes the time of its
    threshold, and counts only if it meets it.

    A rank above a threshold must give away at least the hottest experts that hold its surplus, so
    every attempt has a least time. Attempts are made in the order of their least times, until no
    other one can be quicker.
    """
    thresholds, links = attempts_to_make(domains, tolerance_parts, rates[1] > 0)
    unit, chosen, at_home = domains[0].unit, -1, 0
    for domain in domains:
        at_home = max(at_home, peak_of(domain, domain.rank_loads))
    best = [solve(domain, thresholds[0]) for domain in domains]
    peak, exact_transfers, replicas, _ = totals(best)
    time = time_of(peak, unit, exact_transfers, replicas, rates)
    if time_of(at_home, unit, 0, 0, rates) <= time:
        best = [alias(domain, MAX_THRESHOLD) for domain in domains]  # no rank is above its limit
        time, replicas = time_of(at_home, unit, 0, 0, rates), 0
    least = least_times(domains, thresholds, links, rates, time, at_home)
    while True:
        number = int(np.argmin(least))
        if least[number] > time:
            return best
        least[number] = NEVER
        attempts = [attempt_at(domain, thresholds[number], links[number]) for domain in domains]
        _, transfers, made, threshold = totals(attempts)
        if threshold == NEVER or (number < LIMITED and transfers >= exact_transfers):
            continue
        cost = time_of(threshold, unit, transfers, made, rates), made, number
        if cost < (time, replicas, chosen):
            best = attempts
            time, replicas, chosen = cost


def totals(attempts: list[Attempt]) -> tuple[int, int, int, int]:
    """Return the highest peak, most transfers, all replicas, and the highest threshold.

    The threshold is `NEVER` if an attempt does not meet its own.
    """
    peak = transfers = replicas = threshold = 0
    for attempt in attempts:
        peak, transfers = max(peak, attempt.peak), max(transfers, attempt.transfers)
        replicas += len(attempt.replicas)
        met = attempt.peak <= attempt.threshold
        threshold = max(threshold, attempt.threshold if met else NEVER)
    return peak, transfers, replicas, threshold


def attempts_to_make(
    domains: list[Domain], tolerance_parts: int, few_links: bool
) -> tuple[IntArray, IntArray]:
    """Return shared threshold and links of every attempt but `solve` and no replicas."""
    thresholds = np.empty(LIMITED + len(LADDER), np.int64)
    links = np.full(len(thresholds), FEWEST if few_links else UNLIMITED, np.int64)
    for number in range(LIMITED):
        thresholds[number] = shared_threshold(domains, tolerance_parts)
    for index, most in enumerate(LINKS):
        links[1 + index] = most
    count = LIMITED
    for parts in LADDER:
        if parts > tolerance_parts:
            thresholds[count] = shared_threshold(domains, parts)
            count += 1
    return thresholds[:count], links[:count]


def attempt_at(domain: Domain, shared: int, links: int) -> Attempt:
    """Return one of the attempts in a domain."""
    threshold = threshold_with(domain, shared, links)
    if links == FEWEST:
        links = max(1, least_transfers(domain, threshold)[0])
    return thrifty(domain, threshold, links)


def threshold_with(domain: Domain, shared: int, links: int) -> int:
    """Return the shared threshold, or the least one that so few links allow."""
    if links in (FEWEST, UNLIMITED):
        return shared
    kept = domain.rank_loads.copy()
    for rank in range(len(kept)):
        first, end = domain.first[rank], domain.first[rank + 1]
        for place in range(first, min(end, first + links)):
            kept[rank] -= domain.loads[domain.hottest_first[place]]
    return max(shared, peak_of(domain, kept))


def least_times(
    domains: list[Domain],
    thresholds: IntArray,
    links: IntArray,
    rates: Numbers,
    time: int,
    at_home: int,
) -> IntArray:
    """Return the least time of every attempt; `NEVER` if it fails, or takes longer than `time`.

    at_home: the peak without replicas.
    """
    least, unit = np.full(len(thresholds), NEVER, np.int64), domains[0].unit
    for number in range(0 if rates[1] > 0 else LIMITED, len(thresholds)):
        peak, transfers, replicas, possible = 0, 0, 0, True
        for domain in domains:
            threshold = threshold_with(domain, thresholds[number], links[number])
            peak = max(peak, threshold)
            if peak >= at_home or time_of(peak, unit, 1, 1, rates) > time:
                possible = False
                break
            most, needed = least_transfers(domain, threshold)
            transfers, replicas = max(transfers, most), replicas + needed
            possible = possible and needed <= domain.max_replicas
        # If these are the fewest links for the lowest threshold, the first attempt has them, too.
        repeated = number > 0 and transfers == links[number] and peak == thresholds[0]
        if possible and not (repeated and len(domains) == 1):
            least[number] = time_of(peak, unit, transfers, replicas, rates)
    return least


def least_transfers(domain: Domain, threshold: int) -> tuple[int, int]:
    """Return the least transfers of one rank, and the fewest replicas, that can meet a threshold.

    A replica serves no more than the emptiest rank lacks.
    """
    heights = domain.rank_loads - limits_at(threshold, domain.weights, domain.scale)
    widest, most, replicas = -heights.min(), 0, 0
    for rank, height in enumerate(heights):
        left, given = height, 0
        while left > 0:
            left -= domain.loads[domain.hottest_first[domain.first[rank] + given]]
            given += 1
        if height > 0:
            most, replicas = max(most, given), replicas + max(given, -(-height // widest))
    return most, replicas


def time_of(peak: int, unit: int, transfers: int, replicas: int, rates: Numbers) -> int:
    """Return the time of a plan, as `config.Rates.time` without products of more than 63 bits."""
    row, copy, each, layer = rates
    rows = row * (peak // unit) + row * (peak % unit) // unit
    return rows + copy * transfers + each * replicas + (layer if replicas > 0 else 0)
