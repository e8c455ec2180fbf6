"""Which experts are replicated on which ranks, and how many rows each replica serves.

Every fast-link domain is solved on its own, against a threshold that all domains share: no rank
should serve more rows, or with speeds, more than its share. If `thrifty` does not meet it, a search
finds the least threshold that `alias` meets. With rates, several thresholds are tried, and the
quickest plan wins.

Shapes: E experts, C replicas.
"""

from __future__ import annotations

import numpy as np

from ultraep.arrays import IntArray
from ultraep.backends.limits import Limits
from ultraep.backends.reference.members import Attempt, Domain, alias, thrifty
from ultraep.config import PARTS, UNLIMITED, Rates, rungs_of

GUESSES = 4  # steps of the search before it bisects
SHORT = 1 << 14  # times `MAX_THRESHOLD`, less than 2**62
LINKS = (1, 2)  # always tried, though they may not suffice for the tolerance


def balance(domain: Domain, threshold: int) -> Attempt:
    """Return the attempt of `thrifty`; if it misses the threshold, the search from `alias`."""
    attempt = thrifty(domain, threshold, UNLIMITED)
    return attempt if attempt.peak <= threshold else solve(domain, threshold)


def solve(domain: Domain, threshold: int) -> Attempt:
    """Return the attempt of `alias`, or one at the least threshold above it that `alias` meets.

    A failed attempt predicts the next threshold: the peak falls in proportion as the threshold
    rises. After a success, the threshold one row below it is tried, then bisection.
    """
    best = last = alias(domain, threshold)
    if best.peak <= threshold:
        return best
    bound, unit = least_peak_of(domain), domain.unit
    failed = max(threshold, bound - 1)
    middle = max(failed + 1, threshold + excess_share(last))
    met = tries = 0
    while best.peak - failed > unit:
        middle = min(middle, best.peak - unit)
        attempt = alias(domain, middle)
        best = min(best, attempt, key=lambda a: a.peak)
        tries += 1
        if attempt.peak <= middle:
            met += 1
            middle = best.peak - unit if met == 1 else (failed + best.peak) // 2
        else:
            failed = middle
            guess = middle + max(1, step(last, attempt))
            middle = guess if not met and tries < GUESSES else (failed + best.peak) // 2
            last = attempt
    return best


