"""The minimum number of replicas that keeps every rank below a threshold: bounds and exact values.

Replicas connect ranks into circles (docs/plan.md). A circle of k ranks has at least k - 1 replicas
and at most k times the threshold of rows. A donor also needs one replica per expert that it gives
away, at least as many as its hottest experts need to cover its surplus. So a circle needs at least
the larger of the two numbers. The best partition of the ranks into circles gives a lower bound, by
dynamic programming over all subsets in 3 ** ranks steps. The bound ignores slots and which expert
fits where.

Shapes: R ranks, E experts of a domain.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from numba import njit
from optimum import NOISE, OPTIMAL, OUT_OF_TIME, Unproven, pairs_of, rows_of_pairs
from scipy.optimize import Bounds, LinearConstraint, milp

from ultraep.arrays import IntArray
from ultraep.topology import Topology

MOST_RANKS = 16  # for the bound


@njit(cache=True)
def _least_of_partition(height_R: IntArray, experts_R: IntArray) -> int:
    """Replicas of the best partition into circles with heights that sum to at most 0."""
    subsets = 1 << len(height_R)
    height = np.zeros(subsets, np.int64)
    least = np.zeros(subsets, np.int64)  # of one circle: the larger of connections and experts
    joins, experts = np.full(subsets, -1), np.zeros(subsets, np.int64)
    for subset in range(1, subsets):
        rank = 0
        while not subset >> rank & 1:
            rank += 1
        rest = subset & (subset - 1)
        height[subset] = height[rest] + height_R[rank]
        joins[subset] = joins[rest] + 1
        experts[subset] = experts[rest] + experts_R[rank]
        least[subset] = max(joins[subset], experts[subset])
    best = np.full(subsets, 1 << 30)
    best[0] = 0
    for subset in range(1, subsets):
        lowest = subset & -subset
        rest = subset ^ lowest
        part = rest
        while True:
            circle = part | lowest
            if height[circle] <= 0:
                best[subset] = min(best[subset], best[subset ^ circle] + least[circle])
            if part == 0:
                break
            part = (part - 1) & rest
    of_all: int = best[subsets - 1]
    return of_all


def fewest_bound(expert_loads: IntArray, topology: Topology, threshold: int) -> int:
    """A lower bound for the replicas of any plan, for one domain of up to `MOST_RANKS` ranks."""
    tokens = expert_loads[topology.experts_by_rank]
    first = topology.first_of_rank
    homes = [np.sort(tokens[a:b])[::-1] for a, b in pairwise(first)]
    height_R = np.array([home.sum() - threshold for home in homes])
    experts_R = [
        int(np.searchsorted(np.cumsum(home), height)) + 1 if height > 0 else 0
        for home, height in zip(homes, height_R, strict=True)
    ]
    return int(_least_of_partition(height_R, np.array(experts_R)))


def fewest_copies(
    expert_loads: IntArray, topology: Topology, threshold: int, bound: int, time_limit: float
) -> int:
    """The minimum number of replicas; a lower bound if the solver runs out of time.

    Like `optimum.py`, but with a fixed peak and the number of replicas as the objective.
    """
    pairs = pairs_of(expert_loads, topology.home_of_expert, topology.ranks)
    count = len(pairs.expert)
    matrix, most = rows_of_pairs(pairs, topology.slots)
    most[-topology.ranks :] += threshold
    ones = np.append(np.ones(count), np.zeros(count))
    result = milp(
        c=ones,
        integrality=ones,
        bounds=Bounds(0, np.append(np.ones(count), pairs.loads[pairs.expert])),
        constraints=[LinearConstraint(matrix, -np.inf, most), LinearConstraint(ones, bound)],
        options={"time_limit": time_limit, "mip_rel_gap": 0.0},
    )
    if result.status not in (OPTIMAL, OUT_OF_TIME) or result.mip_dual_bound is None:
        raise Unproven(f"status {result.status}: {result.message}")
    least: int = math.ceil(result.mip_dual_bound - NOISE)
    return max(bound, least)


@njit(cache=True)
def _random_circles(height_R: IntArray, most: int) -> int:
    """Connections of one random partition into closed circles.

    Returns at least `most` if there are too many, or if there is no such partition.
    """
    steady, tight = np.random.random(), np.random.random()
    ranks = len(height_R)
    height, is_open = height_R.copy(), np.ones(ranks, np.bool_)
    joins = 0
    while joins < most:
        donor, host, seen = -1, -1, 0
        largest = np.random.random() < steady
        for circle in range(ranks):
            if is_open[circle] and height[circle] > 0:
                seen += 1
                if donor < 0 or (
                    height[circle] > height[donor] if largest else np.random.random() * seen < 1
                ):
                    donor = circle
        if donor < 0:
            break
        tightest, fits, seen = np.random.random() < tight, False, 0
        for circle in range(ranks):
            if not is_open[circle] or height[circle] >= 0:
                continue
            if height[circle] <= -height[donor]:
                seen += 1
                if not fits or (
                    height[circle] > height[host] if tightest else np.random.random() * seen < 1
                ):
                    host, fits = circle, True
            elif not fits and (host < 0 or height[circle] < height[host]):
                host = circle
        if host < 0:
            return most
        height[host] += height[donor]
        is_open[donor] = False
        joins += 1
    return joins


@njit(cache=True)
def _least_of_random(height_R: IntArray, runs: int, seed: int) -> int:
    np.random.seed(seed)
    best = len(height_R)
    for _ in range(runs):
        best = min(best, _random_circles(height_R, best))
    return best


def fewest_joins(height_R: IntArray, runs: int = 5000) -> int:
    """The fewest connections that a random search finds; ignores slots and experts."""
    return int(_least_of_random(height_R, runs, 1))
