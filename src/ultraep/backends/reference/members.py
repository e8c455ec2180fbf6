"""Greedy heuristics that try to meet a threshold.

alias     the emptiest rank takes exactly what it lacks from the fullest
thrifty   alias, but a surplus that fits tightly into one host goes there alone

A threshold limits the rows of every rank. Without speeds it counts rows, and all ranks have the
same limit. With speeds it counts thousandths of a row at nominal speed, and limits are in
proportion to speeds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

from ultraep.config import MAX_ROWS, PARTS, UNITS_PER_ROW, UNLIMITED


@dataclass
class Domain:
    """The ranks of one fast-link domain."""

    experts: list[list[int]]  # home experts of every rank, ascending
    load: dict[int, int]  # rows of every expert
    slots: int
    min_tokens: int
    max_replicas: int
    speeds: list[int] = field(default_factory=list)  # of every rank; empty: equal

    def __post_init__(self) -> None:
        self.rank_loads = [sum(self.load[e] for e in own) for own in self.experts]
        self.total = sum(self.rank_loads)
        self.scale, self.unit = (PARTS, UNITS_PER_ROW) if self.speeds else (1, 1)
        self.weights = self.speeds or [1] * len(self.experts)

    def limits(self, threshold: int) -> list[int]:
        """Return the most rows of every rank."""
        return [min(threshold * weight // self.scale, MAX_ROWS) for weight in self.weights]

    def peak(self, rank_loads: list[int]) -> int:
        """Return the least threshold that allows these loads."""
        return max(
            -(-load * self.scale // weight)
            for load, weight in zip(rank_loads, self.weights, strict=True)
        )

    @cached_property
    def mean(self) -> int:
        """The least threshold whose limits together allow all rows; without speeds the mean load.

        Rounding down takes less than a row from each limit, so the search needs to examine the
        thresholds of one row more per rank only.
        """
        ideal, weight = self.total * self.scale // sum(self.weights), sum(self.weights)
        thresholds = range(ideal, ideal + len(self.weights) * self.scale // weight + 3)
        return thresholds[bisect_left(thresholds, self.total, key=lambda t: sum(self.limits(t)))]

    def hottest(self, rank: int, number: int) -> list[int]:
        """Return the home experts with the most rows; the lower index on a tie."""
        return sorted(self.experts[rank], key=lambda e: (-self.load[e], e))[:number]

    def least_peak(self, links: int) -> int:
        """Return the peak if every rank gives away all rows of its `links` hottest experts."""
        kept = [
            load - sum(self.load[e] for e in self.hottest(rank, links))
            for rank, load in enumerate(self.rank_loads)
        ]
        return self.peak(kept)

    def fewest_links(self, threshold: int) -> int:
        """Return the fewest experts that each rank must give away to meet the threshold."""
        return next(links for links in count(1) if self.least_peak(links) <= threshold)


class Attempt:
    """A plan under construction. `copies` are its replicas: expert, host, quota.

    links: most replicas that a rank may receive, and most of its experts that it may give away.
    """

    def __init__(self, domain: Domain, threshold: int, links: int = UNLIMITED) -> None:
        self.domain, self.threshold, self.limits = domain, threshold, domain.limits(threshold)
        self.rank_loads, self.at_home = list(domain.rank_loads), dict(domain.load)
        ranks = range(len(self.rank_loads))
        self.movable = [domain.hottest(rank, links) for rank in ranks]
        self.free_slots = [min(domain.slots, links)] * len(ranks)
        self.copies: list[tuple[int, int, int]] = []

    @property
    def peak(self) -> int:
        """The least threshold that this attempt meets."""
        return self.domain.peak(self.rank_loads)

    @property
    def full(self) -> bool:
        return len(self.copies) >= self.domain.max_replicas

    @property
    def unfinished(self) -> bool:
        """Whether a rank is above the threshold and another replica is allowed."""
        return self.peak > self.threshold and not self.full

    @property
    def egress(self) -> int:
        """Most experts that one rank gives away."""
        replicated = {expert for expert, _, _ in self.copies}
        return max(len(replicated.intersection(experts)) for experts in self.domain.experts)

    @property
    def transfers(self) -> int:
        """Most replicas that one rank receives, or experts that it gives away."""
        received = Counter(host for _, host, _ in self.copies)
        return max(self.egress, *received.values(), 0)

    @property
    def heights(self) -> list[int]:
        """Rows of every rank above its limit; negative: below."""
        return [load - limit for load, limit in zip(self.rank_loads, self.limits, strict=True)]

    @property
    def surplus(self) -> dict[int, int]:
        """Rows above the limit of every donor."""
        return {rank: rows for rank, rows in enumerate(self.heights) if rows > 0}

    @property
    def room(self) -> dict[int, int]:
        """Rows that a new replica may serve on every rank that can host one."""
        least = max(1, self.domain.min_tokens)
        free = ((rank, -rows) for rank, rows in enumerate(self.heights) if self.free_slots[rank])
        return {rank: rows for rank, rows in free if rows >= least}

    def hottest(self, rank: int) -> int:
        """Return the movable expert with the most rows at home; the lower index on a tie."""
        return max(self.movable[rank], key=lambda e: (self.at_home[e], -e))

    def heat(self, rank: int) -> int:
        """Return the rows of the hottest expert."""
        return self.at_home[self.hottest(rank)]

    def ready(self, surplus: dict[int, int]) -> list[int]:
        """Return the donors whose whole surplus one replica can take."""
        least = self.domain.min_tokens
        return [donor for donor, rows in surplus.items() if least <= rows <= self.heat(donor)]

    def replicate(self, donor: int, host: int, quota: int, expert: int | None = None) -> None:
        """Move `quota` rows of the donor's expert, by default the hottest, to a new replica."""
        expert = self.hottest(donor) if expert is None else expert
        assert 0 < quota <= self.at_home[expert]
        self.copies.append((expert, host, quota))
        self.at_home[expert] -= quota
        self.rank_loads[donor] -= quota
        self.rank_loads[host] += quota
        self.free_slots[host] -= 1


