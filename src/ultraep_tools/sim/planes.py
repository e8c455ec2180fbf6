"""Plane: how a data plane moves rows and weights, and the rows that cross between domains.

Shapes: S microbatches, E experts, D fast-link domains, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultraep.arrays import IntArray
from ultraep.errors import ConfigError
from ultraep.topology import Topology
from ultraep_tools.sim.costs import FloatArray

AUTO = "auto"
MOST_CHOSEN = 1 - 1e-6  # share of the tokens that choose an expert; more counts as this share


@dataclass(frozen=True)
class Plane:
    """A data plane of the runtime.

    crosses_once: a token crosses once to every other domain that serves it, and is spread inside.
        Otherwise each of its rows travels alone.
    overlaps: weights move beside rows, and gradients of replicas beside products of experts.
        Otherwise they wait for each other.
    host_waits: the host reads the loads of every layer, so it cannot launch kernels ahead.
    """

    name: str
    crosses_once: bool
    overlaps: bool
    host_waits: bool


PLANES = {
    plane.name: plane
    for plane in (
        Plane("mapped", crosses_once=False, overlaps=True, host_waits=False),
        Plane("hybrid", crosses_once=True, overlaps=True, host_waits=True),
        Plane("messages", crosses_once=False, overlaps=False, host_waits=True),
    )
}


def obstacle(name: str, topology: Topology) -> str:
    """Return why a data plane cannot serve this topology; empty if it can."""
    if name == "mapped" and topology.num_domains > 1:
        return (
            f"{topology.ranks} ranks are {topology.num_domains} fast-link domains of "
            f"{topology.domain_size}"
        )
    if name == "hybrid" and topology.num_domains == 1:
        return f"all {topology.ranks} ranks are in one fast-link domain"
    return ""


def plane_for(name: str, topology: Topology) -> Plane:
    """Return the plane of this name; "auto" is the one that a balancer of GPUs would take."""
    if name == AUTO:
        return PLANES["mapped" if topology.num_domains == 1 else "hybrid"]
    if name not in PLANES:
        raise ConfigError(f"data_plane must be {', '.join([AUTO, *PLANES])}, got {name!r}")
    if reason := obstacle(name, topology):
        raise ConfigError(f"data_plane={name!r} is not possible: {reason}; use {AUTO!r}")
    return PLANES[name]


# -- rows that cross -----------------------------------------------------------------------------


def served_shares(loads_SE: IntArray, topology: Topology, top_k: int) -> FloatArray:
    """[S, D] share of the tokens that have at least one expert in each domain.

    Loads show how often an expert is chosen, but not which experts are chosen together. Of all
    distributions of K different experts with these loads, this assumes the one of maximum entropy:
    the probability of a set of experts is proportional to the product of their weights. Weights
    are the odds of the loads, which is exact for even loads.

    >>> served_shares(np.array([[3, 3, 3, 3]]), Topology(ranks=2, experts=4, domain=1), 2)
    array([[0.83333333, 0.83333333]])
    """
    tokens_S1 = np.maximum(loads_SE.sum(axis=1, keepdims=True), 1) / top_k
    chosen_SE = np.minimum(loads_SE / tokens_S1, MOST_CHOSEN)
    odds_SE = chosen_SE / (1 - chosen_SE)
    odds_SE /= np.maximum(odds_SE.mean(axis=1, keepdims=True), np.finfo(float).tiny)
    # [S, K + 1] per domain: sums over all sets of 0 ... K of its experts.
    sums = [
        _sums_of_sets(odds_SE[:, topology.experts_of_domain(domain)], top_k)
        for domain in range(topology.num_domains)
    ]
    none = np.zeros((len(loads_SE), top_k + 1))
    none[:, 0] = 1
    before, after = [none], [none]
    for own in sums:
        before.append(_joined(before[-1], own))
    for own in reversed(sums):
        after.append(_joined(after[-1], own))
    all_S = np.maximum(before[-1][:, top_k], np.finfo(float).tiny)
    elsewhere = [
        _joined(before[domain], after[-2 - domain])[:, top_k] / all_S
        for domain in range(topology.num_domains)
    ]
    return 1 - np.stack(elsewhere, axis=1)


def _sums_of_sets(odds_SE: FloatArray, most: int) -> FloatArray:
    """[S, most + 1] sums over all sets of 0, 1, ... experts of the products of their odds."""
    sums = np.zeros((len(odds_SE), most + 1))
    sums[:, 0] = 1
    for odds_S in odds_SE.T:
        sums[:, 1:] += odds_S[:, None] * sums[:, :-1]
    return sums


def _joined(first: FloatArray, second: FloatArray) -> FloatArray:
    """Return the sums over sets of the experts of both."""
    joined = np.zeros_like(first)
    for size in range(first.shape[1]):
        joined[:, size:] += first[:, size : size + 1] * second[:, : second.shape[1] - size]
    return joined
