"""LayerClock: seconds of the stages of one layer, forward and backward, for all microbatches.

Stages follow each other as in the runtime (`runtime/overlap.py`). All ranks synchronise at
dispatch and at combine, so these stages, and the experts between them, take as long as the busiest
rank. Weights of replicas share the ports with dispatched rows or precede them. Gradients of
replicas overlap the last product of the experts, or attention.

Shapes: S microbatches, R ranks, E experts, C replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.tools.sim.cluster import GIGA, MICRO
from ultraep.tools.sim.costs import Costs, FloatArray
from ultraep.tools.sim.model import GRADIENT_BYTES, ROW_BYTES
from ultraep.tools.sim.planning import Replicas, sum_by_home
from ultraep.tools.sim.runtime import Runtime
from ultraep.topology import Topology

LAST_PRODUCT = 1 / 3  # share of the experts' backward: the gradient of the input rows
MIN_TREE = 4  # replicas from which the published runtime uses relays
CHUNKS = 16  # pieces of an expert in a chain


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of every stage, [S] each, and figures of the plans."""

    forward: dict[str, FloatArray]
    backward: dict[str, FloatArray]
    rank_rows: IntArray  # [S] rows of the busiest rank
    imbalance: FloatArray  # [S]
    replicas: IntArray  # [S]

    @property
    def forward_seconds(self) -> FloatArray:
        """[S] seconds of the forward pass."""
        return _total(self.forward)

    @property
    def backward_seconds(self) -> FloatArray:
        """[S] seconds of the backward pass."""
        return _total(self.backward)


