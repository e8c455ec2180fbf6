"""Costs: seconds of single operations, from data sheets and measured points.

A product takes the longer of its operations at the device's rate and its bytes at the memory's
rate, divided by the efficiency measured for that number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep.config import Rates
from ultraep_tools.sim.cluster import GIGA, MICRO, Cluster
from ultraep_tools.sim.model import (
    GATED,
    GRADIENT_BYTES,
    ROW_BYTES,
    WEIGHT_BYTES,
    Model,
)
from ultraep_tools.sim.presets import presets

FloatArray = NDArray[np.float64]

BACKWARD = 2  # operations of a product's backward over its forward
CORE_BACKWARD = 2.5  # the same for attention scores and values
# Times that a token's vector passes through memory outside products, forward: two norms (read and
# written), two residual sums (two reads, one write), rotary embedding of queries and keys, the
# router's read. Backward doubles them.
ELEMENTWISE_PASSES = 16
ROW_PASSES = 3  # per row: gathered, written, read again for the sum
CONTROL_ROWS = 8192 * 8  # rows at which counting and rerouting were measured
EXPERT_BACKWARD_BYTES = 2 * WEIGHT_BYTES + GRADIENT_BYTES  # per weight: two reads, one gradient


@dataclass(frozen=True)
class MeasuredRates:
    """Efficiencies (share of the data-sheet rate), and times of the control plane."""

    dense_matmul: float
    attention_forward: float
    attention_backward: float
    memory: float
    link: float
    network: float
    rows: list[float]  # per expert; the points of the grouped efficiencies
    grouped_forward: list[float]
    grouped_backward: list[float]
    ranks: list[float]  # the points of plan_us and schedule_us
    plan_us: list[float]
    schedule_us: list[float]
    barrier_us: float
    count_us: float
    reroute_us: float
    hop_us: float
    framework: float  # slowdown of everything except experts and messages
    host_us: float = 0.0  # launches after the host has waited for the device


@cache
def measured_rates() -> MeasuredRates:
    """Return the measured points that ship with the package."""
    tables = presets("measured")
    values = tables["fractions"] | tables["grouped"] | tables["control"]
    del values["source"]
    return MeasuredRates(**values, framework=presets("calibrated")["framework"]["factor"])


@dataclass(frozen=True)
class Costs:
    """Seconds on one cluster for one model."""

    cluster: Cluster
    model: Model
    rates: MeasuredRates

    # -- computation -----------------------------------------------------------------------------

    def experts(self, rows: Any, *, backward: bool = False) -> FloatArray:
        """Return the seconds of each slot, given its rows. Backward: gradients of rows, weights."""
        factor, weight_bytes, efficiency = 1, WEIGHT_BYTES, self.rates.grouped_forward
        if backward:
            factor, weight_bytes = BACKWARD, EXPERT_BACKWARD_BYTES
            efficiency = self.rates.grouped_backward
        rows, model = np.asarray(rows, dtype=float), self.model
        traffic = ROW_BYTES * (2 * model.width + 4 * model.expert_width)  # read and written per row
        operations = factor * 2.0 * model.expert_weights * rows
        moved = weight_bytes * model.expert_weights + factor * traffic * rows
        roofline = np.maximum(operations / self.cluster.matmul, moved / self.cluster.memory_rate)
        reached = np.interp(np.log2(np.maximum(rows, 1.0)), np.log2(self.rates.rows), efficiency)
        seconds: FloatArray = np.where(rows > 0, roofline / reached, 0.0)
        return seconds

    def row_moves(self, rows: Any) -> FloatArray:
        """Return the seconds to sort rows by slot, or to restore their order."""
        return ROW_PASSES * np.asarray(rows, dtype=float) / self._vectors_per_second

    def attention(self, tokens: float, context: float, *, backward: bool = False) -> float:
        """Return the seconds of a layer without its experts. context: tokens before each token."""
        model, rates = self.model, self.rates
        products = self._dense(tokens, model.attention_weights + model.shared_weights)
        core = tokens * model.attended(context) * model.attention.core / self.cluster.matmul
        passes = ELEMENTWISE_PASSES * tokens / self._vectors_per_second
        if not backward:
            return rates.framework * (products + core / rates.attention_forward + passes)
        core *= CORE_BACKWARD / rates.attention_backward
        return rates.framework * (BACKWARD * products + core + 2 * passes)

    def dense_mlp(self, tokens: float) -> float:
        """Return the forward seconds of the MLP of a layer without experts."""
        weights = GATED * self.model.width * self.model.dense_width
        return self.rates.framework * self._dense(tokens, weights)

    def head(self, tokens: float) -> float:
        """Return the forward seconds of the output embedding."""
        return self.rates.framework * self._dense(tokens, self.model.vocabulary * self.model.width)

    def _dense(self, tokens: float, weights: int) -> float:
        return 2.0 * tokens * weights / (self.cluster.matmul * self.rates.dense_matmul)

    @property
    def _vectors_per_second(self) -> float:
        """Vectors of the model's width that memory reads or writes per second."""
        return self.cluster.memory_rate * self.rates.memory / (ROW_BYTES * self.model.width)

    # -- links -----------------------------------------------------------------------------------

    def on_links(self, bytes_inside: Any, bytes_outside: Any = 0.0) -> FloatArray:
        """Return the seconds of a port, given its bytes inside and beyond the domain."""
        cluster, rates = self.cluster, self.rates
        inside = np.asarray(bytes_inside) / (cluster.link_gb_s * GIGA * rates.link)
        outside = np.asarray(bytes_outside) / (cluster.network_gb_s * GIGA * rates.network)
        seconds: FloatArray = np.maximum(inside, outside)
        return seconds

    def latency(self, domains: int) -> float:
        """Return the fixed seconds of one exchange of messages."""
        return (self.cluster.link_us if domains == 1 else self.cluster.network_us) * MICRO

    # -- control ---------------------------------------------------------------------------------

    def plan(self, ranks: int) -> float:
        """Return the measured seconds of planning on the device."""
        return self._by_ranks(ranks, self.rates.plan_us)

    def schedule(self, ranks: int) -> float:
        """Return the measured seconds of scheduling the weight transfers."""
        return self._by_ranks(ranks, self.rates.schedule_us)

    def _by_ranks(self, ranks: int, table_us: list[float]) -> float:
        log_us = np.interp(np.log2(ranks), np.log2(self.rates.ranks), np.log2(table_us))
        return float(2.0**log_us) * MICRO

    def loads(self, rows: float, ranks: int, domains: int) -> float:
        """Return the seconds to count the rows of a rank and to exchange the counts."""
        counting = self.rates.count_us * MICRO * rows / CONTROL_ROWS
        exchange = float(self.on_links(8.0 * self.model.experts * ranks))
        return counting + exchange + self.rates.barrier_us * MICRO + self.latency(domains)

    def reroute(self, rows: float) -> float:
        """Return the seconds to assign a slot to every row of a rank."""
        return self.rates.reroute_us * MICRO * rows / CONTROL_ROWS

    def host(self) -> float:
        """Return the seconds that a device waits for a host that has waited for its loads."""
        return self.rates.host_us * MICRO

    def hop(self) -> float:
        """Return the fixed seconds of one relay hop."""
        return self.rates.hop_us * MICRO


# -- rates ---------------------------------------------------------------------------------------


def rates_by(costs: Costs, *, ranks: int, tokens: int, training: bool) -> Rates:
    """Return the rates of plans by time for these costs."""
    model = costs.model
    passes, weight_bytes = (2, EXPERT_BACKWARD_BYTES) if training else (1, WEIGHT_BYTES)
    # Seconds of one more row, averaged from `rows` to `2 * rows` of an expert.
    rows = max(1.0, ranks * tokens * model.top_k / model.experts)
    seconds = costs.on_links(2 * passes * ROW_BYTES * model.width)
    for backward in (False, True)[:passes]:
        once, twice = costs.experts([rows, 2 * rows], backward=backward)
        seconds = seconds + max(0.0, twice - once) / rows
    return Rates.from_seconds(
        row=float(seconds),
        copy=float(costs.on_links(weight_bytes * model.expert_weights)),
        each=0.0,
        layer=passes * (costs.schedule(ranks) + costs.hop()),
    )
