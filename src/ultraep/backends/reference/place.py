"""Which expert is copied into which rank, and how many tokens each copy serves.

Every fast-link domain is solved for itself, against one threshold that all of them share:
no rank shall serve more. Two small greedy members can meet a threshold; when neither does,
a search finds the least threshold that one of them meets.

Shapes: R ranks, E experts, C copies. `first_of_rank[r]..first_of_rank[r + 1]` are the places of
rank r's home experts in `experts_by_rank`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ultraep.arrays import IntArray
from ultraep.backends.reference.bound import lower_bound_of_domain
from ultraep.config import PARTS


@dataclass
class Domain:
    """The ranks of one fast-link domain, and what is still at home on each of them."""

    experts: list[list[int]]  # home experts of every rank, ascending
    load: dict[int, int]  # tokens of every expert
    slots: int
    min_tokens: int
    max_replicas: int

    @property
    def rank_loads(self) -> list[int]:
        return [sum(self.load[e] for e in experts) for experts in self.experts]

    @property
    def mean(self) -> int:
        """The mean rank load, rounded up."""
        return -(-sum(self.rank_loads) // len(self.experts))


@dataclass
class Attempt:
    """A plan under construction: loads so far, tokens still at home, free slots, copies made."""

    domain: Domain
    threshold: int
    rank_loads: list[int] = field(init=False)
    at_home: dict[int, int] = field(init=False)
    free_slots: list[int] = field(init=False)
    copies: list[tuple[int, int, int]] = field(default_factory=list)  # expert, host, quota

    def __post_init__(self) -> None:
        self.rank_loads = self.domain.rank_loads
        self.at_home = dict(self.domain.load)
        self.free_slots = [self.domain.slots] * len(self.rank_loads)

    @property
    def peak(self) -> int:
        return max(self.rank_loads)

    @property
    def full(self) -> bool:
        return len(self.copies) >= self.domain.max_replicas

    def hottest(self, rank: int) -> int:
        """The home expert with the most tokens still at home; the lower index on a tie."""
        return max(self.domain.experts[rank], key=lambda e: (self.at_home[e], -e))

    def heat(self, rank: int) -> int:
        """Tokens of the hottest expert."""
        return self.at_home[self.hottest(rank)]

    def room(self, rank: int) -> int:
        """Tokens that a copy on this rank may still serve; 0 if it cannot hold one."""
        room = self.threshold - self.rank_loads[rank]
        return room if self.free_slots[rank] and room >= self.domain.min_tokens else 0

    def copy(self, expert: int, donor: int, host: int, quota: int) -> None:
        """Move `quota` tokens of the donor's expert into a new copy on the host."""
        assert 0 < quota <= self.at_home[expert]
        self.copies.append((expert, host, quota))
        self.at_home[expert] -= quota
        self.rank_loads[donor] -= quota
        self.rank_loads[host] += quota
        self.free_slots[host] -= 1


def alias(domain: Domain, threshold: int) -> Attempt:
    """The emptiest rank takes from the fullest, exactly what it lacks.

    As in Walker's alias method the donor may fall below the threshold; it then takes its own turn
    as the emptiest. With as many slots as home experts per rank this always meets the mean.
    """
    attempt = Attempt(domain, threshold)
    ranks = range(len(domain.experts))
    while attempt.peak > threshold and not attempt.full:
        host = max(ranks, key=lambda r: (attempt.room(r), -r))
        need = attempt.room(host)
        donors = [r for r in ranks if attempt.rank_loads[r] > threshold]
        enough = [r for r in donors if attempt.heat(r) >= need]
        if enough:
            donor = max(enough, key=lambda r: (attempt.rank_loads[r], -r))
        else:
            donor = max(donors, key=lambda r: (attempt.heat(r), attempt.rank_loads[r], -r))
        quota = min(need, attempt.heat(donor))
        if quota < domain.min_tokens:
            break
        attempt.copy(attempt.hottest(donor), donor, host, quota)
    return attempt


