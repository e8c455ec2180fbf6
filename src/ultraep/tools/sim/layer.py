"""One layer under the clock: the eight stages of all microbatches, forward and backward.

Stages wait for each other as in the runtime (`runtime/overlap.py`): all ranks meet when rows are
dispatched and when outputs are combined, so each of these stages, and the experts between them,
lasts as long as its busiest rank. Weights share the ports with the rows that are dispatched, or go
before them; gradients of copies travel beside the last product.

Shapes: S microbatches, R ranks, E experts, C copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.tools.sim.cluster import MICRO
from ultraep.tools.sim.costs import GRADIENT_BYTES, ROW_BYTES, Costs
from ultraep.tools.sim.planning import (
    CopySets,
    copies_of_expert,
    received_by_rank,
    sends_by_rank,
    sum_by_home,
    sum_by_rank,
)
from ultraep.tools.sim.runtime import Runtime
from ultraep.topology import Topology

FloatArray = NDArray[np.float64]

LAST_PRODUCT = 1 / 3  # of the experts' backward: the gradient of the rows that came in
MIN_TREE = 4  # copies from which on the published runtime puts relays between
CHUNKS = 16  # pieces of an expert in a chain


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of every stage, [S] each, and what else a plan entails."""

    forward: dict[str, FloatArray]
    backward: dict[str, FloatArray]
    rank_rows: IntArray  # [S] of the fullest rank
    imbalance: FloatArray  # [S]
    copies: IntArray  # [S]

    @property
    def forward_seconds(self) -> FloatArray:
        """[S] of the whole forward pass."""
        return _total(self.forward)

    @property
    def backward_seconds(self) -> FloatArray:
        """[S] of the whole backward pass."""
        return _total(self.backward)


