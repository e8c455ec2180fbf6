"""What the policies that place by the past share: packing, equal shares, and the record.

An instance is a place that serves an expert, be it the home or a copy. These policies move homes
freely; in the records an instance on the home rank is the home and all others are copies, so an
expert that moved away has its whole load in copies.

Shapes: S microbatches, R ranks, E experts, N items, X pairs of expert and rank, C copies.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heapreplace

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.policies import Problem
from ultraep.policies.limits import refuse_limits
from ultraep.topology import Topology

FloatArray = NDArray[np.float32]


def pack(weight_N: FloatArray, places_R: IntArray) -> IntArray:
    """[N] the rank of every item: the heaviest first, each on the lightest rank with a place.

    Sums are in single precision, as in EPLB. Where every rank has one place, item i is on rank i.

    >>> pack(np.array([3, 9, 4, 5], dtype=np.float32), np.array([2, 2]))
    array([0, 0, 1, 1])
    """
    if (places_R == 1).all():
        return np.arange(len(weight_N))
    rank_N = np.empty(len(weight_N), dtype=np.int64)
    left_R = places_R.tolist()
    ranks = [(np.float32(0), rank) for rank, left in enumerate(left_R) if left]
    for item in np.argsort(-weight_N, kind="stable").tolist():
        load, rank = ranks[0]
        rank_N[item] = rank
        left_R[rank] -= 1
        if left_R[rank]:
            heapreplace(ranks, (load + weight_N[item], rank))
        else:
            heappop(ranks)
    return rank_N


def copied_items(weight_N: FloatArray, copies: int, most: int) -> IntArray:
    """Who gets one copy after the other: the item with the largest weight per instance.

    most: instances of one item; when all have so many, the rest of the copies is not made.

    >>> copied_items(np.array([90, 31, 20], dtype=np.float32), copies=3, most=4)
    array([0, 0, 1])
    """
    instances_N = [1] * len(weight_N)
    shares = [(-weight, item) for item, weight in enumerate(weight_N)]
    heapify(shares)
    made: list[int] = []
    while shares and len(made) < copies:
        item = shares[0][1]
        if instances_N[item] == most:
            heappop(shares)
            continue
        instances_N[item] += 1
        heapreplace(shares, (-weight_N[item] / np.float32(instances_N[item]), item))
        made.append(item)
    return np.array(made, dtype=np.int64)


def split_equally(
    loads_SE: IntArray, instances_ER: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """[X] experts and [X] ranks that hold them, and [S, X] tokens: equal shares per instance.

    The remainder goes one each to the instances on the first ranks.

    >>> split_equally(np.array([[5]]), np.array([[1, 0, 2]]))
    (array([0, 0]), array([0, 2]), array([[2, 3]]))
    """
    expert_X, rank_X = np.nonzero(instances_ER)
    instances_X = instances_ER[expert_X, rank_X]
    before_X = (np.cumsum(instances_ER, axis=1) - instances_ER)[expert_X, rank_X]
    share_SE, remainder_SE = np.divmod(loads_SE, instances_ER.sum(axis=1))
    more_SX = np.clip(remainder_SE[:, expert_X] - before_X, 0, instances_X)
    return expert_X, rank_X, share_SE[:, expert_X] * instances_X + more_SX


def away_from_home(
    expert_X: IntArray, rank_X: IntArray, rows_SX: IntArray, topology: Topology
) -> IntArray:
    """[C, 4] microbatch, expert, host and quota of all tokens that are served away from home."""
    away_X = np.flatnonzero(rank_X != topology.home_of_expert[expert_X])
    rows_SX = rows_SX[:, away_X]
    microbatch_C, index_C = np.nonzero(rows_SX)
    pair_C = away_X[index_C]
    quota_C = rows_SX[microbatch_C, index_C]
    return np.column_stack([microbatch_C, expert_X[pair_C], rank_X[pair_C], quota_C])


def served_equally(
    problem: Problem, loads_SE: IntArray, place: Callable[[IntArray, Topology], IntArray]
) -> IntArray:
    """[C, 4] microbatch, expert, host and quota: one placement, equal shares of every load.

    place: `[E, R]` instances by a past load. Without any past load the experts stay at home.
    """
    refuse_limits(problem.config, "min_tokens_per_replica", "max_replicas")
    assert problem.history is not None
    topology = problem.topology
    placed = place if problem.history.any() else _at_home
    instances_ER = placed(problem.history, topology)
    return away_from_home(*split_equally(loads_SE, instances_ER), topology)


def _at_home(_: IntArray, topology: Topology) -> IntArray:
    return np.equal.outer(topology.home_of_expert, np.arange(topology.ranks)).astype(np.int64)
