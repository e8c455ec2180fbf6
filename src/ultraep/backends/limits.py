"""The argument of `place` and `lower_bound` that describes a topology and its limits."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ultraep.arrays import IntArray
from ultraep.config import NO_RATES, BalanceConfig
from ultraep.topology import Topology

NO_SPEEDS: IntArray = np.empty(0, dtype=np.int64)


@lru_cache(maxsize=256)
def as_array(speeds: tuple[int, ...]) -> IntArray:
    """Return the speeds as a read-only array."""
    return np.array(speeds, dtype=np.int64)


class Limits(NamedTuple):
    """Homes of experts, and what a plan may do.

    The home experts of rank r are `experts_by_rank[first_of_rank[r] : first_of_rank[r + 1]]`.
    Shapes: R ranks, E experts.
    """

    experts_by_rank: IntArray  # [E]
    first_of_rank: IntArray  # [R + 1]
    domain: int  # ranks per fast-link domain
    slots: int  # spare slots per rank
    max_replicas: int
    tolerance_parts: int = 0  # millionths above the mean that a rank may serve
    min_tokens: int = 1  # rows per replica
    rates: tuple[int, int, int, int] = NO_RATES  # of `config.Rates`; all 0: ignore time
    speeds: IntArray = NO_SPEEDS  # [R] thousandths of the nominal speed; empty: equal

    @staticmethod
    @lru_cache(maxsize=256)
    def of(topology: Topology, config: BalanceConfig) -> Limits:
        """Return the limits of a topology and a config."""
        return Limits(
            topology.experts_by_rank,
            topology.first_of_rank,
            topology.domain_size,
            topology.slots,
            config.replica_limit,
            config.tolerance_parts,
            config.min_tokens_per_replica,
            config.rates_for(topology.ranks * topology.slots),
            as_array(config.speeds_for(topology.ranks)),
        )
