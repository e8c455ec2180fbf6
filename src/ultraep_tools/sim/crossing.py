"""Tokens that cross between fast-link domains.

Shapes: S microbatches, E experts, D fast-link domains, K experts per token.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from ultraep.arrays import IntArray
from ultraep.topology import Topology
from ultraep_tools.sim.costs import FloatArray

MOST_CHOSEN = 1 - 1e-6  # share of the tokens that choose an expert; more counts as this share


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
    domains = range(topology.num_domains)
    sums = [_sums_of_sets(odds_SE[:, topology.experts_of_domain(d)], top_k) for d in domains]
    all_S = np.maximum(reduce(_joined, sums)[:, top_k], np.finfo(float).tiny)
    none = _sums_of_sets(odds_SE[:, :0], top_k)
    elsewhere = [
        reduce(_joined, sums[:domain] + sums[domain + 1 :], none)[:, top_k] / all_S
        for domain in domains
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
