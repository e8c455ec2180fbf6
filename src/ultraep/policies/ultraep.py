"""Our own policy: exact balance from exact loads, by alias planning.

The algorithm stands in `backends/reference/place.py`; `docs/plan.md` tells why it works.
"""

from __future__ import annotations

from ultraep.arrays import IntArray
from ultraep.backends.limits import Limits
from ultraep.policies import Problem, register_policy


@register_policy("ultraep")
def ultraep(problem: Problem) -> IntArray:
    """Alias planning: the emptiest rank takes from the fullest, exactly what it lacks."""
    limits = Limits.of(problem.topology, problem.config)
    placed_C3: IntArray = problem.backend.place(problem.expert_loads, limits)
    return placed_C3
