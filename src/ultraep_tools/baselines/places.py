"""Helpers that several policies share: limits, domains, packing, and equal shares.

Policies that use past loads move homes freely. An instance is a home or a replica. In their plans
an instance on the original home rank is the home and all others are replicas, so an expert that
moved has its whole load in replicas.

Shapes: S microbatches, R ranks, E experts, N items, X pairs of expert and rank, C replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from heapq import heapify, heappop, heapreplace

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError
from ultraep.policies import Problem, register_policy
from ultraep.topology import Topology

FloatArray = NDArray[np.float32]
DecideInterval = Callable[[Problem, IntArray], IntArray]  # [S, E] loads -> [C, 4], microbatch first
INTERVALS: dict[str, DecideInterval] = {}  # by policy, for the simulator: one past, many loads


def plans_from_past(name: str) -> Callable[[DecideInterval], DecideInterval]:
    """Register a policy that decides all microbatches of an interval from the same past loads."""

    def register(decide: DecideInterval) -> DecideInterval:
        @register_policy(name, within_limits=False, needs_history=True, offline=True)
        @wraps(decide)
        def decide_one(problem: Problem) -> IntArray:
            return decide(problem, problem.expert_loads[None])[:, 1:]

        return INTERVALS.setdefault(name, decide)

    return register


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


def replicated_items(weight_N: FloatArray, replicas: int, most: int) -> IntArray:
    """Return the items to replicate, in order: always the largest weight per instance.

    most: instances of one item. No more items are returned once all items have that many.

    >>> replicated_items(np.array([90, 31, 20], dtype=np.float32), replicas=3, most=4)
    array([0, 0, 1])
    """
    instances_N = [1] * len(weight_N)
    shares = [(-weight, item) for item, weight in enumerate(weight_N)]
    heapify(shares)
    items: list[int] = []
    while shares and len(items) < replicas:
        item = shares[0][1]
        if instances_N[item] == most:
            heappop(shares)
            continue
        instances_N[item] += 1
        heapreplace(shares, (-weight_N[item] / np.float32(instances_N[item]), item))
        items.append(item)
    return np.array(items, dtype=np.int64)


def split_equally(
    loads_SE: IntArray, instances_ER: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """[X] experts and [X] ranks that hold them, and [S, X] rows: equal shares per instance.

    The remainder goes to the instances on the first ranks, one row each.

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
    """[C, 4] microbatch, expert, host and quota of all rows served away from home."""
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

    place: returns `[E, R]` instances for a past load. Without past load all experts stay at home.
    """
    refuse_limits(problem.config, "min_tokens_per_replica", "max_replicas")
    assert problem.history is not None
    topology = problem.topology
    if problem.history.any():
        instances_ER = place(problem.history, topology)
    else:
        instances_ER = np.eye(topology.ranks, dtype=np.int64)[topology.home_of_expert]
    return away_from_home(*split_equally(loads_SE, instances_ER), topology)
