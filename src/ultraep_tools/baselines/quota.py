"""quota: the planner published with UltraEP (2026): a threshold search, roomiest rank first.

Every fast-link domain searches a low threshold that no rank exceeds. The excess of a rank goes,
hottest expert first, to replicas on the ranks with most room. A fast search probes 1 % above the
mean, then twice a little higher, and accepts a replica only if it takes a fair share of the excess.
If all three probes fail, a slow search over all thresholds accepts any replica above a floor. The
home keeps at least one row.

The floor is `min_tokens_per_replica`, which only affects the slow search. Its default is 1; the
published 1024 leaves small microbatches without replicas. `tolerance` raises the lower end of the
search, like the published `balance_threshold`. Unlike the original, bounds are integers, not
single-precision numbers, and homes may be uneven.

Shapes: G ranks of one domain, E experts.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from ultraep.arrays import IntArray
from ultraep.config import PARTS, BalanceConfig
from ultraep.policies import Problem, register_policy
from ultraep.topology import sum_by_rank
from ultraep_tools.baselines.places import by_domain, refuse_limits

FAST_PROBES = 3
KEPT_AT_HOME = 1

Placed = list[tuple[int, int, int]]  # expert, host, quota


@register_policy("quota", offline=True)
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


class Domain(NamedTuple):
    """The ranks of one domain."""

    rank_loads: IntArray  # [G]
    experts: list[
        list[tuple[int, int]]
    ]  # home experts of every rank with their rows, hottest first
    slots: int


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
    """Return replicas that bring every rank down to the threshold; None if the greedy fails.

    min_rows: fewest rows of a replica.
    fair: a replica must also take its fair share of the excess.
    """
    room_G = np.maximum(threshold - domain.rank_loads, 0)  # 0 when no slot is left
    free_slots_G = np.full(len(room_G), domain.slots)
    placed: Placed = []
    for source in np.argsort(-domain.rank_loads, kind="stable").tolist():
        excess = int(domain.rank_loads[source]) - threshold
        for expert, load in domain.experts[source]:
            movable = load - KEPT_AT_HOME
            open_G = room_G.copy()  # without the ranks that hold this expert
            while excess > 0 and movable > 0:
                host = int(open_G.argmax())
                rows = min(excess, int(open_G[host]), movable)
                share = -(-excess // max(int(np.count_nonzero(open_G)), 1)) if fair else 0
                if rows < max(share, min_rows):
                    break
                placed.append((expert, host, rows))
                free_slots_G[host] -= 1
                room_G[host] = room_G[host] - rows if free_slots_G[host] else 0
                open_G[host] = 0
                excess -= rows
                movable -= rows
        if excess > 0:
            return None
    return placed