@dataclass(frozen=True, kw_only=True)
class LayerClock:
    """What a layer costs on a cluster, under one way of carrying plans out."""

    costs: Costs
    topology: Topology
    runtime: Runtime
    tokens: int  # of every rank in a microbatch
    context: float  # tokens before each of them, on average
    recompute: bool = True  # the forward pass is run again before backward
    training: bool = True

    @property
    def rows(self) -> int:
        """Rows that every rank sends out."""
        return self.tokens * self.costs.model.top_k

    def times(self, copies: CopySets) -> LayerTimes:
        """Times of all microbatches."""
        rank_SR = copies.rank_loads(self.topology)
        forward = self._forward(copies, rank_SR)
        backward = self._backward(copies, rank_SR, forward) if self.training else {}
        copies_S = np.bincount(copies.microbatch, minlength=len(rank_SR))
        peak_S = rank_SR.max(axis=1)
        return LayerTimes(
            forward,
            backward,
            peak_S,
            peak_S / np.maximum(rank_SR.mean(axis=1), 1e-9),
            copies_S,
        )

    # -- forward ---------------------------------------------------------------------------------

    def _forward(self, copies: CopySets, rank_SR: IntArray) -> dict[str, FloatArray]:
        whole = np.ones(len(rank_SR))
        dispatch_S = self._exchange(rank_SR)
        control = self._control()
        replicate_S, reroute_S = self._before_dispatch(copies, rank_SR, dispatch_S)
        return {
            "attention": whole * self.costs.attention_forward(self.tokens, self.context),
            "loads": whole * control[0],
            "plan": whole * control[1],
            "replicate": replicate_S,
            "reroute": reroute_S,
            "dispatch": dispatch_S,
            "experts": self._experts(copies, rank_SR, back=False).max(axis=1),
            "combine": self._exchange(rank_SR),
        }

    def _control(self) -> tuple[float, float]:
        """Loads and plan; what a placement without planning does not pay."""
        runtime, costs, ranks = self.runtime, self.costs, self.topology.ranks
        extra = runtime.layer_us * MICRO
        if runtime.relay == "nothing":
            return 0.0, 0.0
        if runtime.relay == "placed" and not runtime.plan_us:
            return 0.0, extra
        loads = costs.loads(self.rows, ranks, self.topology.num_domains)
        measured = runtime.planner == "measured"
        return loads, extra + (costs.plan(ranks) if measured else runtime.plan_us * MICRO)

    def _exchange(self, rank_SR: IntArray) -> FloatArray:
        """[S] rows to the ranks that serve them, or back: as long as the busiest port."""
        busiest_S = rank_SR.max(axis=1).astype(float)  # no rank sends more than the mean
        return self._ports(busiest_S, 0.0) + self.costs.latency(self.topology.num_domains)

    def _ports(self, rows: FloatArray, weight_bytes: NDArray[Any] | float) -> FloatArray:
        topology = self.topology
        size = ROW_BYTES * self.costs.model.width * rows
        outside = size * (1 - topology.domain_size / topology.ranks)
        inside = size * (topology.domain_size - 1) / topology.ranks
        return self.costs.on_links(inside + weight_bytes, outside)

    def _experts(self, copies: CopySets, rank_SR: IntArray, *, back: bool) -> FloatArray:
        """[S, R] seconds of the slots of every rank, one by one, and of moving its rows."""
        seconds_of = self.costs.experts_backward if back else self.costs.experts_forward
        at_home_SE, copy_C = seconds_of(copies.at_home), seconds_of(copies.rows)
        products_SR: FloatArray = sum_by_rank(copies, at_home_SE, copy_C, self.topology)
        return products_SR + (2 if back else 1) * self.costs.row_moves(rank_SR)

    def by_rank(self, copies: CopySets) -> dict[str, FloatArray]:
        """[S, R] seconds for which each rank is busy, of the stages in which ranks differ."""
        rank_SR = copies.rank_loads(self.topology)
        latency = self.costs.latency(self.topology.num_domains)
        busy_SR = self._ports(np.maximum(rank_SR, self.rows).astype(float), 0.0) + latency
        experts_SR = self._experts(copies, rank_SR, back=False)
        times = {"dispatch": busy_SR, "experts": experts_SR, "combine": busy_SR}
        if self.training:
            times["experts back"] = self._experts(copies, rank_SR, back=True)
        return times

    # -- weights ---------------------------------------------------------------------------------

    def _before_dispatch(
        self, copies: CopySets, rank_SR: IntArray, exchange_S: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """[S] seconds by which weights delay the dispatch, and rerouting that they do not hide."""
        nothing_S = np.zeros(len(rank_SR))
        if self.runtime.relay == "nothing":
            return nothing_S, nothing_S
        measured = self.runtime.planner == "measured"
        schedule = self.costs.schedule(self.topology.ranks) if measured else 0.0
        ready_S = nothing_S + max(self.costs.reroute(self.rows), schedule)
        if not self.runtime.streams:
            return nothing_S, ready_S
        streamed_S = self._streamed(copies, rank_SR, exchange_S)
        hidden_S = nothing_S if self.runtime.beside else streamed_S
        return streamed_S, np.maximum(ready_S - hidden_S, 0.0)

    def _streamed(self, copies: CopySets, rank_SR: IntArray, exchange_S: FloatArray) -> FloatArray:
        """[S] seconds of the weights: those that the exchange of rows beside them does not hide."""
        out_SR, hops_S = self._sends(copies)
        received_SR = received_by_rank(copies, self.topology)
        size = float(self.costs.model.expert_bytes)
        start_S = hops_S * self.costs.hop()
        if not self.runtime.beside:
            busiest_S = np.maximum(out_SR.max(axis=1), received_SR.max(axis=1)) * size
            return self.costs.on_links(busiest_S, 0.0) + start_S
        leaving = self._ports(np.full(rank_SR.shape, float(self.rows)), out_SR * size)
        coming = self._ports(rank_SR.astype(float), received_SR * size)
        both_S = np.maximum(leaving, coming).max(axis=1)
        latency = self.costs.latency(self.topology.num_domains)
        late_S: FloatArray = both_S + latency + start_S - exchange_S
        return np.maximum(late_S, 0.0)

    def _sends(self, copies: CopySets) -> tuple[FloatArray, FloatArray]:
        """[S, R] experts that every rank sends, and [S] hops until the last copy has begun."""
        relay = self.runtime.relay
        direct_SR = sends_by_rank(copies, self.topology, chain=False).astype(float)
        longest_S = copies_of_expert(copies, self.topology).max(axis=1)
        if relay == "direct":
            return direct_SR, (longest_S > 0).astype(float)
        if relay == "tree":
            hops_S = (longest_S > 0).astype(float) + (longest_S >= MIN_TREE)
            return _tree(copies, self.topology, direct_SR), hops_S
        chain_SR = sends_by_rank(copies, self.topology, chain=True).astype(float)
        chain_SR += np.maximum(longest_S - 1, 0)[:, None] / CHUNKS
        if relay == "chain":
            return chain_SR, longest_S.astype(float)
        better = chain_SR.max(axis=1) < direct_SR.max(axis=1)
        sends = np.where(better[:, None], chain_SR, direct_SR)
        return sends, np.where(better, longest_S, np.minimum(longest_S, 1)).astype(float)

    # -- backward --------------------------------------------------------------------------------

    def _backward(
        self, copies: CopySets, rank_SR: IntArray, forward: dict[str, FloatArray]
    ) -> dict[str, FloatArray]:
        whole = np.ones(len(rank_SR))
        exchange_S = self._exchange(rank_SR)
        experts_S = self._experts(copies, rank_SR, back=True).max(axis=1)
        attention = self.costs.attention_backward(self.tokens, self.context)
        kept = not self.runtime.streams or (self.runtime.kept and self.recompute)
        restored_S = 0 * whole if kept else self._streamed(copies, rank_SR, exchange_S)
        under_attention = self.runtime.hidden == "attention"
        hiding_S = whole * attention if under_attention else LAST_PRODUCT * experts_S
        times = {
            "attention back": whole * attention,
            "weights again": restored_S,
            "combine back": exchange_S,
            "experts back": experts_S,
            "dispatch back": self._exchange(rank_SR),
            "reduce": np.maximum(self._reduce(copies) - hiding_S, 0.0)
            + self.runtime.backward_us * MICRO,
        }
        if self.recompute:
            times["recompute"] = _total(forward)
        return times

    def _reduce(self, copies: CopySets) -> FloatArray:
        """[S] gradients of copies into their homes: as long as the home with most of them."""
        if self.runtime.relay == "nothing":
            return np.zeros(len(copies.at_home))
        count_SE = copies_of_expert(copies, self.topology)
        if self.runtime.relay == "placed":  # an expert that moved has one instance fewer
            count_SE -= (count_SE > 0) & (copies.at_home == 0)
        size = float(GRADIENT_BYTES * self.costs.model.expert_weights)
        busiest_S = sum_by_home(count_SE, self.topology).max(axis=1)
        return self.costs.reduced_at(busiest_S * size, self.runtime.reduce_gb_s)


def _total(stages: dict[str, FloatArray]) -> FloatArray:
    """[S] of all stages together."""
    total: FloatArray = np.sum(list(stages.values()), axis=0)
    return total


def _tree(copies: CopySets, topology: Topology, direct_SR: FloatArray) -> FloatArray:
    """[S, R] experts sent when a home with many copies has some of them relayed once.

    With f copies there are about sqrt(f) relays, and the home serves these alone.
    """
    fan_SE = copies_of_expert(copies, topology)
    relays_SE = np.where(fan_SE >= MIN_TREE, np.ceil(np.sqrt(fan_SE)), fan_SE)
    spared_SE = (fan_SE - relays_SE).astype(np.int64)
    left_SR: FloatArray = direct_SR - sum_by_home(spared_SE, topology)
    return left_SR
