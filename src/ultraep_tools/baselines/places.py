"""Helpers that several policies share: limits, domains, packing, and equal shares.

Policies that use past loads move homes freely. An instance is a home or a replica. In their plans
an instance on the original home rank is the home and all others are replicas, so an expert that
moved has its whole load in replicas.

Shapes: R ranks, E experts, N items, X pairs of expert and rank, C replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from heapq import heapify, heappop, heapreplace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError
from ultraep.policies import Problem
from ultraep.topology import Topology

FloatArray = NDArray[np.float32]
Place = Callable[[IntArray, Topology], Any]  # past loads -> placement


def remember_last(place: Place) -> Place:
    """Keep the last placement: the simulator plans many microbatches from the same past."""

    @lru_cache(maxsize=1)
    def place_once(history: bytes, topology: Topology) -> Any:
        return place(np.frombuffer(history, dtype=np.int64), topology)

    @wraps(place)
    def recall(history_E: IntArray, topology: Topology) -> Any:
        return place_once(history_E.astype(np.int64).tobytes(), topology)

    return recall


def refuse_limits(config: BalanceConfig, *names: str) -> None:
    """Raise `ConfigError` if a setting that the policy cannot honour is not at its default."""
    default = BalanceConfig()
    for name in names:
        value, usual = getattr(config, name), getattr(default, name)
        if value != usual:
            raise ConfigError(
                f"policy {config.policy!r} cannot honour {name}={value}: leave it at {usual}"
            )


def by_domain(problem: Problem, decide: Callable[[IntArray, IntArray, int], IntArray]) -> IntArray:
    """[C, 3] replicas of all domains, each planned on its own.

    decide: takes the loads of a domain's experts, their home ranks and the number of ranks, and
        returns `[C, 3]` expert, host and quota. Experts and ranks count from 0 in the domain.
    """
    topology, size = problem.topology, problem.topology.domain_size
    parts = []
    for begin in range(0, topology.ranks, size):
        first, last = topology.first_of_rank[[begin, begin + size]]
        experts_E = np.sort(topology.experts_by_rank[first:last])
        homes_E = topology.home_of_expert[experts_E] - begin
        expert_C, host_C, quota_C = decide(problem.expert_loads[experts_E], homes_E, size).T
        parts.append(np.column_stack([experts_E[expert_C], begin + host_C, quota_C]))
    return np.concatenate(parts)


def pack(weight_N: FloatArray, places_R: IntArray) -> IntArray:
    """[N] the rank of every item: the heaviest first, each on the lightest rank with a free place.

    Sums are in single precision, as in EPLB. If every rank has one place, item i is on rank i.

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


def replicated_items(weight_N: FloatArray, replicas: int) -> IntArray:
    """Return the items to replicate, in order: always the largest weight per instance.

    >>> replicated_items(np.array([90, 31, 20], dtype=np.float32), replicas=3)
    array([0, 0, 1])
    """
    instances_N = [1] * len(weight_N)
    shares = [(-weight, item) for item, weight in enumerate(weight_N)]
    heapify(shares)
    items: list[int] = []
    while len(items) < replicas:
        item = shares[0][1]
        instances_N[item] += 1
        heapreplace(shares, (-weight_N[item] / np.float32(instances_N[item]), item))
        items.append(item)
    return np.array(items, dtype=np.int64)


def split_equally(loads_E: IntArray, instances_ER: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """[X] experts, [X] ranks that hold them, and [X] rows: equal shares per instance.

    The remainder goes to the instances on the first ranks, one row each.

    >>> split_equally(np.array([5]), np.array([[1, 0, 2]]))
    (array([0, 0]), array([0, 2]), array([2, 3]))
    """
    expert_X, rank_X = np.nonzero(instances_ER)
    instances_X = instances_ER[expert_X, rank_X]
    before_X = (np.cumsum(instances_ER, axis=1) - instances_ER)[expert_X, rank_X]
    share_E, remainder_E = np.divmod(loads_E, instances_ER.sum(axis=1))
    more_X = np.clip(remainder_E[expert_X] - before_X, 0, instances_X)
    return expert_X, rank_X, share_E[expert_X] * instances_X + more_X


def away_from_home(
    expert_X: IntArray, rank_X: IntArray, rows_X: IntArray, topology: Topology
) -> IntArray:
    """[C, 3] expert, host and quota of all rows served away from home."""
    away_X = (rank_X != topology.home_of_expert[expert_X]) & (rows_X > 0)
    placed_C3: IntArray = np.column_stack([expert_X, rank_X, rows_X])[away_X]
    return placed_C3


def served_equally(problem: Problem, place: Place) -> IntArray:
    """[C, 3] expert, host and quota: a placement by past load, equal shares of the current load.

    place: returns `[E, R]` instances for a past load. Without past load all experts stay at home.
    """
    refuse_limits(problem.config, "min_tokens_per_replica", "max_replicas")
    assert problem.history is not None
    topology = problem.topology
    if problem.history.any():
        instances_ER = place(problem.history, topology)
    else:
        instances_ER = np.eye(topology.ranks, dtype=np.int64)[topology.home_of_expert]
    return away_from_home(*split_equally(problem.expert_loads, instances_ER), topology)
