"""The ceiling: every rank serves the mean, whatever slots and domains allow.

What frameworks call forced balance. With a slot for every home expert of a rank, alias planning
always reaches the mean (`docs/plan.md`), so the ceiling is our own solver without its limits;
tolerance and limits of the config mean nothing to it.
"""

from __future__ import annotations

from ultraep.arrays import IntArray
from ultraep.backends.limits import Limits
from ultraep.config import UNLIMITED
from ultraep.policies import Problem, register_policy


@register_policy("ideal", within_limits=False)
def ideal(problem: Problem) -> IntArray:
    """Forced balance: exactly the mean on every rank, without limits; a ceiling, not a plan."""
    topology = problem.topology
    limits = Limits(
        topology.experts_by_rank,
        topology.first_of_rank,
        domain=topology.ranks,
        slots=int(topology.homes_per_rank.max()),
        max_replicas=UNLIMITED,
    )
    placed_C3: IntArray = problem.backend.place(problem.expert_loads, limits)
    return placed_C3
