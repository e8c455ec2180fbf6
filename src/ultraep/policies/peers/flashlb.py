"""FlashLB: EPLB's idea with a search over how many copies the hotter experts get.

Source: FlashLB (vllm-ascend, 2026), with one window of past loads. Experts are ordered by their
past load and cut into four runs. For one run after the other, several numbers of copies are tried,
the greedy one first, then fewer and more: the run gets so many, all later runs share the rest, the
instances are placed, and the number whose fullest rank has least is kept. Instances are placed
heaviest first, each on the least loaded rank that has a free place and none of the same expert.
Every instance of an expert gets the same share of its tokens. Shares, sums and the score are in
single precision, as in the original, and equal ones are taken in order of their index.

With one window, variance and covariance of the loads are zero and play no part; several windows,
thresholds for acting and the relabelling of ranks that saves moves are not here. Where an instance
finds no rank, the original is undefined: here such a number of copies is not tried, and if there is
no other, the instance is left out. No expert has more instances than there are ranks. As in `eplb`,
shares are whole tokens, homes may be uneven, they move freely, and without any past load (all
zeros) the experts stay at home. `tolerance` changes nothing. `min_tokens_per_replica` and
`max_replicas` are refused.

Shapes: S microbatches, R ranks, E experts, C copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np

from ultraep.arrays import IntArray
from ultraep.policies import Problem, register_policy
from ultraep.policies.places import FloatArray, copied_items, served_equally
from ultraep.topology import Topology

TINY = np.float32(0.01)  # keeps the score of no load at one


def over_interval(problem: Problem, loads_SE: IntArray) -> IntArray:
    """[C, 4] microbatch, expert, host and quota: one placement, equal shares of every load."""
    return served_equally(problem, loads_SE, search)


@register_policy("flashlb", within_limits=False, needs_history=True, over_interval=over_interval)
def flashlb(problem: Problem) -> IntArray:
    """FlashLB: copies per expert searched for, placed by past loads, split equally."""
    return over_interval(problem, problem.expert_loads[None])[:, 1:]


def search(history_E: IntArray, topology: Topology, *, depth: int = 4, width: int = 8) -> IntArray:
    """[E, R] instances of every expert on every rank.

    depth: runs that the experts are cut into.
    width: how far from the greedy number of copies others are tried.
    """
    instances_ER = np.zeros((topology.experts, topology.ranks), dtype=np.int64)
    past_E = history_E.astype(np.float32) + np.float32(1)
    places_R = topology.homes_per_rank + topology.slots
    counts_E = _count(past_E, places_R, depth, width)
    for expert, ranks in enumerate(_place(past_E, counts_E, places_R)[1]):
        instances_ER[expert, ranks] = 1
    return instances_ER


def _count(past_E: FloatArray, places_R: IntArray, depth: int, width: int) -> IntArray:
    """[E] instances of every expert: run by run the best number of copies."""
    experts, ranks = len(past_E), len(places_R)
    order_E = np.argsort(-past_E, kind="stable")
    run, free = -(-experts // depth), int(places_R.sum()) - experts
    counts_E = np.ones_like(order_E)
    np.add.at(counts_E, order_E[copied_items(past_E[order_E], free, ranks)], 1)
    for begin in range(0, experts - run, run):
        own_E, later_E = order_E[begin : begin + run], order_E[begin + run :]
        greedy = copied_items(past_E[order_E[begin:]], free, ranks)
        own = own_E[copied_items(past_E[own_E], free, ranks)]
        later = later_E[copied_items(past_E[later_E], free, ranks)]
        counts_E[order_E[begin:]] = 1
        tried = [
            counts_E + np.bincount(np.r_[own[:copies], later[: free - copies]], minlength=experts)
            for copies in _around(int((greedy < run).sum()), width, free)
        ]
        counts_E = min(tried, key=lambda tried_E: _score(past_E, tried_E, places_R))
        free -= int(counts_E[own_E].sum()) - run
    return counts_E


def _around(start: int, width: int, most: int) -> Iterator[int]:
    """Numbers from `start` outwards, the lower one first.

    >>> list(_around(1, 3, 8))
    [1, 0, 2, 3, 4]
    """
    yield start
    for away in range(1, width + 1):
        yield from (number for number in (start - away, start + away) if 0 <= number <= most)


def _score(past_E: FloatArray, counts_E: IntArray, places_R: IntArray) -> float:
    """Fullest over mean rank; infinite where an instance finds no rank."""
    load_R, ranks_of_expert = _place(past_E, counts_E, places_R)
    if sum(map(len, ranks_of_expert)) < counts_E.sum():
        return float("inf")
    ranks, fullest = np.float32(len(places_R)), max(load_R)
    return float((ranks * fullest + TINY) / (past_E.sum() + TINY))


def _place(
    past_E: FloatArray, counts_E: IntArray, places_R: IntArray
) -> tuple[list[np.float32], list[list[int]]]:
    """The load of every rank, and the ranks of every expert: the heaviest on the least loaded."""
    share_E = past_E / counts_E.astype(np.float32)
    left_R = places_R.tolist()
    load_R = [np.float32(0)] * len(left_R)
    open_ranks = [(load, rank) for rank, load in enumerate(load_R) if left_R[rank]]
    ranks_of_expert: list[list[int]] = [[] for _ in past_E]
    for expert in np.argsort(-share_E, kind="stable").tolist():
        share, found = share_E[expert], ranks_of_expert[expert]
        while open_ranks and len(found) < counts_E[expert]:
            found.append(heappop(open_ranks)[1])
        for rank in found:
            load_R[rank] += share
            left_R[rank] -= 1
            if left_R[rank]:
                heappush(open_ranks, (load_R[rank], rank))
    return load_R, ranks_of_expert
