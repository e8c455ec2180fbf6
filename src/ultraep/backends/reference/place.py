"""Which expert is copied into which rank, and how many tokens each copy serves.

Every fast-link domain is solved for itself, against one threshold that all of them share:
no rank shall serve more. When no attempt meets it, a search finds the least threshold that alias
planning meets. Where time decides, several thresholds are tried, and the quickest plan is taken.

Shapes: E experts, C copies.
"""

from __future__ import annotations

import numpy as np

from ultraep.arrays import IntArray
from ultraep.backends.limits import Limits
from ultraep.backends.reference.members import (
    MOST_RANKS,
    VARIANTS,
    Attempt,
    Domain,
    alias,
    close_circles,
    thrifty,
    window,
)
from ultraep.config import PARTS, UNLIMITED, Rates, rungs_of

GUESSES = 4  # of the search, before it bisects
LINKS = (1, 2)  # that are tried, though they may not suffice for the tolerance that is asked for


def probe(domain: Domain, threshold: int) -> Attempt:
    """The best attempt at this threshold: the lowest peak above it.

    Then the fewest copies, then the lowest fan-out, then the fewest experts that one rank gives
    away.
    """
    attempts = [alias(domain, threshold)]
    if threshold > domain.mean:
        attempts.insert(0, window(domain, threshold))  # it moves fewer tokens
        if len(domain.experts) <= MOST_RANKS:
            attempts += [close_circles(domain, threshold, *variant) for variant in VARIANTS]

    def cost(a: Attempt) -> tuple[int, int, int, int]:
        return max(a.peak, threshold), len(a.copies), a.fanout, a.egress

    return min(attempts, key=cost)


def solve(domain: Domain, best: Attempt) -> Attempt:
    """The best attempt at a threshold, or at the least one above it that alias planning meets.

    An attempt that fails says where the next may succeed: the peak comes down in proportion as the
    threshold goes up. When one has succeeded, the threshold below it is tried; bisection does the
    rest.
    """
    threshold = best.threshold
    if best.peak <= threshold:
        return best
    bound = least_peak_of(domain)
    last = alias(domain, threshold)
    failed = max(threshold, bound - 1)
    middle = max(failed + 1, threshold + excess_share(last))
    met = tries = 0
    while best.peak - failed > 1:
        middle = min(middle, best.peak - 1)
        attempt = alias(domain, middle)
        best = min(best, attempt, key=lambda a: a.peak)
        tries += 1
        if attempt.peak <= middle:
            met += 1
            middle = best.peak - 1 if met == 1 else (failed + best.peak) // 2
        else:
            failed = middle
            guess = middle + max(1, step(last, attempt))
            middle = guess if not met and tries < GUESSES else (failed + best.peak) // 2
            last = attempt
    return best


