"""Costs: seconds of single operations, from data sheets and measured points.

A product takes the longer of its operations at the device's rate and its bytes at the memory's
rate, divided by the efficiency measured for that number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep.config import Rates
from ultraep.errors import ConfigError
from ultraep.tools.sim.cluster import GIGA, MICRO, Cluster, load_cluster
from ultraep.tools.sim.model import (
    GATED,
    GRADIENT_BYTES,
    ROW_BYTES,
    WEIGHT_BYTES,
    Model,
    load_model,
)
from ultraep.tools.sim.presets import presets

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
    rows: FloatArray
    grouped_forward: FloatArray
    grouped_backward: FloatArray
    ranks: FloatArray
    plan_us: FloatArray
    schedule_us: FloatArray
    meeting_us: float  # barrier
    count_us: float
    reroute_us: float
    hop_us: float
    framework: float  # slowdown of everything except experts and messages


@cache
def measured_rates() -> MeasuredRates:
    """Return the measured points that ship with the package."""
    tables = presets("measured")
    grouped = tables["grouped"]
    values: Any = {**tables["fractions"], **tables["control"], "rows": grouped["rows"]}
    values |= {f"grouped_{name}": grouped[name] for name in ("forward", "backward")}
    values["framework"] = presets("calibrated")["framework"]["factor"]
    del values["source"]
    for name, value in values.items():
        values[name] = np.array(value, dtype=float) if isinstance(value, list) else float(value)
    return MeasuredRates(**values)


@dataclass(frozen=True)
class Costs:
    """Seconds on one cluster for one model."""

    cluster: Cluster
    model: Model
    rates: MeasuredRates

    # -- experts ---------------------------------------------------------------------------------

    def experts_forward(self, rows: Any) -> FloatArray:
        """Return the seconds of each slot, given its rows."""
        return self._grouped(rows, 1, WEIGHT_BYTES, self.rates.grouped_forward)

    def experts_backward(self, rows: Any) -> FloatArray:
        """Return the backward seconds of each slot: gradients of rows and of weights."""
        efficiency = self.rates.grouped_backward
        return self._grouped(rows, BACKWARD, EXPERT_BACKWARD_BYTES, efficiency)

    def _grouped(
        self, rows: Any, factor: int, weight_bytes: int, efficiency: FloatArray
    ) -> FloatArray:
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
        seconds: FloatArray = self._memory(ROW_PASSES, np.asarray(rows, dtype=float))
        return seconds

    def _memory(self, passes: int, tokens: Any) -> Any:
        """Seconds of moving the vectors of these tokens through memory."""
        moved = passes * ROW_BYTES * self.model.width * tokens
        return moved / (self.cluster.memory_rate * self.rates.memory)

    # -- everything else of a layer --------------------------------------------------------------

    def attention_forward(self, tokens: float, context: float) -> float:
        """Return the seconds of a layer without its experts. context: tokens before each token."""
        core = self._core(tokens, context) / self.rates.attention_forward
        passes: float = self._memory(ELEMENTWISE_PASSES, tokens)
        return self.rates.framework * (self._projections(tokens) + core + passes)

    def attention_backward(self, tokens: float, context: float) -> float:
        """Return the backward seconds of a layer without its experts."""
        products = BACKWARD * self._projections(tokens)
        core = CORE_BACKWARD * self._core(tokens, context) / self.rates.attention_backward
        passes: float = self._memory(ELEMENTWISE_PASSES, tokens)
        return self.rates.framework * (products + core + 2 * passes)

    def dense_mlp(self, tokens: float) -> float:
        """Return the forward seconds of the MLP of a layer without experts."""
        weights = GATED * self.model.width * self.model.dense_width
        return self.rates.framework * self._dense(2.0 * tokens * weights)

    def head(self, tokens: float) -> float:
        """Return the forward seconds of the output embedding."""
        operations = 2.0 * tokens * self.model.vocabulary * self.model.width
        return self.rates.framework * self._dense(operations)

    def _projections(self, tokens: float) -> float:
        weights = self.model.attention_weights + self.model.shared_weights
        return self._dense(2.0 * tokens * weights)

    def _dense(self, operations: float) -> float:
        return operations / (self.cluster.matmul * self.rates.dense_matmul)

    def _core(self, tokens: float, context: float) -> float:
        attended = self.model.attended(context)
        return tokens * attended * self.model.attention.core / self.cluster.matmul

    # -- links -----------------------------------------------------------------------------------

    def on_links(self, bytes_inside: Any, bytes_outside: Any) -> FloatArray:
        """Return the seconds of a port, given its bytes inside and beyond the domain."""
        cluster, rates = self.cluster, self.rates
        inside = np.asarray(bytes_inside) / (cluster.link_gb_s * GIGA * rates.link)
        outside = np.asarray(bytes_outside) / (cluster.network_gb_s * GIGA * rates.network)
        seconds: FloatArray = np.maximum(inside, outside)
        return seconds

    def latency(self, domains: int) -> float:
        """Return the fixed seconds of one exchange of messages."""
        cluster = self.cluster
        return (cluster.link_us if domains == 1 else cluster.network_us) * MICRO

    # -- control ---------------------------------------------------------------------------------

    def plan(self, ranks: int) -> float:
        """Return the measured seconds of planning on the device."""
        return self._by_ranks(ranks, self.rates.plan_us)

    def schedule(self, ranks: int) -> float:
        """Return the measured seconds of scheduling the weight transfers."""
        return self._by_ranks(ranks, self.rates.schedule_us)

    def loads(self, rows: float, ranks: int, domains: int) -> float:
        """Return the seconds to count the rows of a rank and to exchange the counts."""
        counting = self.rates.count_us * MICRO * rows / CONTROL_ROWS
        exchange = float(self.on_links(8.0 * self.model.experts * ranks, 0.0))
        return counting + exchange + self.rates.meeting_us * MICRO + self.latency(domains)

    def reroute(self, rows: float) -> float:
        """Return the seconds to assign a slot to every row of a rank."""
        return self.rates.reroute_us * MICRO * rows / CONTROL_ROWS

    def hop(self) -> float:
        """Return the fixed seconds of one relay hop."""
        return self.rates.hop_us * MICRO

    def _by_ranks(self, ranks: int, table_us: FloatArray) -> float:
        log_us = np.interp(np.log2(ranks), np.log2(self.rates.ranks), np.log2(table_us))
        return float(2.0**log_us) * MICRO


# -- rates ---------------------------------------------------------------------------------------


def rates_of(
    cluster: Cluster | str, model: Model | str, *, ranks: int, tokens: int, training: bool = False
) -> Rates:
    """Return the rates of plans by time for a model on a cluster, without running it.

    cluster, model: records, names of presets, or files.
    tokens: tokens per rank.
    training: include the backward pass, in which weights of replicas are sent again.
    """
    cluster = load_cluster(cluster) if isinstance(cluster, str) else cluster
    model = load_model(model) if isinstance(model, str) else model
    if ranks < 1 or tokens < 1:
        raise ConfigError(f"ranks and tokens must be at least 1, got {ranks} and {tokens}")
    costs = Costs(cluster, model, measured_rates())
    return rates_by(costs, ranks=ranks, tokens=tokens, training=training)


def rates_by(costs: Costs, *, ranks: int, tokens: int, training: bool) -> Rates:
    """Return the rates of plans by time for these costs."""
    model = costs.model
    rows = max(1.0, ranks * tokens * model.top_k / model.experts)
    row, passes, weight_bytes = _marginal(costs.experts_forward, rows), 1, WEIGHT_BYTES
    if training:
        row, passes = row + _marginal(costs.experts_backward, rows), 2
        weight_bytes = EXPERT_BACKWARD_BYTES
    transfer = costs.on_links(2 * passes * ROW_BYTES * model.width, 0.0)
    return Rates.from_seconds(
        row=row + float(transfer),
        copy=float(costs.on_links(weight_bytes * model.expert_weights, 0.0)),
        each=0.0,
        layer=passes * (costs.schedule(ranks) + costs.hop()),
    )


def _marginal(seconds_of: Callable[[float], Any], rows: float) -> float:
    """Return the seconds of one more row, averaged from `rows` to `2 * rows`."""
    return max(0.0, float(seconds_of(2 * rows)) - float(seconds_of(rows))) / rows
