"""Plans of all microbatches of a layer, made by the policies of the runtime.

Policies that use the exact load decide for every microbatch. Policies that use past loads keep
their placement for an interval and only split the load of each microbatch.

Shapes: S microbatches, E experts, R ranks, C replicas of all microbatches together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.backends import select
from ultraep.config import BalanceConfig
from ultraep.plan import decided
from ultraep.policies import Problem, get_policy
from ultraep.topology import Topology
from ultraep_tools.baselines import OWN


@dataclass(frozen=True)
class Replicas:
    """The replicas of a layer in all microbatches, and its loads."""

    topology: Topology
    microbatch: IntArray  # [C]
    expert: IntArray  # [C]
    host: IntArray  # [C]
    rows: IntArray  # [C]
    loads: IntArray  # [S, E] rows of every expert, at home and at replicas

    @classmethod
    def of(cls, topology: Topology, placed_C4: IntArray, loads_SE: IntArray) -> Replicas:
        """Return the replicas (microbatch, expert, host, rows) of these loads."""
        microbatch_C, expert_C, host_C, rows_C = placed_C4.T
        return cls(topology, microbatch_C, expert_C, host_C, rows_C, loads_SE)

    @cached_property
    def at_home(self) -> IntArray:
        """[S, E] rows that stay at home."""
        place_C = self.microbatch * self.topology.experts + self.expert
        away = np.bincount(place_C, weights=self.rows, minlength=self.loads.size)
        left: IntArray = self.loads - away.reshape(self.loads.shape).astype(np.int64)
        return left

    @cached_property
    def rank_loads(self) -> IntArray:
        """[S, R] rows that every rank serves."""
        return self.sum_by_rank(self.at_home, self.rows)

    def sum_by_rank(self, home_SE: NDArray[Any], replica_C: NDArray[Any]) -> NDArray[Any]:
        """[S, R] sums over the home experts of every rank and the replicas that it hosts."""
        total_SR = sum_by_home(home_SE, self.topology)
        place_C = self.microbatch * self.topology.ranks + self.host
        added = np.bincount(place_C, weights=replica_C, minlength=total_SR.size)
        summed: NDArray[Any] = total_SR + added.reshape(total_SR.shape).astype(total_SR.dtype)
        return summed

    def per_expert(self) -> IntArray:
        """[S, E] replicas of every expert."""
        return self._count(self.microbatch, self.expert, self.topology.experts)

    def received(self) -> IntArray:
        """[S, R] experts that every rank receives."""
        return self._count(self.microbatch, self.host, self.topology.ranks)

    def sent(self, *, chain: bool) -> IntArray:
        """[S, R] experts that every rank sends, from home or as a link of a chain.

        The order is the one of `hops.hops`: in a chain, hosts that send experts of their own come
        last, and every replica except the last passes the expert on.
        """
        ranks = self.topology.ranks
        home_C = self.topology.home_of_expert[self.expert]
        direct_SR = self._count(self.microbatch, home_C, ranks)
        if not chain:
            return direct_SR
        sends_C = direct_SR[self.microbatch, self.host] > 0
        order = np.lexsort((self.host, sends_C, self.expert, self.microbatch))
        microbatch, expert, host = (x[order] for x in (self.microbatch, self.expert, self.host))
        changes = (np.diff(microbatch) != 0) | (np.diff(expert) != 0)
        first, last = np.append(True, changes)[: len(order)], np.append(changes, True)[: len(order)]
        from_home = self._count(microbatch[first], home_C[order][first], ranks)
        return from_home + self._count(microbatch[~last], host[~last], ranks)

    def _count(self, microbatch: IntArray, index: IntArray, width: int) -> IntArray:
        """[S, width] how often each index occurs in each microbatch."""
        shape = (len(self.loads), width)
        return np.bincount(microbatch * width + index, minlength=shape[0] * width).reshape(shape)


def sum_by_home(values_SE: NDArray[Any], topology: Topology) -> NDArray[Any]:
    """[S, R] sums over the home experts of every rank."""
    by_rank = np.pad(values_SE[:, topology.experts_by_rank], ((0, 0), (0, 1)))
    sums_SR: NDArray[Any] = np.add.reduceat(by_rank, topology.first_of_rank, axis=1)[:, :-1]
    sums_SR[:, topology.homes_per_rank == 0] = 0
    return sums_SR


def plan_layer(
    loads_SE: IntArray,
    topology: Topology,
    config: BalanceConfig,
    *,
    interval: int,
    past_E: IntArray,
) -> Replicas:
    """Plan all microbatches of a layer.

    interval: microbatches for which policies that use past loads keep their placement. The past is
        the interval before; `past_E` for the first one.
    """
    policy = get_policy(config.policy)
    # These policies ignore the source ranks, so one source is enough for them.
    sources = 1 if policy.name in OWN else topology.ranks
    source_R = np.arange(sources)[:, None]
    backend, parts = select(), []
    for number, load_E in enumerate(loads_SE):
        if number and number % interval == 0:
            past_E = loads_SE[number - interval : number].sum(axis=0)
        loads_RE = (load_E + source_R) // sources
        problem = Problem(loads_RE, load_E, topology, config, backend, past_E)
        placed_C3 = decided(policy, problem)
        parts.append(np.column_stack([np.full(len(placed_C3), number), placed_C3]))
    return Replicas.of(topology, np.concatenate(parts), loads_SE)
