"""rates_of: what rows and copies cost on a cluster that is not there, for plans by time.

config = BalanceConfig(rates=rates_of("h200-nvl8", "qwen3-235b", ranks=8, tokens=8192))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ultraep.config import Rates
from ultraep.errors import ConfigError
from ultraep.tools.sim.cluster import Cluster, load_cluster
from ultraep.tools.sim.costs import GRADIENT_BYTES, ROW_BYTES, Costs, measured_rates
from ultraep.tools.sim.model import WEIGHT_BYTES, Model, load_model


def rates_of(
    cluster: Cluster | str,
    model: Model | str,
    *,
    ranks: int,
    tokens: int,
    training: bool = False,
) -> Rates:
    """The rates of a layer of the model, with so many tokens of every rank.

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
    """The rates that follow from what single things cost."""
    model = costs.model
    rows = max(1.0, ranks * tokens * model.top_k / model.experts)
    row, passes = _one_more(costs.experts_forward, rows), 1
    carried = WEIGHT_BYTES
    if training:
        row, passes = row + _one_more(costs.experts_backward, rows), 2
        carried = 2 * WEIGHT_BYTES + GRADIENT_BYTES
    way = costs.on_links(2 * passes * ROW_BYTES * model.width, 0.0)
    copy = costs.on_links(carried * model.expert_weights, 0.0)
    return Rates.from_seconds(
        row=row + float(way),
        copy=float(copy),
        each=0.0,
        layer=passes * (costs.schedule(ranks) + costs.hop()),
    )


def _one_more(seconds_of: Callable[[float], Any], rows: float) -> float:
    """Seconds of a row more of an expert that has so many, and of up to twice as many."""
    few, many = (float(seconds_of(number)) for number in (rows, 2 * rows))
    return max(0.0, many - few) / rows
