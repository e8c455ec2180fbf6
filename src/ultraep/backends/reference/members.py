"""Greedy heuristics that try to meet a threshold; `place.py` chooses among their attempts.

alias     the emptiest rank takes exactly what it lacks from the fullest
thrifty   alias, but a surplus that fits tightly into one host goes there alone
window    every donor gives its surplus to the fewest hosts, the tightest ones
circles   small groups of ranks meet the threshold among themselves

A threshold limits the rows of every rank. Without speeds it counts rows, and all ranks have the
same limit. With speeds it counts thousandths of a row at nominal speed, and limits are in
proportion to speeds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

from ultraep.config import MAX_ROWS, PARTS, UNITS_PER_ROW, UNLIMITED

MOST_RANKS = 128  # of a domain in which circles are searched: every pair of ranks is examined
EMPTIEST, FULLEST, SMALLEST = range(3)  # host; donor; donor with the least surplus
# (halves, anchor): what a circle may waste, in halves of an even share of the slack, and the rank
# that is paired if no two ranks fit. Each variant solves cases that the others miss.
VARIANTS = ((1, EMPTIEST), (6, EMPTIEST), (4, FULLEST), (3, SMALLEST))


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
    def fanout(self) -> int:
        """Most replicas of one expert."""
        return max(Counter(expert for expert, _, _ in self.copies).values(), default=0)

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


def window(domain: Domain, threshold: int) -> Attempt:
    """Let every donor give its surplus to the fewest hosts, and to the tightest such.

    Hosts are sorted by room, the roomiest first. If m hosts are needed, the last m neighbours in
    that order which suffice are chosen. Donors with little surplus choose first and leave the roomy
    hosts to the others.
    """
    attempt = Attempt(domain, threshold)
    while surplus := attempt.surplus:
        donor = min(surplus, key=lambda r: (surplus[r], r))
        expert, room = attempt.hottest(donor), attempt.room
        rows = min(surplus[donor], attempt.at_home[expert])
        hosts = _tightest(sorted(room, key=lambda r: (-room[r], r)), room, rows)
        for host in hosts:
            quota = min(room[host], max(rows, domain.min_tokens))
            if attempt.full or attempt.at_home[expert] < quota:
                return attempt
            attempt.replicate(donor, host, quota, expert)
            rows -= quota
        if not hosts:
            break
    return attempt


def _tightest(hosts: list[int], room: dict[int, int], surplus: int) -> list[int]:
    """Return the last run of as few neighbours as possible that have room for the surplus."""
    for length in range(1, len(hosts) + 1):
        if sum(room[host] for host in hosts[:length]) >= surplus:
            runs = [hosts[s : s + length] for s in range(len(hosts) - length, -1, -1)]
            return next(run for run in runs if sum(room[host] for host in run) >= surplus)
    return []


def close_circles(domain: Domain, threshold: int, halves: int, anchor: int) -> Attempt:
    """Close a circle of two; or prepare one with a replica; or do as `alias` does.

    A circle is a set of ranks that can meet the threshold among themselves: the surplus of its
    donors is at most the room of its hosts. A circle of k ranks needs k - 1 replicas, so smaller
    circles need fewer replicas in all. No other rank can use the room that is left: it is wasted.
    Near the mean there is little to waste, so only circles that fit tightly are closed.
    """
    attempt = Attempt(domain, threshold)
    while attempt.unfinished:
        surplus, room = attempt.surplus, attempt.room
        if not room:
            break
        slack = max(0, sum(room.values()) - sum(surplus.values()))
        allowed = slack * halves // (2 * len(surplus))
        ready = attempt.ready(surplus)
        fits = [(d, h) for d in ready for h in room if 0 <= room[h] - surplus[d] <= allowed]
        if fits:
            donor, host = min(fits, key=lambda p: (-surplus[p[0]], p[0], room[p[1]], p[1]))
            attempt.replicate(donor, host, surplus[donor])
            attempt.free_slots[host] = 0  # the rest of its room is wasted
        elif pair := _pair_that_leaves_one(attempt, surplus, room, ready, allowed, anchor):
            attempt.replicate(*pair, room[pair[1]])
        elif not take(attempt):
            break
    return attempt


def _pair_that_leaves_one(
    attempt: Attempt,
    surplus: dict[int, int],
    room: dict[int, int],
    ready: list[int],
    allowed: int,
    anchor: int,
) -> tuple[int, int] | None:
    """Return a donor that fills a host, so that its rest fits tightly with another rank.

    The anchor is one of the two; the other one is chosen to waste least.
    """
    if anchor == EMPTIEST:
        host = max(room, key=lambda h: (room[h], -h))
        pairs = [(donor, host) for donor in surplus]
    else:
        sign = -1 if anchor == FULLEST else 1
        donor = min(surplus, key=lambda d: (sign * surplus[d], d))
        pairs = [(donor, host) for host in room]
    candidates = []
    for donor, host in pairs:
        rest = surplus[donor] - room[host]
        if attempt.heat(donor) < room[host]:
            continue
        if rest <= 0:
            wasted: Iterable[int] = (-rest - surplus[d] for d in ready if d != donor)
        elif attempt.domain.min_tokens <= rest <= _heat_after(attempt, donor, room[host]):
            wasted = (room[h] - rest for h in room if h != host)
        else:
            continue
        candidates += [(waste, donor, host) for waste in wasted if 0 <= waste <= allowed]
    return min(candidates)[1:] if candidates else None


def _heat_after(attempt: Attempt, donor: int, quota: int) -> int:
    """Return the rows of the donor's hottest expert once it has given `quota` rows."""
    rows = [attempt.at_home[e] for e in attempt.domain.experts[donor]]
    rows.remove(attempt.heat(donor))
    return max(attempt.heat(donor) - quota, *rows, 0)
