"""Our own policy: exact balance from exact loads, by alias planning.

The algorithm stands in `backends/reference/place.py`; `docs/plan.md` tells why it works.
"""

from __future__ import annotations

from ultraep.arrays import IntArray
from ultraep.policies import Problem, register_policy


@register_policy("ultraep")
def ultraep(problem: Problem) -> IntArray:
    """Alias planning: the emptiest rank takes from the fullest, exactly what it lacks."""
    topology, config = problem.topology, problem.config
    placed_C3: IntArray = problem.backend.place(
        problem.expert_loads,
        topology.experts_by_rank,
        topology.first_of_rank,
        topology.domain_size,
        topology.slots,
        config.tolerance_parts,
        config.min_tokens_per_replica,
        config.replica_limit,
        *config.rates_for(topology.ranks * topology.slots),
    )
    return placed_C3