def window(domain: Domain, threshold: int) -> Attempt:
    """Every donor gives its surplus to as few hosts as possible, and to the tightest such.

    Hosts stand in a line, the roomiest first. If the m roomiest could take the surplus and no
    fewer could, the last m neighbours in the line that still can are taken. Donors with little
    surplus choose first: they leave the roomy hosts to those who need them.
    """
    attempt = Attempt(domain, threshold)
    ranks = range(len(domain.experts))
    while attempt.peak > threshold:
        donors = [r for r in ranks if attempt.rank_loads[r] > threshold]
        donor = min(donors, key=lambda r: (attempt.rank_loads[r], r))
        expert = attempt.hottest(donor)
        surplus = min(attempt.rank_loads[donor] - threshold, attempt.at_home[expert])
        hosts = sorted((r for r in ranks if attempt.room(r)), key=lambda r: (-attempt.room(r), r))
        chosen = _tightest(hosts, [attempt.room(r) for r in hosts], surplus)
        for host in chosen:
            quota = min(attempt.room(host), max(surplus, domain.min_tokens))
            if attempt.full or attempt.at_home[expert] < quota:
                return attempt
            attempt.copy(expert, donor, host, quota)
            surplus -= quota
        if not chosen:
            break
    return attempt


def _tightest(hosts: list[int], rooms: list[int], surplus: int) -> list[int]:
    """The last run of as few neighbours as possible whose rooms hold the surplus."""
    for length in range(1, len(hosts) + 1):
        if sum(rooms[:length]) >= surplus:
            starts = range(len(hosts) - length, -1, -1)
            start = next(s for s in starts if sum(rooms[s : s + length]) >= surplus)
            return hosts[start : start + length]
    return []


def probe(domain: Domain, threshold: int) -> Attempt:
    """The best attempt at this threshold: the lowest peak above it, then the fewest copies."""
    attempts = [alias(domain, threshold)]
    if threshold > domain.mean:
        attempts.insert(0, window(domain, threshold))
    return min(attempts, key=lambda a: (max(a.peak, threshold), len(a.copies)))


def solve(domain: Domain, threshold: int) -> Attempt:
    """The best attempt at the threshold, or at the least one above it that can be met."""
    best = probe(domain, threshold)
    if best.peak <= threshold:
        return best
    bound = lower_bound_of_domain(domain.experts, domain.load, domain.slots, domain.max_replicas)
    failed = max(threshold, bound - 1)
    middle = failed + 1  # the bound itself is the likeliest to be the answer
    while best.peak - failed > 1:
        attempt = probe(domain, middle)
        if attempt.peak > middle:
            failed = middle
        best = min(best, attempt, key=lambda a: a.peak)
        middle = (failed + best.peak) // 2
    return best


def place(
    expert_loads: IntArray,
    experts_by_rank: IntArray,
    first_of_rank: IntArray,
    domain: int,
    slots: int,
    tolerance_parts: int,
    min_tokens: int,
    max_replicas: int,
) -> IntArray:
    """[C, 3] expert, host rank and quota of every copy, ordered by expert, then host."""
    ranks = len(first_of_rank) - 1
    domains = []
    for begin in range(0, ranks, domain):
        homes = [
            experts_by_rank[first_of_rank[r] : first_of_rank[r + 1]].tolist()
            for r in range(begin, begin + domain)
        ]
        load = {e: int(expert_loads[e]) for experts in homes for e in experts}
        domains.append(Domain(homes, load, slots, min_tokens, max_replicas))
    # One threshold for all: a lighter domain need not be flatter than the heaviest can be.
    threshold = max(
        max(d.mean, sum(d.load.values()) * (PARTS + tolerance_parts) // (domain * PARTS))
        for d in domains
    )
    copies = [
        (expert, index * domain + host, quota)
        for index, d in enumerate(domains)
        for expert, host, quota in solve(d, threshold).copies
    ]
    return np.array(sorted(copies), dtype=np.int64).reshape(-1, 3)
