"""Numbers of plots, ready for JSON."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.plan import Plan

Numbers = dict[str, Any]
FloatArray = NDArray[np.float64]
MOST_NUMBERS = 400_000  # in the microbatches that a page offers
DIGITS = 6


def plain(values: Any, digits: int = DIGITS) -> list[float | None]:
    """Return rounded numbers for JSON, with None for NaN and infinity."""
    numbers = np.asarray(values, dtype=np.float64).tolist()
    return [round(value, digits) if math.isfinite(value) else None for value in numbers]


def sample(count: int, size: int, required: int, most: int = MOST_NUMBERS) -> IntArray:
    """Return evenly spread indices below `count` whose items fit, and the required index.

    size: numbers per item.   most: numbers of all items.

    >>> sample(9, size=1, required=5, most=3)
    array([0, 4, 5, 8])
    """
    fitting = max(2, most // max(size, 1))
    if count <= fitting:
        return np.arange(count)
    spread = np.linspace(0, count - 1, fitting).round().astype(np.int64)
    return np.union1d(spread, [required])


def microbatch(plan: Plan) -> Numbers:
    """Return the loads of all experts, and the expert and rows of every slot.

    Replicas beyond the spare slots, which some policies have, are left out.
    """
    topology = plan.topology
    held_RL = np.full((topology.ranks, topology.slots), -1)
    rows_RL = np.zeros_like(held_RL)
    inside = plan.replicas[:, 2] < topology.slots
    expert, host, slot = plan.replicas[inside].T
    held_RL[host, slot], rows_RL[host, slot] = expert, plan.quotas[inside]
    at_home = plan.dense_quota()[np.arange(topology.experts), topology.home_of_expert]
    homes = [at_home[topology.home_experts(rank)] for rank in range(topology.ranks)]
    rows = [part for pair in zip(homes, rows_RL, strict=True) for part in pair]
    return {
        "loads": plan.loads.sum(axis=0).tolist(),
        "rows": np.concatenate(rows).tolist(),
        "held": held_RL.reshape(-1).tolist(),
    }
