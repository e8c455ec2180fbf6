"""The planner published with UltraEP: search a threshold, fill the roomiest rank first.

Source: the UltraEP paper and its public planner (2026). Every fast-link domain looks for a low
threshold that no rank exceeds. What a rank has above it is carved off, its hottest experts first,
into copies on the roomiest ranks. A fast search probes 1 % above the mean and at most twice a
little higher, and accepts a copy only if it takes a fair share of the need. When all three probes
fail, a slow search over all thresholds accepts any copy above a fixed floor. The home of an
expert keeps at least one token.

The floor is `min_tokens_per_replica`, and as published it acts in the slow search only: the fast
one makes smaller copies all the same. It is 1 unless set, where the published one is 1024, which
leaves small microbatches without any copy when the fast search fails. All arithmetic is in
integers, where the published one finds its bounds in single precision, and homes may be uneven.
`tolerance` raises the lower end of the search, as `balance_threshold` does there: the 1 % of the
first probe come on top. `max_replicas` is refused.

Shapes: G ranks of one domain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ultraep.arrays import IntArray
from ultraep.policies import Problem, register_policy
from ultraep.policies.limits import allowed_load, refuse_limits

FAST_PROBES = 3
KEPT_AT_HOME = 1

Copies = list[tuple[int, int, int]]  # expert, host (counted within the domain), quota


@register_policy("quota")
def quota(problem: Problem) -> IntArray:
    """UltraEP's published planner: threshold search, roomiest rank first."""
    topology, config = problem.topology, problem.config
    refuse_limits(config, "max_replicas")
    copies: Copies = []
    for begin in range(0, topology.ranks, topology.domain_size):
        domain = _domain(problem, begin)
        tokens, ranks = int(domain.rank_loads.sum()), topology.domain_size
        low = allowed_load(tokens, ranks, config.tolerance_parts)
        found = search(domain, low, config.min_tokens_per_replica)
        copies += [(expert, begin + host, served) for expert, host, served in found]
    return np.array(copies, dtype=np.int64).reshape(-1, 3)


@dataclass(frozen=True, slots=True)
class DomainRanks:
    """The ranks of one domain, their home experts heaviest first, and their slots."""

    rank_loads: IntArray  # [G]
    experts: list[list[tuple[int, int]]]  # (expert, its tokens), for every rank
    slots: int


@dataclass(slots=True)
class Probe:
    """A plan under construction: what each rank can still take, and the copies so far."""

    room: IntArray  # [G] tokens up to the threshold; 0 when no slot is left
    free_slots: IntArray  # [G]
    min_tokens: int  # fewest tokens that a copy is made for
    fair: bool  # a copy must take its fair share of the need as well
    copies: Copies = field(default_factory=list)

    def give(self, expert: int, need: int, movable: int) -> int:
        """Make copies of the expert until the need is met; the tokens that found no place."""
        offered_G = self.room.copy()  # without the ranks that hold this expert
        while need > 0 and movable > 0:
            host = int(offered_G.argmax())
            tokens = min(need, int(offered_G[host]), movable)
            if tokens < self.least(need, int(np.count_nonzero(offered_G))):
                break
            self.copies.append((expert, host, tokens))
            self.free_slots[host] -= 1
            self.room[host] = self.room[host] - tokens if self.free_slots[host] else 0
            offered_G[host] = 0
            need -= tokens
            movable -= tokens
        return need

    def least(self, need: int, candidates: int) -> int:
        """Fewest tokens that a copy is made for, with so much need and so many candidates."""
        share = -(-need // max(candidates, 1)) if self.fair else 0
        return max(share, self.min_tokens)


def search(domain: DomainRanks, low: int, min_tokens: int) -> Copies:
    """The copies at the first threshold that can be met, looked for from `low` upwards."""
    high = max(low, int(domain.rank_loads.max()))
    if domain.slots == 0:
        return []
    threshold = -(-low * 101 // 100)
    for _ in range(FAST_PROBES):
        copies = probe(domain, min(threshold, high), 1, fair=True)
        if copies is not None:
            return copies
        threshold += max(1, -(-high // 100))
    return _search_slowly(domain, low, high, min_tokens)


def _search_slowly(domain: DomainRanks, low: int, high: int, min_tokens: int) -> Copies:
    """Narrow the thresholds to a fifth, again and again; `high` itself needs no copies.

    With a floor, a higher threshold can fail where a lower one did not: a rank may have too little
    excess for any copy. So this finds a threshold that can be met, not always the least.
    """
    copies = probe(domain, low, min_tokens, fair=False)
    if copies is not None:
        return copies
    best: Copies = []
    low += 1
    while low < high:
        for threshold in _between(low, high):
            copies = probe(domain, threshold, min_tokens, fair=False)
            if copies is not None:
                best, high = copies, threshold
                break
            low = threshold + 1
    return best


def _between(low: int, high: int) -> list[int]:
    """Up to four thresholds that cut `low..high` into fifths; `high` is known already."""
    if high - low <= 4:
        return list(range(low, high))
    return [low + (high - low) * fifth // 5 for fifth in (1, 2, 3, 4)]


def probe(domain: DomainRanks, threshold: int, min_tokens: int, *, fair: bool) -> Copies | None:
    """The copies that bring every rank down to the threshold; None if the greedy finds none."""
    room_G = np.maximum(threshold - domain.rank_loads, 0)
    free_slots_G = np.full(len(room_G), domain.slots)
    attempt = Probe(room_G, free_slots_G, min_tokens, fair)
    for source in np.argsort(-domain.rank_loads, kind="stable").tolist():
        need = int(domain.rank_loads[source]) - threshold
        for expert, tokens in domain.experts[source]:
            if need <= 0:
                break
            need = attempt.give(expert, need, tokens - KEPT_AT_HOME)
        if need > 0:
            return None
    return attempt.copies


def _domain(problem: Problem, begin: int) -> DomainRanks:
    topology, loads = problem.topology, problem.expert_loads.tolist()
    end = begin + topology.domain_size
    first = topology.first_of_rank[begin : end + 1].tolist()
    by_rank = topology.experts_by_rank.tolist()
    experts = []
    for start, stop in pairwise(first):
        homes = sorted(by_rank[start:stop], key=lambda expert: -loads[expert])
        experts.append([(expert, loads[expert]) for expert in homes])
    rank_loads = [sum(tokens for _, tokens in homes) for homes in experts]
    return DomainRanks(np.array(rank_loads, dtype=np.int64), experts, topology.slots)