def excess_share(attempt: Attempt) -> int:
    """What is too much, shared among the ranks that are full, rounded up."""
    over = [load - attempt.threshold for load in attempt.rank_loads]
    return -(-sum(max(0, tokens) for tokens in over) // sum(tokens >= 0 for tokens in over))


def step(last: Attempt, attempt: Attempt) -> int:
    """How much higher the threshold would have to be if the peak went on as since the last one."""
    above = attempt.peak - attempt.threshold
    gain = last.peak - last.threshold - above
    if gain <= 0:
        return excess_share(attempt)
    return -(-above * (attempt.threshold - last.threshold) // gain)


def place(expert_loads: IntArray, limits: Limits) -> IntArray:
    """[C, 3] expert, host rank and quota of every copy, ordered by expert, then host."""
    domains = domains_of(expert_loads, limits)
    if limits.rates[0]:
        attempts = quickest(domains, limits.tolerance_parts, Rates.from_numbers(limits.rates))
    else:
        threshold = shared_threshold(domains, limits.tolerance_parts)
        attempts = [solve(d, probe(d, threshold)) for d in domains]
    copies = [
        (expert, index * limits.domain + host, quota)
        for index, attempt in enumerate(attempts)
        for expert, host, quota in attempt.copies
    ]
    return np.array(sorted(copies), dtype=np.int64).reshape(-1, 3)


def domains_of(expert_loads: IntArray, limits: Limits) -> list[Domain]:
    """All fast-link domains."""
    first, domains = limits.first_of_rank, []
    for begin in range(0, len(first) - 1, limits.domain):
        homes = [
            limits.experts_by_rank[first[r] : first[r + 1]].tolist()
            for r in range(begin, begin + limits.domain)
        ]
        load = {e: int(expert_loads[e]) for experts in homes for e in experts}
        domains.append(Domain(homes, load, limits.slots, limits.min_tokens, limits.max_replicas))
    return domains


def shared_threshold(domains: list[Domain], tolerance_parts: int) -> int:
    """One for all: a lighter domain need not be flatter than the heaviest can be."""
    return max(
        max(d.mean, sum(d.load.values()) * (PARTS + tolerance_parts) // (len(d.experts) * PARTS))
        for d in domains
    )


def quickest(domains: list[Domain], tolerance_parts: int, rates: Rates) -> list[Attempt]:
    """The quickest of the exact plan, of attempts at larger thresholds, and of no copies.

    Then the one with the fewest copies, then the first one. The exact plan is solved and has the
    time of the peak that it reaches. An attempt has the time of its threshold, and does not count
    if it does not meet it.
    """
    rungs = [shared_threshold(domains, parts) for parts in rungs_of(tolerance_parts)]
    exact = [solve(d, alias(d, rungs[0])) for d in domains]
    plans = [(max(a.peak for a in exact), exact)]
    limited, others = attempts_of(domains, rungs, few_links=rates.copy > 0)
    limited = [attempts for attempts in limited if most_transfers(attempts) < most_transfers(exact)]
    for attempts in limited + others:
        if all(a.peak <= a.threshold for a in attempts):
            plans.append((max(a.threshold for a in attempts), attempts))
    none = [Attempt(d, threshold=0) for d in domains]
    plans.append((max(a.peak for a in none), none))

    def cost(plan: tuple[int, list[Attempt]]) -> tuple[int, int]:
        peak, attempts = plan
        copies = sum(len(a.copies) for a in attempts)
        return rates.time(peak=peak, transfers=most_transfers(attempts), copies=copies), copies

    return min(plans, key=cost)[1]


def attempts_of(
    domains: list[Domain], rungs: list[int], few_links: bool
) -> tuple[list[list[Attempt]], list[list[Attempt]]]:
    """Attempts at the lowest rung that may need fewer links than the exact plan; at all others.

    If links cost anything, each rung is attempted with the fewest links that it needs. With even
    fewer links, the threshold is the least one that they can meet.
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
    """Most replicas that one rank receives, or experts that it gives away, in any domain."""
    return max(a.transfers for a in attempts)


def lower_bound(expert_loads: IntArray, limits: Limits) -> int:
    """Tokens on the fullest rank that no plan can go below."""
    return max(least_peak_of(domain) for domain in domains_of(expert_loads, limits))


def least_peak_of(domain: Domain) -> int:
    """The least that the fullest rank of a domain can hold, whatever the plan.

    Take the k emptiest ranks. They have k * slots slots, so beyond their own load they can serve at
    most the k * slots hottest experts that live outside of them. All the rest stays with the other
    ranks, and the fullest of those holds at least the mean of that rest. The best k gives the
    bound: k = 0 is the mean, and without slots k = G - 1 is the fullest rank.
    """
    rank_loads, ranks = domain.rank_loads, len(domain.experts)
    emptiest_first = sorted(range(ranks), key=lambda r: (rank_loads[r], r))
    best = 0
    for k in range(ranks):
        outside = [domain.load[e] for r in emptiest_first[k:] for e in domain.experts[r]]
        copies = min(k * domain.slots, domain.max_replicas)
        movable = sum(sorted(outside, reverse=True)[:copies])
        rest = sum(rank_loads[r] for r in emptiest_first[k:]) - movable
        best = max(best, -(-rest // (ranks - k)))
    return best
