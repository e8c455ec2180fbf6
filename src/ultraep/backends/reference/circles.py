"""Members that close small circles: ranks that can keep to the threshold among themselves.

A circle of k ranks needs k - 1 copies, so many small circles need few copies. A rank's *height* is
its load above the threshold; a circle can be closed when its heights add up to 0 or less. What it
then lacks is wasted: nobody else can use it. There is little to waste, if the threshold is near the
mean, so circles are closed where they fit tightly. Where none does, a copy is made after which two
ranks fit, and only if there is no such either, the emptiest rank takes from the fullest.
"""

from __future__ import annotations

from dataclasses import dataclass

from ultraep.backends.reference.members import Attempt, Domain, take

MOST_RANKS = 128  # of a domain in which circles are looked for: every pair of ranks is looked at
EMPTIEST, FULLEST, SMALLEST = range(3)  # host; donor; donor with the least surplus
# (halves, anchor): what a circle may waste, in halves of an even share of the slack, and which rank
# is joined with another where no two fit. Each finds what the others miss.
VARIANTS = ((1, EMPTIEST), (6, EMPTIEST), (4, FULLEST), (3, SMALLEST))


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
    """Close a circle of two; or make a copy that leaves two that fit; or do as `alias` does."""
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