def excess_share(attempt: Attempt) -> int:
    """Return how far to raise the threshold so that full ranks may keep their surplus."""
    full = [rank for rank, rows in enumerate(attempt.heights) if rows >= 0]
    weight = sum(attempt.domain.weights[rank] for rank in full)
    return -(-sum(attempt.surplus.values()) * attempt.domain.scale // weight)


def step(last: Attempt, attempt: Attempt) -> int:
    """Return how far to raise the threshold if the peak falls on as since the last attempt."""
    above = attempt.peak - attempt.threshold
    gain = last.peak - last.threshold - above
    if gain <= 0:
        return excess_share(attempt)
    while attempt.domain.speeds and above >= SHORT:  # the product below must fit into 63 bits
        above, gain = above // 2, max(1, gain // 2)
    return -(-above * (attempt.threshold - last.threshold) // gain)


def place(expert_loads: IntArray, limits: Limits) -> IntArray:
    """[C, 3] expert, host rank and quota of every replica, sorted by expert, then host."""
    domains = domains_of(expert_loads, limits)
    if limits.rates[0]:
        attempts = quickest(domains, limits.tolerance_parts, Rates.from_numbers(limits.rates))
    else:
        threshold = shared_threshold(domains, limits.tolerance_parts)
        attempts = [balance(domain, threshold) for domain in domains]
    copies = [
        (expert, index * limits.domain + host, quota)
        for index, attempt in enumerate(attempts)
        for expert, host, quota in attempt.copies
    ]
    return np.array(sorted(copies), dtype=np.int64).reshape(-1, 3)


def domains_of(expert_loads: IntArray, limits: Limits) -> list[Domain]:
    """Return all fast-link domains."""
    first, domains = limits.first_of_rank, []
    for begin in range(0, len(first) - 1, limits.domain):
        homes = [
            limits.experts_by_rank[first[r] : first[r + 1]].tolist()
            for r in range(begin, begin + limits.domain)
        ]
        load = {e: int(expert_loads[e]) for experts in homes for e in experts}
        speeds = limits.speeds[begin : begin + limits.domain].tolist()
        speeds = speeds if len(limits.speeds) else []
        numbers = limits.slots, limits.min_tokens, limits.max_replicas
        domains.append(Domain(homes, load, *numbers, speeds))
    return domains


def shared_threshold(domains: list[Domain], tolerance_parts: int) -> int:
    """Return one threshold for all: a lighter domain need not be flatter than the heaviest."""
    parts = PARTS + tolerance_parts
    return max(max(d.mean, d.total * d.scale * parts // (sum(d.weights) * PARTS)) for d in domains)


def quickest(domains: list[Domain], tolerance_parts: int, rates: Rates) -> list[Attempt]:
    """Return the quickest of the exact plan, attempts at larger thresholds, and no replicas.

    Ties go to the fewest replicas, then to the first. The exact plan takes the time of its peak. An
    attempt takes the time of its threshold, and counts only if it meets the threshold.
    """
    rungs = [shared_threshold(domains, parts) for parts in rungs_of(tolerance_parts)]
    exact = [solve(domain, rungs[0]) for domain in domains]
    plans = [(max(a.peak for a in exact), exact)]
    limited, unlimited = attempts_of(domains, rungs, few_links=rates.copy > 0)
    limited = [attempts for attempts in limited if most_transfers(attempts) < most_transfers(exact)]
    for attempts in limited + unlimited:
        if all(a.peak <= a.threshold for a in attempts):
            plans.append((max(a.threshold for a in attempts), attempts))
    none = [Attempt(d, threshold=0) for d in domains]
    plans.append((max(a.peak for a in none), none))

    def cost(plan: tuple[int, list[Attempt]]) -> tuple[int, int]:
        peak, attempts = plan
        copies = sum(len(a.copies) for a in attempts)
        transfers, unit = most_transfers(attempts), domains[0].unit
        return rates.time(peak=peak, unit=unit, transfers=transfers, copies=copies), copies

    return min(plans, key=cost)[1]


def attempts_of(
    domains: list[Domain], rungs: list[int], few_links: bool
) -> tuple[list[list[Attempt]], list[list[Attempt]]]:
    """Return attempts that may need fewer links than the exact plan, and all others.

    If links cost time, each rung is attempted with the fewest links it needs. The lowest rung is
    also attempted with LINKS; its threshold is then the least one that so few links can meet.
    """

    def attempts(thresholds: list[int], links: int | None) -> list[Attempt]:
        return [
            thrifty(domain, threshold, links or domain.fewest_links(threshold))
            for domain, threshold in zip(domains, thresholds, strict=True)
        ]

    lowest, *higher = ([threshold] * len(domains) for threshold in rungs)
    if not few_links:
        return [], [attempts(thresholds, UNLIMITED) for thresholds in higher]
    limited = [attempts(lowest, None)]
    for links in LINKS:
        floors = [max(rungs[0], domain.least_peak(links)) for domain in domains]
        limited.append(attempts(floors, links))
    return limited, [attempts(thresholds, None) for thresholds in higher]


def most_transfers(attempts: list[Attempt]) -> int:
    """Return the most transfers of one rank, in any domain."""
    return max(a.transfers for a in attempts)


def lower_bound(expert_loads: IntArray, limits: Limits) -> int:
    """Return the least threshold that any plan can meet; without speeds, in rows."""
    return max(least_peak_of(domain) for domain in domains_of(expert_loads, limits))


def least_peak_of(domain: Domain) -> int:
    """Return the least threshold that any plan of a domain can meet.

    The k emptiest ranks have k * slots slots, so beyond their own load they serve at most the
    k * slots hottest experts of the other ranks. The rest stays with the other ranks, whose fullest
    serves at least the mean of it. The best k gives the bound: k = 0 is the mean, and without slots
    k = G - 1 is the fullest rank. With speeds, ranks share the rest in proportion to their speeds.
    """
    rank_loads, weights, scale = domain.rank_loads, domain.weights, domain.scale
    ranks = len(rank_loads)
    emptiest_first = sorted(
        range(ranks), key=lambda r: (-(-rank_loads[r] * scale // weights[r]), r)
    )
    best = domain.mean
    for k in range(ranks):
        outside = [domain.load[e] for r in emptiest_first[k:] for e in domain.experts[r]]
        copies = min(k * domain.slots, domain.max_replicas)
        movable = sum(sorted(outside, reverse=True)[:copies])
        rest = sum(rank_loads[r] for r in emptiest_first[k:]) - movable
        best = max(best, -(-rest * scale // sum(weights[r] for r in emptiest_first[k:])))
    return best
