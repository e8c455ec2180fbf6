"""Members that look for circles: ranks that can keep to the threshold among themselves.

A circle of k ranks needs k - 1 copies, so many small circles need few copies. A rank's *height* is
its load above the threshold; a circle is closed when its heights add up to 0 or less. What it then
lacks is wasted: nobody else can use it. There is little to waste, if the threshold is near the
mean, so circles are closed where they fit tightly, and drawn wider where they do not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

from ultraep.backends.reference.members import Attempt, Domain, take

MOST_RANKS = 128  # of a domain in which circles are looked for: every pair of ranks is looked at
# (halves, smallest first): what one donor may waste, in halves of its even share, and which donor
# chooses first. Each finds what the others miss.
VARIANTS = ((4, False), (4, True), (1, True))


@dataclass
class Circles:
    """A partition of the ranks. Every circle is known by one of its ranks."""

    height: list[int]  # of the circle of that name, while it is open
    circle_of_rank: list[int] = field(init=False)
    open: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.circle_of_rank = list(range(len(self.height)))
        self.open = set(self.circle_of_rank)

    def join(self, circle: int, other: int) -> None:
        """The second becomes part of the first."""
        self.height[circle] += self.height[other]
        self.open.remove(other)
        rename(self.circle_of_rank, other, circle)


def rename(circle_of_rank: list[int], old: int, new: int) -> None:
    """All ranks of the old circle are in the new one."""
    for rank, circle in enumerate(circle_of_rank):
        if circle == old:
            circle_of_rank[rank] = new


def draw_circles(heights: list[int], halves: int, smallest_first: bool) -> list[int]:
    """The circle of every rank. Donor by donor, the first of these that wastes little:

    with the tightest other circle that takes its surplus; with the tightest two; and if there is no
    such, the donor joins the first of these all the same, or the roomiest, and goes on with that.
    """
    circles = Circles(heights)
    height = circles.height
    while donors := [c for c in circles.open if height[c] > 0]:
        sign = 1 if smallest_first else -1
        donor = min(donors, key=lambda c: (sign * height[c], c))
        others = sorted(circles.open - {donor}, key=lambda c: (-height[c], c))
        slack = -sum(height[c] for c in circles.open)
        allowed = slack * halves // (2 * len(donors))
        tight = next((c for c in others if height[c] <= -height[donor]), None)
        if tight is not None and -(height[donor] + height[tight]) <= allowed:
            circles.join(tight, donor)
            circles.open.remove(tight)
        elif pair := _tightest_pair(others, height, -height[donor], allowed):
            circles.join(pair[0], donor)
            circles.join(pair[0], pair[1])
            circles.open.remove(pair[0])
        else:
            roomiest = min(others, key=lambda c: (height[c], c), default=donor)
            if tight is None and height[roomiest] >= 0:
                break
            circles.join(roomiest if tight is None else tight, donor)
    return circles.circle_of_rank


def _tightest_pair(
    others: list[int], height: list[int], most: int, allowed: int
) -> tuple[int, int] | None:
    """Two circles that are at most so high together, as high as there are; then the highest one.

    None if they would waste more than is allowed.
    """
    pairs = [
        (a, b)
        for a, b in combinations(others, 2)
        if most - allowed <= height[a] + height[b] <= most
    ]
    return max(pairs, key=lambda p: (height[p[0]] + height[p[1]], height[p[0]]), default=None)


def within_circles(domain: Domain, threshold: int, halves: int, smallest_first: bool) -> Attempt:
    """As `alias`, but inside the circle of the fullest rank, as long as anyone there has room."""
    attempt = Attempt(domain, threshold)
    heights = [load - threshold for load in attempt.rank_loads]
    circle_of_rank = draw_circles(heights, halves, smallest_first)
    ranks = range(len(domain.experts))
    while attempt.peak > threshold and not attempt.full:
        fullest = max(ranks, key=lambda r: (attempt.rank_loads[r], -r))
        circle = circle_of_rank[fullest]
        inside = [r for r in ranks if circle_of_rank[r] == circle and attempt.room(r)]
        host = max(inside or ranks, key=lambda r: (attempt.room(r), -r))
        if not attempt.room(host):
            break
        rename(circle_of_rank, circle_of_rank[host], circle)
        if not take(attempt, host, [r for r in ranks if circle_of_rank[r] == circle]):
            break
    return attempt
