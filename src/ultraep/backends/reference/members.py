"""Small greedy rules that can meet a threshold; `place.py` chooses among their attempts.

alias     the emptiest rank takes from the fullest, exactly what it lacks
thrifty   the same, but a surplus that fits tightly into one host goes there alone
window    every donor gives its surplus to as few hosts as possible, and to the tightest such
circles   small groups of ranks keep to the threshold among themselves
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from ultraep.config import UNLIMITED

MOST_RANKS = 128  # of a domain in which circles are looked for: every pair of ranks is looked at
EMPTIEST, FULLEST, SMALLEST = range(3)  # host; donor; donor with the least surplus
# (halves, anchor): what a circle may waste, in halves of an even share of the slack, and which rank
# is joined with another where no two fit. Each finds what the others miss.
VARIANTS = ((1, EMPTIEST), (6, EMPTIEST), (4, FULLEST), (3, SMALLEST))


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

    def hottest(self, rank: int, number: int) -> list[int]:
        """The home experts with the most tokens; the lower index on a tie."""
        return sorted(self.experts[rank], key=lambda e: (-self.load[e], e))[:number]

    def least_peak(self, links: int) -> int:
        """The peak that is left if every rank gives away all tokens of its hottest experts."""
        return max(
            load - sum(self.load[e] for e in self.hottest(rank, links))
            for rank, load in enumerate(self.rank_loads)
        )

    def fewest_links(self, threshold: int) -> int:
        """The fewest experts that each rank must be able to give away to get to the threshold."""
        return next(links for links in count(1) if self.least_peak(links) <= threshold)


@dataclass
class Attempt:
    """A plan under construction: loads so far, tokens still at home, free slots, copies made.

    links: most replicas that a rank may receive, and most of its experts that it may give away.
    """

    domain: Domain
    threshold: int
    links: int = UNLIMITED
    rank_loads: list[int] = field(init=False)
    at_home: dict[int, int] = field(init=False)
    movable: list[list[int]] = field(init=False)
    free_slots: list[int] = field(init=False)
    copies: list[tuple[int, int, int]] = field(default_factory=list)  # expert, host, quota

    def __post_init__(self) -> None:
        self.rank_loads = self.domain.rank_loads
        self.at_home = dict(self.domain.load)
        ranks = range(len(self.rank_loads))
        self.movable = [self.domain.hottest(rank, self.links) for rank in ranks]
        self.free_slots = [min(self.domain.slots, self.links)] * len(ranks)

    @property
    def peak(self) -> int:
        return max(self.rank_loads)

    @property
    def full(self) -> bool:
        return len(self.copies) >= self.domain.max_replicas

    @property
    def fanout(self) -> int:
        """Most copies of one expert."""
        return _most_of_one(expert for expert, _, _ in self.copies)

    @property
    def ingress(self) -> int:
        """Most copies received by one rank."""
        return _most_of_one(host for _, host, _ in self.copies)

    @property
    def egress(self) -> int:
        """Most different experts given away by one rank."""
        given = {expert for expert, _, _ in self.copies}
        return max(len(given.intersection(experts)) for experts in self.domain.experts)

    @property
    def transfers(self) -> int:
        """Most copies that one rank receives, or experts that it gives away."""
        return max(self.ingress, self.egress)

    def hottest(self, rank: int) -> int:
        """The movable expert with the most tokens still at home; the lower index on a tie."""
        return max(self.movable[rank], key=lambda e: (self.at_home[e], -e))

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


def _most_of_one(values: Iterable[int]) -> int:
    return max(Counter(values).values(), default=0)


def alias(domain: Domain, threshold: int) -> Attempt:
    """The emptiest rank takes from the fullest, exactly what it lacks.

    As in Walker's alias method the donor may fall below the threshold; it then takes its own turn
    as the emptiest. With as many slots as home experts per rank this always meets the mean.
    """
    attempt = Attempt(domain, threshold)
    ranks = range(len(domain.experts))
    while attempt.peak > threshold and not attempt.full:
        host = max(ranks, key=lambda r: (attempt.room(r), -r))
        if not take(attempt, host):
            break
    return attempt


def take(attempt: Attempt, host: int) -> bool:
    """The host takes what it lacks from the fullest rank that can give it all.

    If none can, from the one with the hottest expert. Whether that is a copy.
    """
    need = attempt.room(host)
    donors = [r for r, load in enumerate(attempt.rank_loads) if load > attempt.threshold]
    enough = [r for r in donors if attempt.heat(r) >= need]
    if enough:
        donor = max(enough, key=lambda r: (attempt.rank_loads[r], -r))
    else:
        donor = max(donors, key=lambda r: (attempt.heat(r), attempt.rank_loads[r], -r))
    quota = min(need, attempt.heat(donor))
    if quota < attempt.domain.min_tokens:
        return False
    attempt.copy(attempt.hottest(donor), donor, host, quota)
    return True


def thrifty(domain: Domain, threshold: int, links: int) -> Attempt:
    """`alias`, but a surplus that fits tightly into one host goes there alone.

    One replica then settles two ranks, and the room that is left on the host is wasted. All ranks
    together can waste the slack; one donor may waste an even share of it.
    """
    attempt = Attempt(domain, threshold, links)
    ranks = range(len(domain.experts))
    slack = threshold * len(ranks) - sum(attempt.rank_loads)
    while attempt.peak > threshold and not attempt.full:
        donors = [r for r in ranks if attempt.rank_loads[r] > threshold]
        donor, host = _tightest_pair(attempt, donors)
        surplus = attempt.rank_loads[donor] - threshold
        wasted = attempt.room(host) - surplus
        if wasted >= 0 and wasted * len(donors) <= slack:
            attempt.copy(attempt.hottest(donor), donor, host, surplus)
            attempt.free_slots[host] = 0
            slack -= wasted
        elif not take(attempt, max(ranks, key=lambda r: (attempt.room(r), -r))):
            break
    return attempt


def _tightest_pair(attempt: Attempt, donors: list[int]) -> tuple[int, int]:
    """The smallest surplus that one expert can carry, and the host with the least room for it.

    The higher rank on a tie. If there is no such pair, any donor twice: it has no room.
    """
    surplus = {r: attempt.rank_loads[r] - attempt.threshold for r in donors}
    ready = [r for r in donors if attempt.domain.min_tokens <= surplus[r] <= attempt.heat(r)]
    if not ready:
        return donors[0], donors[0]
    donor = min(ready, key=lambda r: (surplus[r], -r))
    hosts = [r for r in range(len(attempt.rank_loads)) if attempt.room(r) >= surplus[donor]]
    return donor, min(hosts, key=lambda r: (attempt.room(r), -r), default=donor)


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


@dataclass
class Heights:
    """What every rank has above the threshold, or below it if it can host; else 0."""

    attempt: Attempt
    of_rank: list[int]
    allowed: int  # tokens that a circle may waste

    @classmethod
    def now(cls, attempt: Attempt, halves: int) -> Heights:
        loads, threshold = attempt.rank_loads, attempt.threshold
        heights = [
            load - threshold if load > threshold else -attempt.room(rank)
            for rank, load in enumerate(loads)
        ]
        donors = sum(height > 0 for height in heights)
        slack = max(0, -sum(heights))
        return cls(attempt, heights, slack * halves // (2 * donors))

    @property
    def donors(self) -> list[int]:
        return [rank for rank, height in enumerate(self.of_rank) if height > 0]

    @property
    def hosts(self) -> list[int]:
        return [rank for rank, height in enumerate(self.of_rank) if height < 0]

    def ready(self, donor: int) -> bool:
        """Whether one copy can take all its surplus."""
        surplus = self.of_rank[donor]
        return self.attempt.domain.min_tokens <= surplus <= self.attempt.heat(donor)

    def waste(self, height: int, others: list[int]) -> int | None:
        """The least that is wasted if one of the others closes a circle of this height.

        None: more than is allowed.
        """
        wasted = [-height - self.of_rank[other] for other in others]
        return min((w for w in wasted if 0 <= w <= self.allowed), default=None)


def close_circles(domain: Domain, threshold: int, halves: int, anchor: int) -> Attempt:
    """Close a circle of two; or make a copy that leaves two that fit; or do as `alias` does.

    A circle are ranks that can keep to the threshold among themselves. A circle of k ranks needs
    k - 1 copies, so many small circles need few copies. A rank's *height* is its load above the
    threshold; a circle can be closed when its heights add up to 0 or less. What it then lacks is
    wasted: nobody else can use it. There is little to waste, if the threshold is near the mean, so
    circles are closed where they fit tightly.
    """
    attempt = Attempt(domain, threshold)
    while attempt.peak > threshold and not attempt.full:
        heights = Heights.now(attempt, halves)
        if not heights.hosts:
            break
        if pair := _tight_pair(heights):
            donor, host = pair
            attempt.copy(attempt.hottest(donor), donor, host, heights.of_rank[donor])
            attempt.free_slots[host] = 0  # what it lacks is wasted
        elif pair := _pair_that_leaves_one(heights, anchor):
            donor, host = pair
            attempt.copy(attempt.hottest(donor), donor, host, attempt.room(host))
        elif not take(attempt, _emptiest(heights)):
            break
    return attempt


def _tight_pair(heights: Heights) -> tuple[int, int] | None:
    """The largest surplus that one host takes, and wastes little; and the tightest such host."""
    height, hosts = heights.of_rank, heights.hosts
    donors = [d for d in heights.donors if heights.ready(d)]
    donors = [d for d in donors if heights.waste(height[d], hosts) is not None]
    if not donors:
        return None
    donor = max(donors, key=lambda d: (height[d], -d))
    roomy = [h for h in hosts if height[h] <= -height[donor]]
    return donor, max(roomy, key=lambda h: (height[h], -h))


def _pair_that_leaves_one(heights: Heights, anchor: int) -> tuple[int, int] | None:
    """A donor that fills a host, so that what is left of the donor fits tightly with another rank.

    One of the two is the anchor. The other is that which wastes least.
    """
    if anchor == EMPTIEST:
        host = _emptiest(heights)
        pairs = [(donor, host) for donor in heights.donors]
    else:
        sign = -1 if anchor == FULLEST else 1
        donor = min(heights.donors, key=lambda d: (sign * heights.of_rank[d], d))
        pairs = [(donor, host) for host in heights.hosts]
    wasted = [(w, pair) for pair in pairs if (w := _waste_after(heights, *pair)) is not None]
    return min(wasted)[1] if wasted else None


def _waste_after(heights: Heights, donor: int, host: int) -> int | None:
    """What a circle of three wastes, in which the donor fills the host first; None: too much."""
    attempt, room = heights.attempt, -heights.of_rank[host]
    rest = heights.of_rank[donor] - room
    if attempt.heat(donor) < room:
        return None
    if rest <= 0:
        others = [d for d in heights.donors if d != donor and heights.ready(d)]
        return heights.waste(rest, others)
    at_home = [attempt.at_home[e] for e in attempt.domain.experts[donor]]
    at_home.remove(attempt.heat(donor))
    hottest_then = max(attempt.heat(donor) - room, *at_home, 0)
    if not attempt.domain.min_tokens <= rest <= hottest_then:
        return None
    return heights.waste(rest, [h for h in heights.hosts if h != host])


def _emptiest(heights: Heights) -> int:
    return min(heights.hosts, key=lambda h: (heights.of_rank[h], h))
