"""A policy that looks at the past and keeps to the slots: none of the built-in ones does both."""

import numpy as np
import pytest

from ultraep import policies


def halve(problem):
    """Every rank shares what was its hottest expert with the next rank of its domain."""
    topology, size = problem.topology, problem.topology.domain_size
    copies = []
    for rank in range(topology.ranks):
        own = topology.home_experts(rank)
        expert = own[problem.history[own].argmax()]
        host = rank // size * size + (rank + 1) % size
        copies.append((expert, host, problem.expert_loads[expert] // 2))
    copies = np.array(copies, dtype=np.int64)
    return copies[copies[:, 2] > 0]


@pytest.fixture
def by_past(monkeypatch):
    """Its name."""
    for name in policies.BUILT_IN:  # else those that are imported later are forgotten with it
        policies.get_policy(name)
    monkeypatch.setattr(policies, "_registry", dict(policies._registry))
    policies.register_policy("halve", needs_history=True)(halve)
    return "halve"