def alias(domain: Domain, threshold: int, links: int = UNLIMITED) -> Attempt:
    """Let the emptiest rank take exactly what it lacks from the fullest.

    As in Walker's alias method the donor may fall below the threshold; it is then itself served as
    the emptiest. With one slot per home expert on every rank and equal speeds, this always meets
    the mean.
    """
    attempt = Attempt(domain, threshold, links)
    while attempt.unfinished and take(attempt):
        pass
    return attempt


def take(attempt: Attempt) -> bool:
    """Let the emptiest rank take what it lacks from the fullest rank that can give it all.

    If no rank can, take from the one with the hottest expert. Return whether that is a replica.
    """
    room, surplus = attempt.room, attempt.surplus
    if not room:
        return False
    host = max(room, key=lambda r: (room[r], -r))
    enough = [r for r in surplus if attempt.heat(r) >= room[host]]
    if enough:
        donor = max(enough, key=lambda r: (surplus[r], -r))
    else:
        donor = max(surplus, key=lambda r: (attempt.heat(r), surplus[r], -r))
    quota = min(room[host], attempt.heat(donor))
    if quota < attempt.domain.min_tokens:
        return False
    attempt.replicate(donor, host, quota)
    return True


def thrifty(domain: Domain, threshold: int, links: int) -> Attempt:
    """Like `alias`, but a surplus that fits tightly into one host goes there alone.

    One replica then settles two ranks and wastes the remaining room of the host. All donors
    together may waste the slack, each an even share of it. Less than a row per rank is not worth
    the search: that is the rounding of the mean.
    """
    attempt = Attempt(domain, threshold, links)
    slack = sum(attempt.limits) - domain.total
    if slack < len(attempt.rank_loads):
        return alias(domain, threshold, links)
    while attempt.unfinished:
        surplus = attempt.surplus
        donor, host, wasted = _tightest_pair(attempt, surplus)
        if wasted is not None and wasted * len(surplus) <= slack:
            attempt.replicate(donor, host, surplus[donor])
            attempt.free_slots[host] = 0
            slack -= wasted
        elif not take(attempt):
            break
    return attempt


def _tightest_pair(attempt: Attempt, surplus: dict[int, int]) -> tuple[int, int, int | None]:
    """Return the smallest surplus that one expert carries, the tightest host, and the waste.

    Ties go to the higher rank. The waste is None without such a pair.
    """
    ready, room = attempt.ready(surplus), attempt.room
    if not ready:
        return -1, -1, None
    donor = min(ready, key=lambda r: (surplus[r], -r))
    hosts = [r for r in room if room[r] >= surplus[donor]]
    host = min(hosts, key=lambda r: (room[r], -r), default=-1)
    return donor, host, room[host] - surplus[donor] if hosts else None
