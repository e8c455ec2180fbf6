"""Who copies what: the policies of the runtime, over all microbatches of a layer.

Policies that see the exact load decide anew for every microbatch. Those that place by the past
(eplb, lplb) keep their places for an interval and only split the load of each microbatch.

Shapes: S microbatches, E experts, R ranks, C copies of all microbatches together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.backends import select
from ultraep.config import BalanceConfig
from ultraep.policies import Problem, get_policy
from ultraep.policies.eplb import place_by_history
from ultraep.policies.lplb import place_on_torus, share_evenly
from ultraep.topology import Topology


@dataclass(frozen=True)
class Copies:
    """The copies of all microbatches, and the rows that stay at home."""

    microbatch: IntArray  # [C]
    expert: IntArray  # [C]
    host: IntArray  # [C]
    rows: IntArray  # [C]
    at_home: IntArray  # [S, E]

    def rank_loads(self, topology: Topology) -> IntArray:
        """[S, R] rows that every rank serves."""
        return sum_by_rank(self, self.at_home, self.rows, topology)


_NOTHING = np.zeros(0, dtype=np.int64)
NO_COPIES = Copies(_NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING)


def sum_by_rank(
    copies: Copies, home_SE: NDArray[Any], copy_C: NDArray[Any], topology: Topology
) -> NDArray[Any]:
    """[S, R] sum over the experts at home on a rank and over the copies that it hosts."""
    microbatches, ranks = len(home_SE), topology.ranks
    by_rank = home_SE[:, topology.experts_by_rank]
    filled = np.concatenate([by_rank, np.zeros((microbatches, 1), by_rank.dtype)], axis=1)
    total_SR = np.add.reduceat(filled, topology.first_of_rank, axis=1)[:, :-1]
    total_SR[:, topology.homes_per_rank == 0] = 0
    place = copies.microbatch * ranks + copies.host
    added = np.bincount(place, weights=copy_C, minlength=microbatches * ranks)
    summed: NDArray[Any] = total_SR + added.reshape(microbatches, ranks).astype(total_SR.dtype)
    return summed


def plan_layer(
    loads_SE: IntArray,
    topology: Topology,
    config: BalanceConfig,
    *,
    interval: int,
    past_E: IntArray,
) -> Copies:
    """Plan all microbatches of a layer.

    interval: microbatches for which `eplb` and `lplb` keep their places; they place by the rows of
        the interval before, and by `past_E` at first.
    """
    policy = get_policy(config.policy)
    if policy.needs_history:
        return _plan_by_past(loads_SE, topology, config, interval, past_E)
    engine = select()
    found = [
        policy.decide(Problem(loads_E[None], loads_E, topology, config, engine, None))
        for loads_E in loads_SE
    ]
    microbatch_C = np.repeat(np.arange(len(found)), [len(copies) for copies in found])
    expert_C, host_C, rows_C = np.concatenate(found).T
    return _gathered(microbatch_C, expert_C, host_C, rows_C, loads_SE)


def _plan_by_past(
    loads_SE: IntArray,
    topology: Topology,
    config: BalanceConfig,
    interval: int,
    past_E: IntArray,
) -> Copies:
    split = _split_lplb if config.policy == "lplb" else partial(_split_eplb, config=config)
    parts = []
    for begin in range(0, len(loads_SE), interval):
        now_SE = loads_SE[begin : begin + interval]
        expert_X, host_X, rows_SX = split(now_SE, past_E, topology)
        microbatch_C, index_C = np.nonzero(rows_SX)
        parts.append(
            (microbatch_C + begin, expert_X[index_C], host_X[index_C], rows_SX[rows_SX > 0])
        )
        past_E = now_SE.sum(axis=0)
    microbatch_C, expert_C, host_C, rows_C = map(np.concatenate, zip(*parts, strict=True))
    return _gathered(microbatch_C, expert_C, host_C, rows_C, loads_SE)


Split = tuple[IntArray, IntArray, IntArray]  # [X] expert, [X] host, [S, X] rows


def _split_eplb(
    loads_SE: IntArray, past_E: IntArray, topology: Topology, *, config: BalanceConfig
) -> Split:
    """Places by the past, equal shares of the present: `split_equally` for many at once."""
    held_ER = place_by_history(
        Problem(loads_SE[:1], loads_SE[0], topology, config, select(), past_E)
    )
    expert_X, host_X = np.nonzero(held_ER)
    share_SE, more_SE = np.divmod(loads_SE, held_ER.sum(axis=1))
    turn_X = (np.cumsum(held_ER, axis=1) - 1)[expert_X, host_X]
    rows_SX = share_SE[:, expert_X] + (turn_X < more_SE[:, expert_X])
    away_X = host_X != topology.home_of_expert[expert_X]
    return expert_X[away_X], host_X[away_X], rows_SX[:, away_X]


def _split_lplb(loads_SE: IntArray, past_E: IntArray, topology: Topology) -> Split:
    graph = place_on_torus(past_E, topology)
    return graph.expert, graph.host, share_evenly(loads_SE, graph, topology)


def _gathered(
    microbatch_C: IntArray,
    expert_C: IntArray,
    host_C: IntArray,
    rows_C: IntArray,
    loads_SE: IntArray,
) -> Copies:
    away = np.bincount(
        microbatch_C * loads_SE.shape[1] + expert_C, weights=rows_C, minlength=loads_SE.size
    )
    at_home_SE = loads_SE - away.reshape(loads_SE.shape).astype(np.int64)
    return Copies(microbatch_C, expert_C, host_C, rows_C, at_home_SE)


def sends_by_rank(copies: Copies, topology: Topology, *, chain: bool) -> IntArray:
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


def copies_of_expert(copies: Copies, topology: Topology) -> IntArray:
    """[S, E] copies of every expert."""
    place = copies.microbatch * topology.experts + copies.expert
    return _count(place, len(copies.at_home), topology.experts)


def received_by_rank(copies: Copies, topology: Topology) -> IntArray:
    """[S, R] experts that every rank receives."""
    microbatches, ranks = len(copies.at_home), topology.ranks
    return _count(copies.microbatch * ranks + copies.host, microbatches, ranks)


def _count(places: IntArray, microbatches: int, width: int) -> IntArray:
    counts = np.bincount(places, minlength=microbatches * width)
    return counts.reshape(microbatches, width)
