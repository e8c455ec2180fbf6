"""quota: the planner published with UltraEP. It searches a threshold and fills the emptiest rank.

Source: the UltraEP paper and its public planner (2026). Every fast-link domain searches a low
threshold that no rank exceeds. The excess of a rank goes, hottest expert first, to replicas on the
ranks with most room. A fast search probes 1 % above the mean, then twice a little higher, and
accepts a replica only if it takes a fair share of the excess. If all three probes fail, a slow
search over all thresholds accepts any replica above a floor. The home keeps at least one row.

The floor is `min_tokens_per_replica`; as published it affects only the slow search. Its default is
1, where the published one is 1024, which leaves small microbatches without replicas when the fast
search fails. `tolerance` raises the lower end of the search, like the published
`balance_threshold`; the 1 % of the first probe is added to it. Arithmetic is in integers, where the
published planner uses single precision for its bounds, and homes may be uneven. `max_replicas` is
refused.

Shapes: G ranks of one domain, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ultraep.arrays import IntArray
from ultraep.config import PARTS, BalanceConfig
from ultraep.policies import Problem, register_policy
from ultraep.policies.places import by_domain, refuse_limits
from ultraep.topology import sum_by_rank

FAST_PROBES = 3
KEPT_AT_HOME = 1

Placed = list[tuple[int, int, int]]  # expert, host, quota


@register_policy("quota")
def quota(problem: Problem) -> IntArray:
    """UltraEP's published planner: threshold search, roomiest rank first."""
    refuse_limits(problem.config, "max_replicas")
    slots = problem.topology.slots
    return by_domain(problem, partial(plan_domain, slots=slots, config=problem.config))


def plan_domain(
    loads_E: IntArray, homes_E: IntArray, ranks: int, *, slots: int, config: BalanceConfig
) -> IntArray:
    """[C, 3] expert, host and quota of every replica of a domain."""
    experts: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for expert in np.argsort(-loads_E, kind="stable").tolist():
        experts[homes_E[expert]].append((expert, int(loads_E[expert])))
    domain = Domain(sum_by_rank(loads_E, homes_E, ranks), experts, slots)
    # The mean plus the tolerance, rounded up without floats.
    low = -(-int(loads_E.sum()) * (PARTS + config.tolerance_parts) // (ranks * PARTS))
    placed = search(domain, low, config.min_tokens_per_replica)
    return np.array(placed, dtype=np.int64).reshape(-1, 3)


@dataclass(frozen=True, slots=True)
class Domain:
    """The ranks of one domain, their home experts (hottest first) and their slots."""

    rank_loads: IntArray  # [G]
    experts: list[list[tuple[int, int]]]  # expert and its rows, for every rank
    slots: int


@dataclass(slots=True)
class Probe:
    """A plan under construction."""

    room: IntArray  # [G] rows up to the threshold; 0 when no slot is left
    free_slots: IntArray  # [G]
    min_rows: int  # of a replica
    fair: bool  # a replica must take its fair share of the excess, too
    placed: Placed = field(default_factory=list)

    def replicate(self, expert: int, excess: int, movable: int) -> int:
        """Replicate an expert and return the excess that is left."""
        room_G = self.room.copy()  # without the ranks that hold this expert
        while excess > 0 and movable > 0:
            host = int(room_G.argmax())
            rows = min(excess, int(room_G[host]), movable)
            share = -(-excess // max(int(np.count_nonzero(room_G)), 1)) if self.fair else 0
            if rows < max(share, self.min_rows):
                break
            self.placed.append((expert, host, rows))
            self.free_slots[host] -= 1
            self.room[host] = self.room[host] - rows if self.free_slots[host] else 0
            room_G[host] = 0
            excess -= rows
            movable -= rows
        return excess


def search(domain: Domain, low: int, min_rows: int) -> Placed:
    """Return the replicas at the first threshold, from `low` upwards, that can be met."""
    high = max(low, int(domain.rank_loads.max()))
    if domain.slots == 0:
        return []
    threshold = -(-low * 101 // 100)
    for _ in range(FAST_PROBES):
        placed = probe(domain, min(threshold, high), 1, fair=True)
        if placed is not None:
            return placed
        threshold += max(1, -(-high // 100))
    return _search_slowly(domain, low, high, min_rows)


def _search_slowly(domain: Domain, low: int, high: int, min_rows: int) -> Placed:
    """Narrow the range of thresholds to a fifth, repeatedly. `high` itself needs no replicas.

    With a floor, a higher threshold can fail where a lower one succeeds, because a rank may have
    too little excess for a replica. So the result is a threshold that can be met, not the lowest.
    """
    placed = probe(domain, low, min_rows, fair=False)
    if placed is not None:
        return placed
    best: Placed = []
    low += 1
    while low < high:
        thresholds = [low + (high - low) * fifth // 5 for fifth in (1, 2, 3, 4)]
        if high - low <= 4:
            thresholds = list(range(low, high))
        for threshold in thresholds:
            placed = probe(domain, threshold, min_rows, fair=False)
            if placed is not None:
                best, high = placed, threshold
                break
            low = threshold + 1
    return best


def probe(domain: Domain, threshold: int, min_rows: int, *, fair: bool) -> Placed | None:
    """Return replicas that bring every rank down to the threshold; None if the greedy fails."""
    room_G = np.maximum(threshold - domain.rank_loads, 0)
    attempt = Probe(room_G, np.full(len(room_G), domain.slots), min_rows, fair)
    for source in np.argsort(-domain.rank_loads, kind="stable").tolist():
        excess = int(domain.rank_loads[source]) - threshold
        for expert, rows in domain.experts[source]:
            if excess <= 0:
                break
            excess = attempt.replicate(expert, excess, rows - KEPT_AT_HOME)
        if excess > 0:
            return None
    return attempt.placed
