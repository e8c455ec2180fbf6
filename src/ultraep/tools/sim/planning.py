"""Who copies what: the policies of the runtime, over all microbatches of a layer.

Policies that see the exact load decide anew for every microbatch. Those that place by the past keep
it for an interval, and with it their places: they only split the load of each microbatch.

Shapes: S microbatches, E experts, R ranks, C copies of all microbatches together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.backends import select
from ultraep.config import BalanceConfig
from ultraep.plan import decided
from ultraep.policies import BUILT_IN, Policy, Problem, get_policy
from ultraep.rules import check_interval
from ultraep.topology import Topology


@dataclass(frozen=True)
class CopySets:
    """The copies of all microbatches, and the rows that stay at home."""

    microbatch: IntArray  # [C]
    expert: IntArray  # [C]
    host: IntArray  # [C]
    rows: IntArray  # [C]
    at_home: IntArray  # [S, E]

    def rank_loads(self, topology: Topology) -> IntArray:
        """[S, R] rows that every rank serves."""
        return sum_by_rank(self, self.at_home, self.rows, topology)


def sum_by_home(values_SE: NDArray[Any], topology: Topology) -> NDArray[Any]:
    """[S, R] sum over the experts at home on every rank."""
    by_rank = np.pad(values_SE[:, topology.experts_by_rank], ((0, 0), (0, 1)))
    sums_SR: NDArray[Any] = np.add.reduceat(by_rank, topology.first_of_rank, axis=1)[:, :-1]
    sums_SR[:, topology.homes_per_rank == 0] = 0
    return sums_SR


def sum_by_rank(
    copies: CopySets, home_SE: NDArray[Any], copy_C: NDArray[Any], topology: Topology
) -> NDArray[Any]:
    """[S, R] sum over the experts at home on a rank and over the copies that it hosts."""
    total_SR = sum_by_home(home_SE, topology)
    place_C = copies.microbatch * topology.ranks + copies.host
    added = np.bincount(place_C, weights=copy_C, minlength=total_SR.size)
    summed: NDArray[Any] = total_SR + added.reshape(total_SR.shape).astype(total_SR.dtype)
    return summed


def plan_layer(
    loads_SE: IntArray,
    topology: Topology,
    config: BalanceConfig,
    *,
    interval: int,
    past_E: IntArray,
) -> CopySets:
    """Plan all microbatches of a layer.

    interval: microbatches for which policies that place by the past keep it: the rows of the
        interval before, and `past_E` at first.
    """
    policy = get_policy(config.policy)
    nothing = np.zeros((0, topology.experts), dtype=np.int64)
    problem = Problem(nothing, nothing.sum(axis=0), topology, config, select(), None)
    if not policy.needs_history:
        return _gathered(_one_by_one(policy, problem, loads_SE), loads_SE)
    parts = []
    for begin in range(0, len(loads_SE), interval):
        now_SE = loads_SE[begin : begin + interval]
        found_C4 = _over_interval(policy, replace(problem, history=past_E), now_SE)
        parts.append(np.column_stack([found_C4[:, 0] + begin, found_C4[:, 1:]]))
        past_E = now_SE.sum(axis=0)
    return _gathered(np.concatenate(parts), loads_SE)


def _over_interval(policy: Policy, problem: Problem, loads_SE: IntArray) -> IntArray:
    """[C, 4] microbatch, expert, host and rows, with one past: at once if the policy can."""
    if policy.over_interval is None:
        return _one_by_one(policy, problem, loads_SE)
    placed_C4 = policy.over_interval(problem, loads_SE)
    if policy.name not in BUILT_IN:
        check_interval(placed_C4, loads_SE, problem.topology, limited=policy.within_limits)
    return placed_C4


def _one_by_one(policy: Policy, problem: Problem, loads_SE: IntArray) -> IntArray:
    """[C, 4] microbatch, expert, host and rows: the policy decides for every microbatch."""
    sources = 1 if policy.name in BUILT_IN else problem.topology.ranks  # ours do not look at them
    source_R = np.arange(sources)[:, None]
    problems = (
        replace(problem, loads=(loads_E + source_R) // sources, expert_loads=loads_E)
        for loads_E in loads_SE
    )
    placed = [decided(policy, one) for one in problems]
    microbatch_C = np.repeat(np.arange(len(placed)), [len(copies) for copies in placed])
    return np.column_stack([microbatch_C, np.concatenate(placed)])


def _gathered(placed_C4: IntArray, loads_SE: IntArray) -> CopySets:
    microbatch_C, expert_C, host_C, rows_C = placed_C4.T
    away = np.bincount(
        microbatch_C * loads_SE.shape[1] + expert_C, weights=rows_C, minlength=loads_SE.size
    )
    at_home_SE = loads_SE - away.reshape(loads_SE.shape).astype(np.int64)
    return CopySets(microbatch_C, expert_C, host_C, rows_C, at_home_SE)


def sends_by_rank(copies: CopySets, topology: Topology, *, chain: bool) -> IntArray:
    """[S, R] experts that every rank sends, from home or as a link of a chain.

    As `replicate.hops` orders them: in a chain, hosts that have experts of their own to send come
    last, and every copy but the last one of an expert passes it on.
    """
    microbatches, ranks = len(copies.at_home), topology.ranks
    home_C = topology.home_of_expert[copies.expert]
    place_C = copies.microbatch * ranks
    if not chain:
        return _count(place_C + home_C, microbatches, ranks)
    sender = np.zeros(microbatches * ranks, dtype=bool)
    sender[place_C + home_C] = True
    busy_C = sender[place_C + copies.host]
    order = np.lexsort((copies.host, busy_C, copies.expert, copies.microbatch))
    of_expert = (copies.microbatch * topology.experts + copies.expert)[order]
    differs = of_expert[1:] != of_expert[:-1]
    first = np.concatenate([[True], differs]) if len(order) else np.zeros(0, bool)
    last = np.concatenate([differs, [True]]) if len(order) else np.zeros(0, bool)
    sent = np.concatenate([(place_C + home_C)[order][first], (place_C + copies.host)[order][~last]])
    return _count(sent, microbatches, ranks)


def copies_of_expert(copies: CopySets, topology: Topology) -> IntArray:
    """[S, E] copies of every expert."""
    place = copies.microbatch * topology.experts + copies.expert
    return _count(place, len(copies.at_home), topology.experts)


def received_by_rank(copies: CopySets, topology: Topology) -> IntArray:
    """[S, R] experts that every rank receives."""
    microbatches, ranks = len(copies.at_home), topology.ranks
    return _count(copies.microbatch * ranks + copies.host, microbatches, ranks)


def _count(places: IntArray, microbatches: int, width: int) -> IntArray:
    counts = np.bincount(places, minlength=microbatches * width)
    return counts.reshape(microbatches, width)
