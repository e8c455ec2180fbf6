"""A policy that needs history and stays within the slots; no built-in policy does both."""

import numpy as np
import pytest

from ultraep import policies


def halve(problem):
    """Every rank shares its past hottest expert with the next rank of its domain."""
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
    """Register the policy and return its name."""
    for name in policies.BUILT_IN:  # import them all before the registry is copied
        policies.get_policy(name)
    monkeypatch.setattr(policies, "_registry", dict(policies._registry))
    policies.register_policy("halve", needs_history=True)(halve)
    return "halve"
