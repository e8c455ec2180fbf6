"""ECHO: lay what overflows and what has room on two lines, and copy where they overlap.

Source: NVIDIA's ECHO (a research prototype for Megatron-LM, 2025): hot experts are cloned into
spare slots in every forward pass, from the exact load; the overflow of the experts is matched to
the spare room of the ranks by one pass over two sorted prefix sums.

The description leaves three things open. Ours: a rank's overflow is taken from its hottest
experts; both lines are ordered largest first; where a rank overlaps more experts than it has slots,
the largest overlaps are kept, and the rest stays at home. It is one pass, so nothing looks for
another place for that rest. Overlaps below `tolerance` times the mean, or below
`min_tokens_per_replica`, stay at home as well; that reading of the published threshold comes
closest to the copies it is known to make. `max_replicas` is refused.

Shapes: G ranks of one domain, E experts, O overflowing experts, H ranks with room, P overlaps.
"""

from __future__ import annotations

import numpy as np

from ultraep.arrays import IntArray
from ultraep.policies import Problem, register_policy
from ultraep.policies.limits import allowed_load, refuse_limits


@register_policy("echo")
def echo(problem: Problem) -> IntArray:
    """NVIDIA ECHO: overflow matched to room in one pass over two sorted prefix sums."""
    refuse_limits(problem.config, "max_replicas")
    size = problem.topology.domain_size
    begins = range(0, problem.topology.ranks, size)
    return np.concatenate([_copies_of_domain(problem, begin, begin + size) for begin in begins])


def _copies_of_domain(problem: Problem, begin: int, end: int) -> IntArray:
    topology, config = problem.topology, problem.config
    first, last = topology.first_of_rank[[begin, end]]
    experts_E = topology.experts_by_rank[first:last]
    ranks_E = topology.home_of_expert[experts_E] - begin
    loads_E = problem.expert_loads[experts_E]
    rank_loads_G = np.zeros(end - begin, dtype=np.int64)
    np.add.at(rank_loads_G, ranks_E, loads_E)
    mean = allowed_load(int(loads_E.sum()), end - begin)
    least = allowed_load(int(loads_E.sum()), end - begin, config.tolerance_parts) - mean
    overflow_E = _overflow(loads_E, ranks_E, rank_loads_G - mean)
    overlaps_P3 = _match(overflow_E, np.maximum(mean - rank_loads_G, 0))
    worth_it_P = overlaps_P3[:, 2] >= max(least, config.min_tokens_per_replica)
    overlaps_P3 = overlaps_P3[worth_it_P]
    expert_P, host_P, quota_P = _largest_of_host(overlaps_P3, topology.slots).T
    return np.column_stack([experts_E[expert_P], begin + host_P, quota_P])


def _overflow(loads_E: IntArray, ranks_E: IntArray, excess_G: IntArray) -> IntArray:
    """[E] tokens that shall leave: every rank's excess, its hottest experts first.

    >>> _overflow(np.array([5, 9, 4]), np.array([0, 0, 1]), np.array([11, -2]))
    array([2, 9, 0])
    """
    order_E = np.lexsort((-loads_E, ranks_E))  # by rank; within a rank the hottest first
    sorted_E = loads_E[order_E]
    before_E = np.cumsum(sorted_E) - sorted_E
    first_E = np.searchsorted(ranks_E[order_E], ranks_E[order_E])
    hotter_E = before_E - before_E[first_E]  # tokens of the hotter experts of the same rank
    overflow_E = np.empty_like(loads_E)
    overflow_E[order_E] = np.clip(excess_G[ranks_E[order_E]] - hotter_E, 0, sorted_E)
    return overflow_E


def _match(overflow_E: IntArray, room_G: IntArray) -> IntArray:
    """[P, 3] expert, rank and tokens of every overlap of the two lines, both largest first.

    >>> _match(np.array([3, 0, 4]), np.array([0, 6, 1]))
    array([[2, 1, 4],
           [0, 1, 2],
           [0, 2, 1]])
    """
    expert_O, overflow_end_O = _line(overflow_E)
    rank_H, room_end_H = _line(room_G)
    cuts = np.union1d(overflow_end_O, room_end_H)
    cuts = cuts[cuts <= min(overflow_end_O.max(initial=0), room_end_H.max(initial=0))]
    begin_P = np.concatenate([np.zeros(1, np.int64), cuts[:-1]])[: len(cuts)]
    expert_P = expert_O[np.searchsorted(overflow_end_O, begin_P, side="right")]
    rank_P = rank_H[np.searchsorted(room_end_H, begin_P, side="right")]
    return np.column_stack([expert_P, rank_P, cuts - begin_P])


def _line(lengths: IntArray) -> tuple[IntArray, IntArray]:
    """Indices of the positive lengths, largest first, and where each ends when laid in a row."""
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    return order, np.cumsum(lengths[order])


def _largest_of_host(overlaps_P3: IntArray, slots: int) -> IntArray:
    """Of the overlaps of every rank, as many as it has slots: the largest, then the first."""
    _, host_P, quota_P = overlaps_P3.T
    order_P = np.lexsort((-quota_P, host_P))
    host_P = host_P[order_P]
    place_P = np.arange(len(host_P)) - np.searchsorted(host_P, host_P)
    kept_P3: IntArray = overlaps_P3[order_P[place_P < slots]]
    return kept_P3
