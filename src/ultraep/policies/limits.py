"""What the policies we compare with share: the load a rank may have, domains, and refused limits.

Shapes: E experts of one domain, C copies.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ultraep.arrays import IntArray
from ultraep.config import PARTS, BalanceConfig
from ultraep.errors import ConfigError
from ultraep.policies import Problem


def allowed_load(tokens: int, ranks: int, tolerance_parts: int = 0) -> int:
    """The mean rank load, plus so many millionths of it, rounded up without floats.

    >>> allowed_load(10, 4), allowed_load(1000, 4, tolerance_parts=100_000)
    (3, 275)
    """
    return -(-tokens * (PARTS + tolerance_parts) // (ranks * PARTS))


def refuse_limits(config: BalanceConfig, *names: str) -> None:
    """Raise `ConfigError` if one of these settings is not at its default.

    For settings that a policy has no means to honour: better refused than ignored.
    """
    default = BalanceConfig()
    for name in names:
        given, usual = getattr(config, name), getattr(default, name)
        if given != usual:
            raise ConfigError(
                f"policy {config.policy!r} cannot honour {name}={given}: leave it at {usual}"
            )


def by_domain(problem: Problem, decide: Callable[[IntArray, IntArray, int], IntArray]) -> IntArray:
    """[C, 3] copies of all domains, each decided on for itself.

    decide: from the loads of a domain's experts, their homes among its ranks, and its ranks to
        copies: expert, host and quota, experts and hosts counted within the domain.
    """
    topology, size = problem.topology, problem.topology.domain_size
    found = []
    for begin in range(0, topology.ranks, size):
        first, last = topology.first_of_rank[[begin, begin + size]]
        experts_E = np.sort(topology.experts_by_rank[first:last])
        homes_E = topology.home_of_expert[experts_E] - begin
        expert_C, host_C, quota_C = decide(problem.expert_loads[experts_E], homes_E, size).T
        found.append(np.column_stack([experts_E[expert_C], begin + host_C, quota_C]))
    return np.concatenate(found)
