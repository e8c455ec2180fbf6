"""The least that the fullest rank can hold, whatever the plan.

Take the k emptiest ranks of a domain. They have k * slots slots, so beyond their own load they can
serve at most the k * slots hottest experts that live outside of them. All the rest stays with the
other ranks, and the fullest of those holds at least the mean of that rest. The best k gives the
bound: k = 0 is the mean, and without slots k = G - 1 is the fullest rank.
"""

from __future__ import annotations

from ultraep.arrays import IntArray


def lower_bound(
    expert_loads: IntArray,
    experts_by_rank: IntArray,
    first_of_rank: IntArray,
    domain: int,
    slots: int,
    max_replicas: int,
) -> int:
    """Tokens on the fullest rank that no plan can go below."""
    ranks = len(first_of_rank) - 1
    load = {e: int(tokens) for e, tokens in enumerate(expert_loads)}
    bounds = []
    for begin in range(0, ranks, domain):
        homes = [
            experts_by_rank[first_of_rank[r] : first_of_rank[r + 1]].tolist()
            for r in range(begin, begin + domain)
        ]
        bounds.append(lower_bound_of_domain(homes, load, slots, max_replicas))
    return max(bounds)


def lower_bound_of_domain(
    experts: list[list[int]], load: dict[int, int], slots: int, max_replicas: int
) -> int:
    """The bound of one domain: `experts` are the home experts of each of its ranks."""
    rank_loads = [sum(load[e] for e in homes) for homes in experts]
    emptiest_first = sorted(range(len(experts)), key=lambda r: (rank_loads[r], r))
    best = 0
    for k in range(len(experts)):
        outside = [load[e] for r in emptiest_first[k:] for e in experts[r]]
        movable = sum(sorted(outside, reverse=True)[: min(k * slots, max_replicas)])
        rest = sum(rank_loads[r] for r in emptiest_first[k:]) - movable
        best = max(best, -(-rest // (len(experts) - k)))
    return best
