"""Homes of experts by history: experts that are hot together live apart.

Replicas stay inside a fast-link domain, so only the homes decide how many rows a domain has.
`place_experts` spreads the experts of a layer over the domains, and over the ranks of each domain,
such that the variance of their loads over a recorded history is small.

Shapes: S microbatches of the history, E experts, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.errors import ConfigError
from ultraep.topology import Topology
from ultraep.trace.read import Trace

LEAST_GAIN = 0.001  # of the forecast, in mean domains
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PlacedLayer:
    """The order of the experts of a layer, and the forecast that decided about it.

    better: whether the order is new; the recorded order stays if the forecast is not better.
    recorded, placed: rows of the busiest domain over the mean, in the second half of the records.
    """

    order: IntArray
    better: bool
    recorded: float
    placed: float


def verdict(layers: Collection[PlacedLayer]) -> str:
    """Return one line: what the new orders would change."""
    moved = sum(layer.better for layer in layers)
    if not moved:
        return "keep all experts in their order: no layer has a better forecast"
    before = fmean(layer.recorded for layer in layers)
    after = fmean(layer.placed if layer.better else layer.recorded for layer in layers)
    change = f"busiest domain {before:.3f} -> {after:.3f} of the mean domain"
    return f"{change}: new order in {moved} of {len(layers)} layers"


def place_trace(trace: Trace, domain: int) -> dict[int, PlacedLayer]:
    """Place the experts of every layer where the forecast is better.

    domain: consecutive ranks that a fast link joins.
    """
    topology, ranks = trace.topology, trace.topology.ranks
    if domain == ranks:
        raise ConfigError(
            f"nothing to place: all {ranks} ranks are one domain, inside which replicas balance; "
            "pass --domain if fewer ranks share a fast link"
        )
    if not len(trace) or len(set(topology.homes_per_rank.tolist())) > 1:
        reason = "ranks have different numbers of experts" if len(trace) else "no records"
        raise ConfigError(f"nothing to place: {reason}")
    return {
        layer: _place_layer(trace.of_layer(layer).loads.sum(axis=1), topology, domain)
        for layer in trace.layers.tolist()
    }


def _place_layer(history_SE: IntArray, topology: Topology, domain: int) -> PlacedLayer:
    """Forecast by the first half of the records how a placement does in the second half."""
    ranks, recorded = topology.ranks, topology.experts_by_rank
    first_SE, second_SE = np.array_split(history_SE, 2)
    if not len(second_SE):
        raise ConfigError("nothing to place: a forecast needs at least two records of every layer")
    tried = place_experts(first_SE, ranks, domain)
    before, after = (
        busiest_domain(second_SE, order, ranks // domain) for order in (recorded, tried)
    )
    better = before - after >= LEAST_GAIN
    order = place_experts(history_SE, ranks, domain) if better else recorded
    return PlacedLayer(order, better, before, after)


def place_experts(history_SE: IntArray, ranks: int, domain: int) -> IntArray:
    """Return the experts in a new order, whose blocks of equal size go to the ranks in turn.

    >>> place_experts(np.array([[9, 9, 1, 1]]), ranks=2, domain=1)
    array([0, 3, 1, 2])
    """
    experts = history_SE.shape[1]
    if domain < 1 or ranks % domain or experts % ranks:
        raise ConfigError(
            f"{experts} experts cannot be placed evenly on {ranks} ranks in domains of {domain}"
        )
    totals = np.maximum(history_SE.sum(axis=1, keepdims=True), 1)
    shares = history_SE / totals  # every microbatch has the same weight
    together_EE = shares.T @ shares
    order = []
    for of_domain in _groups(together_EE, np.arange(experts), ranks // domain):
        order += _groups(together_EE, of_domain, domain)
    return np.concatenate(order)


def busiest_domain(loads_SE: IntArray, order: IntArray, domains: int) -> float:
    """Return the rows of the busiest domain over the mean domain, mean over microbatches.

    order: the experts domain by domain, equally many in each.

    >>> busiest_domain(np.array([[9, 9, 1, 1]]), np.array([0, 1, 2, 3]), domains=2)
    1.8
    """
    loads_SD = loads_SE[:, order].reshape(len(loads_SE), domains, -1).sum(axis=2)
    return float((loads_SD.max(axis=1) / np.maximum(loads_SD.mean(axis=1), 1e-9)).mean())


def _groups(together_EE: Floats, experts: IntArray, count: int) -> list[IntArray]:
    """Split experts into groups of equal size with a small sum of squared loads."""
    products = together_EE[np.ix_(experts, experts)]
    group_of = _hottest_first(products.diagonal(), count)
    while _swap_best(products, group_of, count):
        pass
    return [experts[group_of == group] for group in range(count)]


def _hottest_first(heat: Floats, count: int) -> IntArray:
    """Return the group of every expert: the hottest ones are dealt out in turn, back and forth."""
    place = np.empty(len(heat), np.int64)
    place[np.argsort(-heat, kind="stable")] = np.arange(len(heat))
    turn, position = np.divmod(place, count)
    return np.where(turn % 2, count - 1 - position, position)


def _swap_best(products: Floats, group_of: IntArray, count: int) -> bool:
    """Swap the two experts that lower the sum of squares most; return whether any do."""
    members = (group_of[:, None] == np.arange(count)).astype(float)
    with_group = products @ members  # [E, G] products with all loads of a group
    own = with_group[np.arange(len(group_of)), group_of]
    cross = with_group[:, group_of]  # of expert i with the group of expert j
    norm = products.diagonal()
    squared = norm[:, None] + norm[None, :] - 2 * products  # of the difference of two loads
    gain = own[:, None] - cross + own[None, :] - cross.T - squared
    first, second = np.unravel_index(int(gain.argmax()), gain.shape)
    if gain[first, second] <= 1e-12 * products.sum():
        return False
    group_of[[first, second]] = group_of[[second, first]]
    return True
