"""Which experts are replicated on which ranks, and how many rows each replica serves.

Every fast-link domain is solved on its own, against a threshold that all domains share: no rank
should serve more rows, or with speeds, more than its share. If `thrifty` does not meet it, a search
finds the least threshold that `alias` meets. With rates, `quickest` tries several thresholds.

Shapes: R ranks, E experts, C replicas.
"""

from __future__ import annotations

import numpy as np

from ultraep.arrays import IntArray
from ultraep.backends.limits import Limits
from ultraep.backends.reference.heuristics import Attempt, Domain, thrifty
from ultraep.backends.reference.search import (
    least_peak_of,
    mean_of,
    quickest,
    shared_threshold,
    solve,
)
from ultraep.config import PARTS, UNITS_PER_ROW, UNLIMITED


def place(expert_loads: IntArray, limits: Limits) -> IntArray:
    """[C, 3] expert, host rank and quota of every replica, sorted by expert, then host."""
    domains = domains_of(expert_loads, limits)
    if limits.rates[0] > 0:
        return replicas_of(quickest(domains, limits.tolerance_parts, limits.rates), limits)
    threshold = shared_threshold(domains, limits.tolerance_parts)
    return replicas_of([balance(domain, threshold) for domain in domains], limits)


def balance(domain: Domain, threshold: int) -> Attempt:
    """Return the attempt of `thrifty`; if it misses the threshold, the search from `alias`."""
    attempt = thrifty(domain, threshold, UNLIMITED)
    return attempt if attempt.peak <= threshold else solve(domain, threshold)


def lower_bound(expert_loads: IntArray, limits: Limits) -> int:
    """Return the least threshold that any plan can meet; without speeds, in rows."""
    bound = 0
    for domain in domains_of(expert_loads, limits):
        bound = max(bound, least_peak_of(domain))
    return bound


def domains_of(expert_loads: IntArray, limits: Limits) -> list[Domain]:
    """Return all fast-link domains."""
    size, first_of_rank = limits.domain, limits.first_of_rank
    loads = expert_loads[limits.experts_by_rank]
    return [
        domain_of(loads, first_of_rank[begin : begin + size + 1], begin, limits)
        for begin in range(0, len(first_of_rank) - 1, size)
    ]


def domain_of(loads: IntArray, bounds: IntArray, begin: int, limits: Limits) -> Domain:
    """Return the domain whose first rank is `begin`.

    loads: rows of all experts by home rank.   bounds: where the experts of its ranks begin and end.
    """
    size, first = limits.domain, bounds - bounds[0]
    own = loads[bounds[0] : bounds[-1]]
    rank_loads = np.zeros(size, np.int64)
    for rank in range(size):
        for expert in range(first[rank], first[rank + 1]):
            rank_loads[rank] += own[expert]
    weights, scale, unit = np.ones(size, np.int64), 1, 1
    if len(limits.speeds) > 0:
        weights, scale, unit = limits.speeds[begin : begin + size], PARTS, UNITS_PER_ROW
    emptiest_first = np.argsort(-(-rank_loads * scale // weights), kind="mergesort")
    return Domain(
        own, first, sorted_homes(own, first), rank_loads, emptiest_first, weights, scale, unit,
        mean_of(rank_loads, weights, scale), limits.slots, max(1, limits.min_tokens),
        min(limits.max_replicas, size * limits.slots),
    )  # fmt: skip


def sorted_homes(loads: IntArray, first: IntArray) -> IntArray:
    """[E] home experts of every rank, most rows first, then by index."""
    experts = np.arange(len(loads))
    for rank in range(len(first) - 1):
        for expert in range(first[rank] + 1, first[rank + 1]):
            place = expert
            while place > first[rank] and loads[experts[place - 1]] < loads[expert]:
                experts[place] = experts[place - 1]
                place -= 1
            experts[place] = expert
    return experts


def replicas_of(attempts: list[Attempt], limits: Limits) -> IntArray:
    """[C, 3] expert, host rank and quota of every replica, sorted by expert, then host."""
    ranks, total = len(limits.first_of_rank) - 1, 0
    placed = np.empty((ranks * limits.slots, 3), np.int64)
    for index, attempt in enumerate(attempts):
        begin = index * limits.domain
        for replica in attempt.replicas:
            placed[total, 0] = limits.experts_by_rank[limits.first_of_rank[begin] + replica[0]]
            placed[total, 1], placed[total, 2] = begin + replica[1], replica[2]
            total += 1
    placed = placed[:total]
    return placed[np.argsort(placed[:, 0] * ranks + placed[:, 1], kind="mergesort")]
