"""Load or compile what a step needs before joining a group, so that no rank waits for another."""

from __future__ import annotations

from functools import cache

import torch

from ultraep.backends import compile_in_background
from ultraep.config import BalanceConfig
from ultraep.loads import count_loads
from ultraep.plan import plan as make_plan
from ultraep.reroute import reroute
from ultraep.topology import Topology


@cache
def warm_up(backend: str | None) -> None:
    """Count, plan and reroute something tiny.

    Without a named backend, a child process compiles the planner and the first steps do without.
    """
    if backend is None:
        compile_in_background()
    topology, ids = Topology(ranks=2, experts=2), torch.zeros(2, 1, dtype=torch.int64)
    loads = [count_loads(ids, topology.experts, backend=backend)] * topology.ranks
    plan = make_plan(loads, topology, BalanceConfig(tolerance=0.1), backend=backend)
    reroute(ids, plan, 0, backend=backend)
