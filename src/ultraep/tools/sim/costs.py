"""Seconds of single things: a product, a row on a link, a plan.

They come from data sheets and measured points.

A product takes the longer of its operations at the device's rate and its bytes at the memory's
rate, over the part of that which was measured for as many rows (`Reached.grouped_*`).
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
from ultraep.tools.sim.model import GATED, WEIGHT_BYTES, Model, load_model
from ultraep.tools.sim.presets import presets

FloatArray = NDArray[np.float64]

ROW_BYTES = 2  # per element of a row that travels: BF16
GRADIENT_BYTES = 4  # of an expert's weight: FP32
BACKWARD = 2  # operations of a product's backward over its forward
CORE_BACKWARD = 2.5  # the same for scores and values of attention
# Times that a token's vector passes through memory outside of products, forward: two norms
# (read and written), two residual sums (two read, one written), rotation of queries and keys, the
# router's reading; backward twice as often.
ELEMENTWISE_PASSES = 16
# Times that a row passes through memory on its way: gathered and written, read again when summed.
ROW_PASSES = 3
CONTROL_ROWS = 8192 * 8  # rows for which counting and rerouting were measured


@dataclass(frozen=True)
class Reached:
    """What is reached of the data sheet, and the measured times of the control plane."""

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
    meeting_us: float
    count_us: float
    reroute_us: float
    hop_us: float
    framework: float  # how much longer everything but experts and messages takes than it should


@cache
def measured_rates() -> Reached:
    """The measured points that come with the package."""
    tables = presets("measured")
    grouped = tables["grouped"]
    values: Any = {**tables["fractions"], **tables["control"], "rows": grouped["rows"]}
    values |= {f"grouped_{way}": grouped[way] for way in ("forward", "backward")}
    values["framework"] = presets("calibrated")["framework"]["factor"]
    del values["source"]
    for name, value in values.items():
        values[name] = np.array(value, dtype=float) if isinstance(value, list) else float(value)
    return Reached(**values)


@dataclass(frozen=True)
class Costs:
    """Seconds on one cluster for one model."""

    cluster: Cluster
    model: Model
    rates: Reached

    # -- experts ---------------------------------------------------------------------------------

    def experts_forward(self, rows: Any) -> FloatArray:
        """Return the seconds of each slot, given its rows."""
        part, weight_bytes = self.rates.grouped_forward, WEIGHT_BYTES
        return self._grouped(np.asarray(rows, dtype=float), 1, weight_bytes, part)

    def experts_backward(self, rows: Any) -> FloatArray:
        """Return the seconds of each slot in backward: gradients of rows and of weights."""
        part, weight_bytes = self.rates.grouped_backward, 2 * WEIGHT_BYTES + GRADIENT_BYTES
        return self._grouped(np.asarray(rows, dtype=float), BACKWARD, weight_bytes, part)

    def _grouped(
        self, rows: FloatArray, times: int, weight_bytes: int, part: FloatArray
    ) -> FloatArray:
        model, cluster = self.model, self.cluster
        operations = times * 2.0 * model.expert_weights * rows
        moved = weight_bytes * model.expert_weights + times * self._row_traffic() * rows
        roofline = np.maximum(operations / cluster.matmul, moved / cluster.memory_rate)
        reached = np.interp(np.log2(np.maximum(rows, 1.0)), np.log2(self.rates.rows), part)
        seconds: FloatArray = np.where(rows > 0, roofline / reached, 0.0)
        return seconds

    def _row_traffic(self) -> int:
        """Bytes that a row of the products reads and writes."""
        return ROW_BYTES * (2 * self.model.width + 4 * self.model.expert_width)

    def row_moves(self, rows: Any) -> FloatArray:
        """Return the seconds to bring rows into the order of the slots, or back."""
        moved = ROW_PASSES * ROW_BYTES * self.model.width * np.asarray(rows, dtype=float)
        seconds: FloatArray = moved / (self.cluster.memory_rate * self.rates.memory)
        return seconds

    # -- everything else of a layer --------------------------------------------------------------

    def attention_forward(self, tokens: float, context: float) -> float:
        """Return the seconds of all but the experts; context: tokens before each token."""
        weights = self.model.attention_weights + self.model.shared_weights
        products = self._dense(2.0 * tokens * weights)
        return self.rates.framework * (
            products
            + self._core(tokens, context) / self.rates.attention_forward
            + self._elementwise(tokens)
        )

    def attention_backward(self, tokens: float, context: float) -> float:
        """Seconds of the backward of all these."""
        weights = self.model.attention_weights + self.model.shared_weights
        products = BACKWARD * self._dense(2.0 * tokens * weights)
        core = CORE_BACKWARD * self._core(tokens, context) / self.rates.attention_backward
        return self.rates.framework * (products + core + 2 * self._elementwise(tokens))

    def dense_mlp(self, tokens: float) -> float:
        """The MLP of a layer without experts, forward."""
        weights = GATED * self.model.width * self.model.dense_width
        return self.rates.framework * self._dense(2.0 * tokens * weights)

    def head(self, tokens: float) -> float:
        """The output table, forward."""
        return self.rates.framework * self._dense(
            2.0 * tokens * self.model.vocabulary * self.model.width
        )

    def _dense(self, operations: float) -> float:
        return operations / (self.cluster.matmul * self.rates.dense_matmul)

    def _core(self, tokens: float, context: float) -> float:
        seen = self.model.looked_at(context)
        return tokens * seen * self.model.attention.core / self.cluster.matmul

    def _elementwise(self, tokens: float) -> float:
        moved = ELEMENTWISE_PASSES * ROW_BYTES * self.model.width * tokens
        return moved / (self.cluster.memory_rate * self.rates.memory)

    # -- links -----------------------------------------------------------------------------------

    def on_links(self, bytes_inside: Any, bytes_outside: Any) -> FloatArray:
        """Return the seconds of a port, given its bytes inside and beyond the domain."""
        cluster, rates = self.cluster, self.rates
        inside = np.asarray(bytes_inside) / (cluster.link_rate * rates.link)
        outside = np.asarray(bytes_outside) / (cluster.network_rate * rates.network)
        seconds: FloatArray = np.maximum(inside, outside)
        return seconds

    def latency(self, domains: int) -> float:
        """Seconds that one exchange of messages takes beside its bytes."""
        cluster = self.cluster
        return (cluster.link_us if domains == 1 else cluster.network_us) * MICRO

    def reduced_at(self, bytes_in: Any, gb_s: float) -> FloatArray:
        """Seconds of gradients that come in at a home."""
        rate = gb_s * GIGA or self.cluster.link_rate * self.rates.link
        seconds: FloatArray = np.asarray(bytes_in) / rate
        return seconds

    # -- control ---------------------------------------------------------------------------------

    def plan(self, ranks: int) -> float:
        """Planning on the device, as measured."""
        return self._by_ranks(ranks, self.rates.plan_us)

    def schedule(self, ranks: int) -> float:
        """Who sends what, as measured."""
        return self._by_ranks(ranks, self.rates.schedule_us)

    def loads(self, rows: float, ranks: int, domains: int) -> float:
        """Counting the rows of a rank and swapping the counts."""
        counting = self.rates.count_us * MICRO * rows / CONTROL_ROWS
        swapped = self.on_links(8.0 * self.model.experts * ranks, 0.0)
        return counting + float(swapped) + self.rates.meeting_us * MICRO + self.latency(domains)

    def reroute(self, rows: float) -> float:
        """A slot for every row of a rank."""
        return self.rates.reroute_us * MICRO * rows / CONTROL_ROWS

    def hop(self) -> float:
        """What a relay costs beside the bytes."""
        return self.rates.hop_us * MICRO

    def _by_ranks(self, ranks: int, table_us: FloatArray) -> float:
        known = np.log2(self.rates.ranks)
        log_us = np.interp(np.log2(ranks), known, np.log2(table_us))
        return float(2.0**log_us) * MICRO


# -- rates ---------------------------------------------------------------------------------------


def rates_of(
    cluster: Cluster | str,
    model: Model | str,
    *,
    ranks: int,
    tokens: int,  # of every rank
    training: bool = False,
) -> Rates:
    """Return what rows and copies cost in a layer of the model on a cluster that is not there.

    cluster, model: names of presets, or files: see `ultraep simulate --help`.
    training: whether there is a backward pass, in which copies are sent again.
    """
    cluster = load_cluster(cluster) if isinstance(cluster, str) else cluster
    model = load_model(model) if isinstance(model, str) else model
    if ranks < 1 or tokens < 1:
        raise ConfigError(f"ranks and tokens must be at least 1, got {ranks} and {tokens}")
    costs = Costs(cluster, model, measured_rates())
    return rates_by(costs, ranks=ranks, tokens=tokens, training=training)


def rates_by(costs: Costs, *, ranks: int, tokens: int, training: bool) -> Rates:
    """Return the rates of plans by time."""
    model = costs.model
    rows = max(1.0, ranks * tokens * model.top_k / model.experts)
    row, passes, weight_bytes = _one_more(costs.experts_forward, rows), 1, WEIGHT_BYTES
    if training:
        row, passes = row + _one_more(costs.experts_backward, rows), 2
        weight_bytes = 2 * WEIGHT_BYTES + GRADIENT_BYTES
    transfer = costs.on_links(2 * passes * ROW_BYTES * model.width, 0.0)
    copy = costs.on_links(weight_bytes * model.expert_weights, 0.0)
    return Rates.from_seconds(
        row=row + float(transfer),
        copy=float(copy),
        each=0.0,
        layer=passes * (costs.schedule(ranks) + costs.hop()),
    )


def _one_more(seconds_of: Callable[[float], Any], rows: float) -> float:
    """Return the seconds of one more row, averaged from `rows` to twice as many rows."""
    few, many = (float(seconds_of(number)) for number in (rows, 2 * rows))
    return max(0.0, many - few) / rows
