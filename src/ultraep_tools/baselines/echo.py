"""ECHO: rows above the mean go to ranks below it, largest first, into spare slots.

Source: NVIDIA's ECHO (a research prototype for Megatron-LM, 2025), which replicates hot experts by
the exact load in every forward pass. The mean is rounded down. A rank spills its excess from its
hottest experts first (the last of equally hot ones).

The original has two algorithms. With one slot, bin packing: experts queue on eight shelves by their
spill. The emptiest rank takes from the first shelf that is not empty, and the rest of the expert
queues again. With more slots, one shot: spills and deficits are laid on two lines, largest first,
and replicated where they overlap. A rank with more overlaps than slots keeps the largest; the rest
stays at home.

`tolerance` is the threshold of the one shot, in single precision: a home keeps its smallest
replicas while it stays below `1 + tolerance` times the mean. If a rank is above that even with all
replicas, all replicas are made. Bin packing ignores `tolerance`. Unlike the original, every domain
is planned on its own, homes may be uneven, and below a mean of 7, where the original divides by
zero, shelves are one row apart.

Shapes: G ranks of one domain, E experts, H ranks with a deficit, P overlaps, C replicas.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import numpy as np

from ultraep.arrays import IntArray
from ultraep.policies import Problem, register_policy
from ultraep.topology import sum_by_rank
from ultraep_tools.baselines.places import by_domain, refuse_limits

SHELVES = 8  # the first one is for spills that fill a whole rank


@register_policy("echo", offline=True)
def echo(problem: Problem) -> IntArray:
    """NVIDIA ECHO: spills matched to deficits, by bin packing or in one pass over two lines."""
    refuse_limits(problem.config, "min_tokens_per_replica", "max_replicas")
    slots = problem.topology.slots
    if slots == 1:
        return by_domain(problem, bin_packing)
    return by_domain(problem, partial(one_shot, slots=slots, threshold=problem.config.tolerance))


def bin_packing(loads_E: IntArray, homes_E: IntArray, ranks: int) -> IntArray:
    """[C, 3] expert, host and quota: at most one replica on every rank."""
    mean, spill_E, deficit_G = _spill_and_deficit(loads_E, homes_E, ranks)
    shelves: list[deque[tuple[int, int]]] = [deque() for _ in range(SHELVES)]
    for expert in _largest_first(spill_E):
        shelves[_shelf(int(spill_E[expert]), mean)].append((expert, int(spill_E[expert])))
    placed = []
    for host in _largest_first(deficit_G):
        shelf = next((shelf for shelf in shelves if shelf), None)
        if shelf is None:
            break
        expert, left = shelf.popleft()
        quota = min(left, int(deficit_G[host]))
        placed.append((expert, host, quota))
        if left > quota:
            shelves[_shelf(left - quota, mean)].append((expert, left - quota))
    return np.array(placed, dtype=np.int64).reshape(-1, 3)


def one_shot(
    loads_E: IntArray, homes_E: IntArray, ranks: int, *, slots: int, threshold: float = 0.0
) -> IntArray:
    """[C, 3] expert, host and quota of the overlaps that find a slot and exceed the budget."""
    mean, spill_E, deficit_G = _spill_and_deficit(loads_E, homes_E, ranks)
    placed_C3 = _largest_of_host(_match(spill_E, deficit_G), slots)
    if threshold <= 0:
        return placed_C3
    kept_G = sum_by_rank(loads_E, homes_E, ranks)
    quota_C, home_C = placed_C3[:, 2], homes_E[placed_C3[:, 0]]
    np.subtract.at(kept_G, home_C, quota_C)
    allowed = np.float32(mean) + np.float32(threshold) * np.float32(mean)
    budget_G = allowed - kept_G.astype(np.float32)
    if (budget_G < 0).any():
        return placed_C3
    through_C = _through(quota_C, home_C, ranks).astype(np.float32)
    return placed_C3[through_C > budget_G[home_C]]


def _spill_and_deficit(
    loads_E: IntArray, homes_E: IntArray, ranks: int
) -> tuple[int, IntArray, IntArray]:
    """Return the mean, [E] rows that leave each expert, and [G] rows that a rank can take.

    >>> _spill_and_deficit(np.array([5, 9, 4]), np.array([0, 0, 1]), 2)
    (9, array([0, 5, 0]), array([0, 5]))
    """
    mean, load_G = int(loads_E.sum()) // ranks, sum_by_rank(loads_E, homes_E, ranks)
    spill_E = np.clip(_through(loads_E, homes_E, ranks) - mean, 0, loads_E)
    return mean, spill_E, np.maximum(mean - load_G, 0)


def _through(rows_N: IntArray, rank_N: IntArray, ranks: int) -> IntArray:
    """[N] the sum of the items of the same rank up to each item, the smallest first.

    >>> _through(np.array([5, 9, 4]), np.array([0, 0, 1]), 2)
    array([ 5, 14,  4])
    """
    order = np.lexsort((rows_N, rank_N))
    through_N = np.empty_like(rows_N)
    through_N[order] = np.cumsum(rows_N[order])
    of_rank = sum_by_rank(rows_N, rank_N, ranks)
    before: IntArray = np.cumsum(of_rank) - of_rank
    return through_N - before[rank_N]


def _shelf(spill: int, mean: int) -> int:
    """Return the shelf for a spill.

    >>> [_shelf(spill, mean=70) for spill in (75, 70, 69, 60, 11, 10, 1)]
    [0, 0, 1, 2, 6, 7, 7]
    """
    if spill >= mean:
        return 0
    width = max(mean // (SHELVES - 1), 1)
    return min(SHELVES - 1, (mean - spill) // width + 1)


def _match(spill_E: IntArray, deficit_G: IntArray) -> IntArray:
    """[P, 3] expert, rank and rows of every overlap of the two lines, both largest first.

    >>> _match(np.array([3, 0, 4]), np.array([0, 6, 1]))
    array([[2, 1, 4],
           [0, 1, 2],
           [0, 2, 1]])
    """
    experts, ranks = _largest_first(spill_E), _largest_first(deficit_G)
    spill_end_E, deficit_end_H = np.cumsum(spill_E[experts]), np.cumsum(deficit_G[ranks])
    cuts = np.union1d(spill_end_E, deficit_end_H)
    cuts = cuts[cuts <= min(spill_end_E.max(initial=0), deficit_end_H.max(initial=0))]
    begin_P = np.concatenate([np.zeros(1, np.int64), cuts[:-1]])[: len(cuts)]
    expert_P = np.array(experts, np.int64)[np.searchsorted(spill_end_E, begin_P, side="right")]
    rank_P = np.array(ranks, np.int64)[np.searchsorted(deficit_end_H, begin_P, side="right")]
    return np.column_stack([expert_P, rank_P, cuts - begin_P])


def _largest_first(rows: IntArray) -> list[int]:
    """Return the indices of the positive numbers, largest first."""
    order = np.argsort(-rows, kind="stable")
    indices: list[int] = order[rows[order] > 0].tolist()
    return indices


def _largest_of_host(overlaps_P3: IntArray, slots: int) -> IntArray:
    """Return the overlaps that the slots of every rank can hold: the largest, then the first."""
    _, host_P, quota_P = overlaps_P3.T
    order_P = np.lexsort((-quota_P, host_P))
    host_P = host_P[order_P]
    place_P = np.arange(len(host_P)) - np.searchsorted(host_P, host_P)
    kept_P3: IntArray = overlaps_P3[order_P[place_P < slots]]
    return kept_P3
