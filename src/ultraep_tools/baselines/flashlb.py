"""FlashLB: like EPLB, with a search over the number of replicas of the hotter experts.

Source: FlashLB (vllm-ascend, 2026). Experts are sorted by past load and cut into four runs. Each
run in turn tries several numbers of replicas: the greedy number first, then fewer and more. All
later runs share the rest of the replicas, the instances are placed, and the number with the lowest
busiest rank wins. Instances are placed heaviest first, each on the least loaded rank with a free
place and no instance of the same expert. Every instance serves the same share. Shares, sums and
scores are in single precision, as in the original.

This version has one window of past loads, so their variance is zero, and no threshold for acting.
It does not relabel ranks to save moves. Where an instance finds no rank, the original is undefined;
here that number of replicas is skipped, or the instance is left out if no other number exists.
Whole rows, uneven homes and no past load are as in `eplb`.

Shapes: R ranks, E experts, C replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np

from ultraep.arrays import IntArray
from ultraep.policies import Problem, register_policy
from ultraep.topology import Topology
from ultraep_tools.baselines.places import (
    FloatArray,
    remember_last,
    replicated_items,
    served_equally,
)

TINY = np.float32(0.01)  # makes the score of no load one


@register_policy("flashlb", within_limits=False, needs_history=True, offline=True)
def flashlb(problem: Problem) -> IntArray:
    """FlashLB: a search over replicas per expert, placed by past loads, split equally."""
    return served_equally(problem, place_by_past)


@remember_last
def place_by_past(history_E: IntArray, topology: Topology) -> IntArray:
    """[E, R] instances of every expert on every rank, with the settings of the original."""
    return search(history_E, topology)


def search(history_E: IntArray, topology: Topology, *, depth: int = 4, width: int = 8) -> IntArray:
    """[E, R] instances of every expert on every rank.

    depth: number of runs.
    width: largest distance from the greedy number of replicas.
    """
    instances_ER = np.zeros((topology.experts, topology.ranks), dtype=np.int64)
    past_E = history_E.astype(np.float32) + np.float32(1)
    places_R = topology.homes_per_rank + topology.slots
    counts_E = _count(past_E, places_R, depth, width)
    for expert, ranks in enumerate(_place(past_E, counts_E, places_R)[1]):
        instances_ER[expert, ranks] = 1
    return instances_ER


def _count(past_E: FloatArray, places_R: IntArray, depth: int, width: int) -> IntArray:
    """[E] instances of every expert: the best number of replicas, run by run."""
    experts, ranks = len(past_E), len(places_R)
    order_E = np.argsort(-past_E, kind="stable")
    run, free = -(-experts // depth), int(places_R.sum()) - experts
    counts_E = np.ones_like(order_E)
    np.add.at(counts_E, order_E[replicated_items(past_E[order_E], free, ranks)], 1)
    for begin in range(0, experts - run, run):
        own_E, later_E = order_E[begin : begin + run], order_E[begin + run :]
        greedy = replicated_items(past_E[order_E[begin:]], free, ranks)
        own = own_E[replicated_items(past_E[own_E], free, ranks)]
        later = later_E[replicated_items(past_E[later_E], free, ranks)]
        counts_E[order_E[begin:]] = 1
        tried = [
            counts_E + np.bincount(np.r_[own[:count], later[: free - count]], minlength=experts)
            for count in _around(int((greedy < run).sum()), width, free)
        ]
        counts_E = min(tried, key=lambda tried_E: _score(past_E, tried_E, places_R))
        free -= int(counts_E[own_E].sum()) - run
    return counts_E


def _around(start: int, width: int, most: int) -> Iterator[int]:
    """Yield numbers from `start` outwards, the lower one first.

    >>> list(_around(1, 3, 8))
    [1, 0, 2, 3, 4]
    """
    yield start
    for away in range(1, width + 1):
        yield from (number for number in (start - away, start + away) if 0 <= number <= most)


def _score(past_E: FloatArray, counts_E: IntArray, places_R: IntArray) -> float:
    """Return busiest over mean rank; infinite if an instance finds no rank."""
    load_R, ranks_of_expert = _place(past_E, counts_E, places_R)
    if sum(map(len, ranks_of_expert)) < counts_E.sum():
        return float("inf")
    ranks, busiest = np.float32(len(places_R)), max(load_R)
    return float((ranks * busiest + TINY) / (past_E.sum() + TINY))


def _place(
    past_E: FloatArray, counts_E: IntArray, places_R: IntArray
) -> tuple[list[np.float32], list[list[int]]]:
    """Return the load of every rank and the ranks of every expert, heaviest placed first."""
    share_E = past_E / counts_E.astype(np.float32)
    left_R = places_R.tolist()
    load_R = [np.float32(0)] * len(left_R)
    open_ranks = [(load, rank) for rank, load in enumerate(load_R) if left_R[rank]]
    ranks_of_expert: list[list[int]] = [[] for _ in past_E]
    for expert in np.argsort(-share_E, kind="stable").tolist():
        ranks = ranks_of_expert[expert]
        while open_ranks and len(ranks) < counts_E[expert]:
            ranks.append(heappop(open_ranks)[1])
        for rank in ranks:
            load_R[rank] += share_E[expert]
            left_R[rank] -= 1
            if left_R[rank]:
                heappush(open_ranks, (load_R[rank], rank))
    return load_R, ranks_of_expert
