"""LayerClock: seconds of the stages of one layer, forward and backward, for all microbatches.

Stages follow each other as in the runtime. All ranks synchronise at
dispatch and at combine, so these stages, and the experts between them, take as long as the busiest
rank. Weights of replicas share the ports with dispatched rows or precede them. Gradients of
replicas overlap the last product of the experts, or attention. In several domains, a token crosses
once to every domain that serves it, and the host reads the loads of every layer.

Shapes: S microbatches, R ranks, E experts, C replicas, D fast-link domains.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ultraep.arrays import IntArray
from ultraep.topology import Topology
from ultraep_tools.sim.cluster import GIGA, MICRO
from ultraep_tools.sim.costs import Costs, FloatArray
from ultraep_tools.sim.crossing import served_shares
from ultraep_tools.sim.model import GRADIENT_BYTES, ROW_BYTES
from ultraep_tools.sim.planning import Replicas, sum_by_home
from ultraep_tools.sim.runtime import Runtime

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
        return _total(self.forward)

    @property
    def backward_seconds(self) -> FloatArray:
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
        forward = self._forward(replicas)
        backward = self._backward(replicas, forward) if self.training else {}
        peak_S = replicas.rank_loads.max(axis=1)
        imbalance_S = peak_S / np.maximum(replicas.rank_loads.mean(axis=1), 1e-9)
        replicas_S = np.bincount(replicas.microbatch, minlength=len(peak_S))
        return LayerTimes(forward, backward, peak_S, imbalance_S, replicas_S)

    # -- forward ---------------------------------------------------------------------------------

    def _forward(self, replicas: Replicas) -> dict[str, FloatArray]:
        costs, runtime, ranks = self.costs, self.runtime, self.topology.ranks
        exchange_S = self._exchange(replicas)
        weights_S = np.zeros_like(exchange_S)
        reroute_S = np.zeros_like(exchange_S)
        plan = 0.0
        loads = costs.host() if self.topology.num_domains > 1 else 0.0
        if runtime.relay != "nothing":
            measured = runtime.plan_us is None
            plan = (runtime.layer_us + (runtime.plan_us or 0.0)) * MICRO
            plan += costs.plan(ranks) if measured else 0.0
            reroute_S += max(costs.reroute(self.rows), costs.schedule(ranks) if measured else 0.0)
            if runtime.streams or runtime.plan_us != 0:
                loads += costs.loads(self.rows, ranks, self.topology.num_domains)
        if runtime.streams:
            weights_S = self._weights(replicas)
            if not runtime.overlaps_dispatch:  # the transfer of weights hides rerouting
                reroute_S = np.maximum(reroute_S - weights_S, 0.0)
        attention = costs.attention(self.tokens, self.context)
        return {
            "attention": np.full_like(exchange_S, attention),
            "loads": np.full_like(exchange_S, loads),
            "plan": np.full_like(exchange_S, plan),
            "replicate": weights_S,
            "reroute": reroute_S,
            "dispatch": exchange_S,
            "experts": self.experts_by_rank(replicas, backward=False).max(axis=1),
            "combine": exchange_S,
        }

    def _exchange(self, replicas: Replicas) -> FloatArray:
        """[S] seconds to send rows to the ranks that serve them, or back: the busiest port."""
        seconds_S: FloatArray = self._ports(replicas).max(axis=1)
        return seconds_S

    def _ports(self, replicas: Replicas, sent: Any = 0.0, received: Any = 0.0) -> FloatArray:
        """[S, R] seconds of every rank's port to exchange rows, beside these bytes of weights."""
        if self.topology.num_domains > 1:
            return self._ports_by_domain(replicas, np.maximum(sent, received))
        seconds_SR: FloatArray = np.maximum(
            self._port(self.rows, sent), self._port(replicas.rank_loads, received)
        )
        return seconds_SR

    def _port(self, rows: Any, weight_bytes: Any) -> FloatArray:
        """Return the seconds of ports in one domain that send or receive these rows and weights."""
        ranks = self.topology.ranks
        row_bytes = self._row_bytes * rows * (ranks - 1) / ranks
        return self.costs.on_links(row_bytes + weight_bytes) + self.costs.latency(1)

    def _mean_of_domain(self, rows_SR: Any) -> FloatArray:
        size = self.topology.domain_size
        mean_SD = rows_SR.reshape(len(rows_SR), -1, size).mean(axis=2)
        return np.repeat(mean_SD, size, axis=1)

    def _ports_by_domain(self, replicas: Replicas, weight_bytes: Any) -> FloatArray:
        """Like `_ports`; tokens cross to the other domains, then rows are spread inside of each.

        Weights need only the link inside, so they move while tokens cross.
        """
        costs, size, domains = self.costs, self.topology.domain_size, self.topology.num_domains
        served_SD = served_shares(replicas.loads, self.topology, costs.model.top_k)
        received_SD = (domains - 1) * served_SD
        sent_SD = served_SD.sum(axis=1, keepdims=True) - served_SD
        tokens_SR = self.tokens * np.repeat(np.maximum(sent_SD, received_SD), size, axis=1)
        crossing_SR = costs.on_links(0.0, tokens_SR * self._row_bytes) + costs.latency(domains)
        loads_SR = replicas.rank_loads
        rows_SR = np.maximum(loads_SR, self._mean_of_domain(loads_SR)) * (size - 1) / size
        link_SR = costs.on_links(rows_SR * self._row_bytes) + costs.latency(1)
        with_weights_SR = costs.on_links(rows_SR * self._row_bytes + weight_bytes)
        seconds_SR: FloatArray = np.maximum(crossing_SR + link_SR, with_weights_SR)
        return seconds_SR

    @property
    def _row_bytes(self) -> int:
        return ROW_BYTES * self.costs.model.width

    def experts_by_rank(self, replicas: Replicas, *, backward: bool) -> FloatArray:
        """[S, R] seconds of every rank's slots, one after the other, and of moving its rows."""
        seconds = partial(self.costs.experts, backward=backward)
        products_SR: FloatArray = replicas.sum_by_rank(
            seconds(replicas.at_home), seconds(replicas.rows)
        )
        return products_SR + (2 if backward else 1) * self.costs.row_moves(replicas.rank_loads)

    # -- weights ---------------------------------------------------------------------------------

    def _weights(self, replicas: Replicas) -> FloatArray:
        """[S] seconds of sending weights that the exchange of rows does not hide."""
        sent_SR, hops_S = self._sent(replicas)
        received_SR = replicas.received()
        size = float(self.costs.model.slot_bytes(training=False))
        start_S = hops_S * self.costs.hop()
        if not self.runtime.overlaps_dispatch:
            busiest_S = np.maximum(sent_SR.max(axis=1), received_SR.max(axis=1)) * size
            return self.costs.on_links(busiest_S) + start_S
        both_S = self._ports(replicas, sent_SR * size, received_SR * size).max(axis=1)
        late_S: FloatArray = np.maximum(both_S + start_S - self._exchange(replicas), 0.0)
        return late_S

    def _sent(self, replicas: Replicas) -> tuple[FloatArray, FloatArray]:
        """[S, R] experts that every rank sends, and [S] hops until the last replica starts."""
        direct_SR = replicas.sent(chain=False).astype(float)
        fan_SE = replicas.per_expert()
        longest_S = fan_SE.max(axis=1)
        any_S = (longest_S > 0).astype(float)
        if self.runtime.relay == "tree":
            # A home with many replicas serves about sqrt(replicas) relays, which serve the rest.
            relays_SE = np.where(fan_SE >= MIN_TREE, np.ceil(np.sqrt(fan_SE)), fan_SE)
            relayed_SE = (fan_SE - relays_SE).astype(np.int64)
            tree_SR = direct_SR - sum_by_home(relayed_SE, self.topology)
            return tree_SR, any_S + (longest_S >= MIN_TREE)
        chain_SR = replicas.sent(chain=True).astype(float)
        chain_SR += np.maximum(longest_S - 1, 0)[:, None] / CHUNKS
        chains_S = chain_SR.max(axis=1) < direct_SR.max(axis=1)
        sent_SR = np.where(chains_S[:, None], chain_SR, direct_SR)
        return sent_SR, np.where(chains_S, longest_S, any_S)

    # -- backward --------------------------------------------------------------------------------

    def _backward(
        self, replicas: Replicas, forward: dict[str, FloatArray]
    ) -> dict[str, FloatArray]:
        runtime, exchange_S = self.runtime, self._exchange(replicas)
        experts_S = self.experts_by_rank(replicas, backward=True).max(axis=1)
        attention = self.costs.attention(self.tokens, self.context, backward=True)
        attention_S = np.full_like(exchange_S, attention)
        sends_again = runtime.streams and not (runtime.reuses_weights and self.recompute)
        again_S = self._weights(replicas) if sends_again else 0 * exchange_S
        hiding_S = attention_S if runtime.reduce_under == "attention" else LAST_PRODUCT * experts_S
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
        count_SE = replicas.per_expert()
        if self.runtime.relay == "placed":  # an expert that moved has one instance fewer
            count_SE -= (count_SE > 0) & (replicas.at_home == 0)
        size = float(GRADIENT_BYTES * self.costs.model.expert_weights)
        link_rate = self.costs.cluster.link_gb_s * GIGA * self.costs.rates.link
        busiest_S = sum_by_home(count_SE, self.topology).max(axis=1) * size
        seconds_S: FloatArray = busiest_S / (self.runtime.reduce_gb_s * GIGA or link_rate)
        return seconds_S


def _total(stages: dict[str, FloatArray]) -> FloatArray:
    total: FloatArray = np.sum(list(stages.values()), axis=0)
    return total
