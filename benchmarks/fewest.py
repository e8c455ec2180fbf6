"""The fewest copies that can keep every rank to a threshold: bounds, and exactly by a program.

Copies join ranks. Joined ones are a circle; k of them have at least k - 1 copies, and together at
most k times the threshold. A donor gives away at least as many experts as its hottest ones need to
hold its surplus, each in a copy of its own. So the copies of a circle are at least the larger of
the two, and the best partition into circles gives a bound: by dynamic programming over all subsets,
3 ** ranks steps. It knows neither slots nor which expert fits where.

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
    """Copies of the best partition into circles whose heights add up to 0 or less."""
    subsets = 1 << len(height_R)
    height = np.zeros(subsets, np.int64)
    least = np.zeros(subsets, np.int64)  # of one circle: the larger of joins and experts
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
    """Copies that no plan for one domain of up to `MOST_RANKS` ranks can go below."""
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
    """Copies of the plan that needs fewest; a bound below, if that takes too long to settle.

    As in `optimum.py`, but the peak is given and the copies are what is to be least.
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
def _random_circles(height_R: IntArray, most: int) -> tuple[int, IntArray]:
    """Joins of one random partition into circles that are closed, and the circle of every rank.

    `most` joins at least: there would be too many, or there is no such partition.
    """
    steady, tight = np.random.random(), np.random.random()
    ranks = len(height_R)
    height, is_open, circle_R = height_R.copy(), np.ones(ranks, np.bool_), np.arange(ranks)
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
            return most, circle_R
        height[host] += height[donor]
        is_open[donor] = False
        circle_R[circle_R == donor] = host
        joins += 1
    return joins, circle_R


@njit(cache=True)
def _copies_within(
    loads_E: IntArray, first: IntArray, slots: int, threshold: int, circle_R: IntArray, most: int
) -> int:
    """Copies if the emptiest of a circle takes from the fullest of it; `most`: too many, or none.

    A circle that is stuck takes in the circle of the emptiest rank outside.
    """
    ranks = len(circle_R)
    at_home, room_R, free_R = loads_E.copy(), np.empty(ranks, np.int64), np.full(ranks, slots)
    for rank in range(ranks):
        room_R[rank] = threshold - loads_E[first[rank] : first[rank + 1]].sum()
    for made in range(most):
        circle = circle_R[np.argmin(room_R)]
        if room_R.min() >= 0:
            return made
        roomy = np.where(free_R > 0, room_R, 0)
        inside = np.where(circle_R == circle, roomy, 0)
        host = np.argmax(inside if inside.max() > 0 else roomy)
        need = roomy[host]
        circle_R[circle_R == circle_R[host]] = circle
        donor, expert, fits = -1, -1, False
        for rank in range(ranks):
            if room_R[rank] >= 0 or circle_R[rank] != circle:
                continue
            hot = first[rank] + np.argmax(at_home[first[rank] : first[rank + 1]])
            enough = at_home[hot] >= need
            if enough and fits:
                better = room_R[rank] < room_R[donor]
            else:
                better = donor < 0 or enough or (not fits and at_home[hot] > at_home[expert])
            if better:
                donor, expert, fits = rank, hot, enough
        quota = min(need, at_home[expert])
        if quota <= 0:
            return most
        at_home[expert] -= quota
        room_R[donor] += quota
        room_R[host] -= quota
        free_R[host] -= 1
    return most


@njit(cache=True)
def _least_of_random(height_R: IntArray, runs: int, seed: int) -> int:
    np.random.seed(seed)
    best = len(height_R)
    for _ in range(runs):
        best = min(best, _random_circles(height_R, best)[0])
    return best


@njit(cache=True)
def _least_of_random_plans(
    loads_E: IntArray, first: IntArray, slots: int, threshold: int, most: int, runs: int, seed: int
) -> int:
    np.random.seed(seed)
    height_R = np.empty(len(first) - 1, np.int64)
    for rank in range(len(height_R)):
        height_R[rank] = loads_E[first[rank] : first[rank + 1]].sum() - threshold
    for _ in range(runs):
        joins, circle_R = _random_circles(height_R, most)
        if joins < most:
            most = _copies_within(loads_E, first, slots, threshold, circle_R, most)
    return most


def fewest_joins(height_R: IntArray, runs: int = 5000) -> int:
    """Copies that circles need which a random search has found; slots and experts may not do."""
    return int(_least_of_random(height_R, runs, 1))


def fewest_planned(
    expert_loads: IntArray, topology: Topology, threshold: int, most: int, runs: int = 5000
) -> int:
    """Copies of the best of many plans within random circles; `most`, if none has fewer."""
    tokens, first = expert_loads[topology.experts_by_rank], topology.first_of_rank
    return int(_least_of_random_plans(tokens, first, topology.slots, threshold, most, runs, 1))
