"""ideal: forced balance, an upper bound for all policies."""

from __future__ import annotations

import numpy as np

from ultraep.arrays import IntArray
from ultraep.backends.limits import Limits
from ultraep.config import UNLIMITED
from ultraep.policies import Problem, register_policy


@register_policy("ideal", within_limits=False, offline=True)
def ideal(problem: Problem) -> IntArray:
    """Forced balance: the mean on every rank, without limits; an upper bound, not a plan.

    With enough slots, alias planning always reaches the mean, or with speeds the share of every
    rank (`docs/plan.md`). Tolerance and limits of the config are ignored.
    """
    topology, speeds = problem.topology, problem.config.speeds_for(problem.topology.ranks)
    homes = int(topology.homes_per_rank.max())
    limits = Limits(
        topology.experts_by_rank,
        topology.first_of_rank,
        domain=topology.ranks,
        slots=min(topology.experts, -(-homes * max(speeds, default=1) // min(speeds, default=1))),
        max_replicas=UNLIMITED,
        speeds=np.array(speeds, dtype=np.int64),
    )
    placed_C3: IntArray = problem.backend.place(problem.expert_loads, limits)
    return placed_C3
