"""The least threshold that `alias` meets, and a bound that no plan can go below."""

from __future__ import annotations

import numpy as np

from ultraep.arrays import IntArray
from ultraep.backends.reference.heuristics import Attempt, Domain, alias, limits_at
from ultraep.config import PARTS

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
