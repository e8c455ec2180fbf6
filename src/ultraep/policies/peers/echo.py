"""ECHO: what overflows is matched to what has room, largest first, into spare slots.

Source: NVIDIA's ECHO (a research prototype for Megatron-LM, 2025): hot experts are cloned into
spare slots in every forward pass, from the exact load. The mean is rounded down; what a rank has
above it spills, from its hottest experts first (of equally hot ones the last).

Two algorithms, as in the original. With one slot, bin packing, its default: experts queue on eight
shelves by what they spill; the roomiest rank takes from the first shelf that is not empty, and
what is left of the expert queues again. With more slots, one shot: spills and rooms are laid on two
lines, largest first, and copied where they overlap; a rank that overlaps more experts than it has
slots keeps the largest overlaps, and the rest stays at home.

`tolerance` is the threshold of the one shot: a budget of every home rank, which keeps its smallest
copies at home as long as it stays below `1 + tolerance` times the mean; but if any rank is above
that with all copies made, none is dropped anywhere. It is compared in single precision, as there.
Bin packing knows no threshold: `tolerance` changes nothing with one slot. Ours adds three things:
every domain is planned for itself; homes may be uneven; and below a mean of 7, where the original
divides by zero, shelves are one token apart. `min_tokens_per_replica` and `max_replicas` are
refused.

Shapes: G ranks of one domain, E experts, H ranks with room, P overlaps, C copies.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.policies import Problem, register_policy
from ultraep.policies.limits import by_domain, refuse_limits

BoolArray = NDArray[np.bool_]

SHELVES = 8  # the first for what fills a whole rank


@register_policy("echo")
def echo(problem: Problem) -> IntArray:
    """NVIDIA ECHO: overflow matched to room, by bin packing or in one pass over two lines."""
    refuse_limits(problem.config, "min_tokens_per_replica", "max_replicas")
    slots = problem.topology.slots
    if slots == 1:
        return by_domain(problem, bin_packing)
    return by_domain(problem, partial(one_shot, slots=slots, threshold=problem.config.tolerance))


def bin_packing(loads_E: IntArray, homes_E: IntArray, ranks: int) -> IntArray:
    """[C, 3] expert, host and quota: one copy at most on every rank."""
    mean, spill_E, room_G = _spill_and_room(loads_E, homes_E, ranks)
    shelves: list[deque[tuple[int, int]]] = [deque() for _ in range(SHELVES)]
    for expert in _largest_first(spill_E):
        shelves[_shelf(int(spill_E[expert]), mean)].append((expert, int(spill_E[expert])))
    copies = []
    for host in _largest_first(room_G):
        shelf = next((shelf for shelf in shelves if shelf), None)
        if shelf is None:
            break
        expert, left = shelf.popleft()
        quota = min(left, int(room_G[host]))
        copies.append((expert, host, quota))
        if left > quota:
            shelves[_shelf(left - quota, mean)].append((expert, left - quota))
    return np.array(copies, dtype=np.int64).reshape(-1, 3)


def one_shot(
    loads_E: IntArray, homes_E: IntArray, ranks: int, *, slots: int, threshold: float = 0.0
) -> IntArray:
    """[C, 3] expert, host and quota of the overlaps that find a slot and are worth it."""
    mean, spill_E, room_G = _spill_and_room(loads_E, homes_E, ranks)
    placed_C3 = _largest_of_host(_match(spill_E, room_G), slots)
    if threshold <= 0:
        return placed_C3
    kept_G = np.zeros(ranks, dtype=np.int64)
    np.add.at(kept_G, homes_E, loads_E)
    home_C = homes_E[placed_C3[:, 0]]
    np.subtract.at(kept_G, home_C, placed_C3[:, 2])
    allowed = np.float32(mean) + np.float32(threshold) * np.float32(mean)
    budget_G = allowed - kept_G.astype(np.float32)
    if (budget_G < 0).any():
        return placed_C3
    return placed_C3[~_affordable(placed_C3[:, 2], home_C, budget_G)]


def _spill_and_room(
    loads_E: IntArray, homes_E: IntArray, ranks: int
) -> tuple[int, IntArray, IntArray]:
    """The mean, [E] tokens that shall leave each expert, and [G] tokens that a rank can take.

    >>> _spill_and_room(np.array([5, 9, 4]), np.array([0, 0, 1]), 2)
    (9, array([0, 5, 0]), array([0, 5]))
    """
    mean = int(loads_E.sum()) // ranks
    order_E = np.lexsort((loads_E, homes_E))  # by rank; within a rank the coldest first
    sorted_E = loads_E[order_E]
    through_E = np.cumsum(sorted_E)
    before_E = np.concatenate([np.zeros(1, np.int64), through_E])
    first_G = np.searchsorted(homes_E[order_E], np.arange(ranks + 1))
    load_G = np.diff(before_E[first_G])
    through_E -= before_E[first_G][homes_E[order_E]]
    spill_E = np.empty_like(loads_E)
    spill_E[order_E] = np.clip(through_E - mean, 0, sorted_E)
    return mean, spill_E, np.maximum(mean - load_G, 0)


def _shelf(tokens: int, mean: int) -> int:
    """Where what is left of an expert queues.

    >>> [_shelf(tokens, mean=70) for tokens in (75, 70, 69, 60, 11, 10, 1)]
    [0, 0, 1, 2, 6, 7, 7]
    """
    if tokens >= mean:
        return 0
    width = max(mean // (SHELVES - 1), 1)
    return min(SHELVES - 1, (mean - tokens) // width + 1)


def _match(spill_E: IntArray, room_G: IntArray) -> IntArray:
    """[P, 3] expert, rank and tokens of every overlap of the two lines, both largest first.

    >>> _match(np.array([3, 0, 4]), np.array([0, 6, 1]))
    array([[2, 1, 4],
           [0, 1, 2],
           [0, 2, 1]])
    """
    experts, ranks = _largest_first(spill_E), _largest_first(room_G)
    spill_end_E, room_end_H = np.cumsum(spill_E[experts]), np.cumsum(room_G[ranks])
    cuts = np.union1d(spill_end_E, room_end_H)
    cuts = cuts[cuts <= min(spill_end_E.max(initial=0), room_end_H.max(initial=0))]
    begin_P = np.concatenate([np.zeros(1, np.int64), cuts[:-1]])[: len(cuts)]
    expert_P = np.array(experts, np.int64)[np.searchsorted(spill_end_E, begin_P, side="right")]
    rank_P = np.array(ranks, np.int64)[np.searchsorted(room_end_H, begin_P, side="right")]
    return np.column_stack([expert_P, rank_P, cuts - begin_P])


def _largest_first(tokens: IntArray) -> list[int]:
    """Indices of the positive numbers."""
    order = np.argsort(-tokens, kind="stable")
    found: list[int] = order[tokens[order] > 0].tolist()
    return found


def _largest_of_host(overlaps_P3: IntArray, slots: int) -> IntArray:
    """The overlaps that the slots of every rank can hold: the largest, then the first."""
    _, host_P, quota_P = overlaps_P3.T
    order_P = np.lexsort((-quota_P, host_P))
    host_P = host_P[order_P]
    place_P = np.arange(len(host_P)) - np.searchsorted(host_P, host_P)
    kept_P3: IntArray = overlaps_P3[order_P[place_P < slots]]
    return kept_P3


def _affordable(quota_C: IntArray, home_C: IntArray, budget_G: NDArray[np.float32]) -> BoolArray:
    """[C] copies that stay at home: every home's smallest, as many as its budget allows."""
    order_C = np.lexsort((quota_C, home_C))
    home_C = home_C[order_C]
    through_C = np.cumsum(quota_C[order_C])
    before_C = through_C - quota_C[order_C]
    through_C -= before_C[np.searchsorted(home_C, home_C)]
    stays_C = np.empty(len(quota_C), dtype=bool)
    stays_C[order_C] = through_C.astype(np.float32) <= budget_G[home_C]
    return stays_C
