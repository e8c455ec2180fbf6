"""What a step needs, compiled before a group is joined: no rank waits for another's compiler."""

from __future__ import annotations

from functools import cache

import torch

from ultraep.config import BalanceConfig
from ultraep.loads import count_loads
from ultraep.plan import plan as make_plan
from ultraep.reroute import reroute
from ultraep.topology import Topology


@cache
def warm_up(backend: str | None) -> None:
    """Count, plan and reroute something tiny."""
    topology, ids = Topology(ranks=2, experts=2), torch.zeros(2, 1, dtype=torch.int64)
    loads = [count_loads(ids, topology.experts, backend=backend)] * topology.ranks
    plan = make_plan(loads, topology, BalanceConfig(tolerance=0.1), backend=backend)
    reroute(ids, plan, 0, backend=backend)