@dataclass(frozen=True, kw_only=True)
class LayerClock:
    """The costs of a layer on a cluster under one runtime."""

    costs: Costs
    topology: Topology
    runtime: Runtime
    tokens: int  # per rank and microbatch
    context: float  # mean number of tokens before each token
    recompute: bool = True  # backward runs the forward pass again
    training: bool = True

    @property
    def rows(self) -> int:
        """Rows that every rank sends."""
        return self.tokens * self.costs.model.top_k

    def times(self, replicas: Replicas) -> LayerTimes:
        """Return the times of all microbatches."""
        forward = self._forward(replicas)
        backward = self._backward(replicas, forward) if self.training else {}
        peak_S = replicas.rank_loads.max(axis=1)
        imbalance_S = peak_S / np.maximum(replicas.rank_loads.mean(axis=1), 1e-9)
        replicas_S = np.bincount(replicas.microbatch, minlength=len(peak_S))
        return LayerTimes(forward, backward, peak_S, imbalance_S, replicas_S)

    def by_rank(self, replicas: Replicas) -> dict[str, FloatArray]:
        """[S, R] busy seconds of each rank, for the stages in which ranks differ."""
        rows_SR = np.maximum(replicas.rank_loads, self.rows).astype(float)
        busy_SR = self._ports(rows_SR) + self._latency
        experts_SR = self._experts(replicas, backward=False)
        times = {"dispatch": busy_SR, "experts": experts_SR, "combine": busy_SR}
        if self.training:
            times["experts back"] = self._experts(replicas, backward=True)
        return times

    # -- forward ---------------------------------------------------------------------------------

    def _forward(self, replicas: Replicas) -> dict[str, FloatArray]:
        exchange_S = self._exchange(replicas)
        ones_S = np.ones_like(exchange_S)
        loads, plan = self._control()
        replicate_S, reroute_S = self._before_dispatch(replicas)
        return {
            "attention": ones_S * self.costs.attention_forward(self.tokens, self.context),
            "loads": ones_S * loads,
            "plan": ones_S * plan,
            "replicate": replicate_S,
            "reroute": reroute_S,
            "dispatch": exchange_S,
            "experts": self._experts(replicas, backward=False).max(axis=1),
            "combine": exchange_S,
        }

    def _control(self) -> tuple[float, float]:
        """Seconds of loads and of planning."""
        runtime, ranks = self.runtime, self.topology.ranks
        extra = runtime.layer_us * MICRO
        if runtime.relay == "nothing":
            return 0.0, 0.0
        if runtime.relay == "placed" and not runtime.plan_us:
            return 0.0, extra
        loads = self.costs.loads(self.rows, ranks, self.topology.num_domains)
        measured = runtime.planner == "measured"
        return loads, extra + (self.costs.plan(ranks) if measured else runtime.plan_us * MICRO)

    @property
    def _latency(self) -> float:
        return self.costs.latency(self.topology.num_domains)

    def _exchange(self, replicas: Replicas) -> FloatArray:
        """[S] seconds to send rows to the ranks that serve them, or back: the busiest port."""
        # No rank sends more than the mean, so the busiest port is a receiver.
        return self._ports(replicas.rank_loads.max(axis=1).astype(float)) + self._latency

    def _ports(self, rows: FloatArray, weight_bytes: NDArray[Any] | float = 0.0) -> FloatArray:
        topology = self.topology
        size = ROW_BYTES * self.costs.model.width * rows
        outside = size * (1 - topology.domain_size / topology.ranks)
        inside = size * (topology.domain_size - 1) / topology.ranks
        return self.costs.on_links(inside + weight_bytes, outside)

    def _experts(self, replicas: Replicas, *, backward: bool) -> FloatArray:
        """[S, R] seconds of every rank's slots, one after the other, and of moving its rows."""
        seconds_of = self.costs.experts_backward if backward else self.costs.experts_forward
        products_SR: FloatArray = replicas.sum_by_rank(
            seconds_of(replicas.at_home), seconds_of(replicas.rows)
        )
        return products_SR + (2 if backward else 1) * self.costs.row_moves(replicas.rank_loads)

    # -- weights ---------------------------------------------------------------------------------

    def _before_dispatch(self, replicas: Replicas) -> tuple[FloatArray, FloatArray]:
        """[S] seconds by which weights delay dispatch, and rerouting that they do not hide."""
        zeros_S = np.zeros(len(replicas.rank_loads))
        if self.runtime.relay == "nothing":
            return zeros_S, zeros_S
        measured = self.runtime.planner == "measured"
        schedule = self.costs.schedule(self.topology.ranks) if measured else 0.0
        reroute_S = zeros_S + max(self.costs.reroute(self.rows), schedule)
        if not self.runtime.streams:
            return zeros_S, reroute_S
        weights_S = self._weights(replicas)
        hidden_S = zeros_S if self.runtime.beside else weights_S
        return weights_S, np.maximum(reroute_S - hidden_S, 0.0)

    def _weights(self, replicas: Replicas) -> FloatArray:
        """[S] seconds of sending weights that the exchange of rows does not hide."""
        sent_SR, hops_S = self._sent(replicas)
        received_SR = replicas.received()
        size = float(self.costs.model.slot_bytes(training=False))
        start_S = hops_S * self.costs.hop()
        if not self.runtime.beside:
            busiest_S = np.maximum(sent_SR.max(axis=1), received_SR.max(axis=1)) * size
            return self.costs.on_links(busiest_S, 0.0) + start_S
        rank_SR = replicas.rank_loads.astype(float)
        out_SR = self._ports(np.full_like(rank_SR, self.rows), sent_SR * size)
        in_SR = self._ports(rank_SR, received_SR * size)
        both_S = np.maximum(out_SR, in_SR).max(axis=1)
        late_S: FloatArray = both_S + self._latency + start_S - self._exchange(replicas)
        return np.maximum(late_S, 0.0)

    def _sent(self, replicas: Replicas) -> tuple[FloatArray, FloatArray]:
        """[S, R] experts that every rank sends, and [S] hops until the last replica starts."""
        relay = self.runtime.relay
        direct_SR = replicas.sent(chain=False).astype(float)
        fan_SE = replicas.per_expert()
        longest_S = fan_SE.max(axis=1)
        any_S = (longest_S > 0).astype(float)
        if relay == "direct":
            return direct_SR, any_S
        if relay == "tree":
            # A home with many replicas serves about sqrt(replicas) relays, which serve the rest.
            relays_SE = np.where(fan_SE >= MIN_TREE, np.ceil(np.sqrt(fan_SE)), fan_SE)
            relayed_SE = (fan_SE - relays_SE).astype(np.int64)
            tree_SR = direct_SR - sum_by_home(relayed_SE, self.topology)
            return tree_SR, any_S + (longest_S >= MIN_TREE)
        chain_SR = replicas.sent(chain=True).astype(float)
        chain_SR += np.maximum(longest_S - 1, 0)[:, None] / CHUNKS
        if relay == "chain":
            return chain_SR, longest_S.astype(float)
        faster_S = chain_SR.max(axis=1) < direct_SR.max(axis=1)
        sent_SR = np.where(faster_S[:, None], chain_SR, direct_SR)
        return sent_SR, np.where(faster_S, longest_S, any_S)

    # -- backward --------------------------------------------------------------------------------

    def _backward(
        self, replicas: Replicas, forward: dict[str, FloatArray]
    ) -> dict[str, FloatArray]:
        runtime, exchange_S = self.runtime, self._exchange(replicas)
        experts_S = self._experts(replicas, backward=True).max(axis=1)
        attention = self.costs.attention_backward(self.tokens, self.context)
        attention_S = np.full_like(exchange_S, attention)
        kept = not runtime.streams or (runtime.kept and self.recompute)
        again_S = 0 * exchange_S if kept else self._weights(replicas)
        hiding_S = attention_S if runtime.hidden == "attention" else LAST_PRODUCT * experts_S
        exposed_S = np.maximum(self._reduce(replicas) - hiding_S, 0.0)
        times = {
            "attention back": attention_S,
            "weights again": again_S,
            "combine back": exchange_S,
            "experts back": experts_S,
            "dispatch back": exchange_S,
            "reduce": exposed_S + runtime.backward_us * MICRO,
        }
        if self.recompute:
            times["recompute"] = _total(forward)
        return times

    def _reduce(self, replicas: Replicas) -> FloatArray:
        """[S] seconds to reduce gradients of replicas into the home that receives most."""
        if self.runtime.relay == "nothing":
            return np.zeros(len(replicas.at_home))
        count_SE = replicas.per_expert()
        if self.runtime.relay == "placed":  # an expert that moved has one instance fewer
            count_SE -= (count_SE > 0) & (replicas.at_home == 0)
        size = float(GRADIENT_BYTES * self.costs.model.expert_weights)
        link_rate = self.costs.cluster.link_gb_s * GIGA * self.costs.rates.link
        busiest_S = sum_by_home(count_SE, self.topology).max(axis=1) * size
        seconds_S: FloatArray = busiest_S / (self.runtime.reduce_gb_s * GIGA or link_rate)
        return seconds_S


def _total(stages: dict[str, FloatArray]) -> FloatArray:
    """[S] seconds of all stages together."""
    total: FloatArray = np.sum(list(stages.values()), axis=0)
    return total
