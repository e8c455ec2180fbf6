"""Exact load balancing for expert-parallel Mixture-of-Experts models.

After gating, the load of every expert is known exactly. Each layer uses it in every microbatch:

    1 count       count the rows that every rank routes to every expert      loads.py
    2 plan        choose replicas of hot experts, and a row quota for each   plan.py
    3 replicate   copy expert weights into spare slots                       hops.py
    4 reroute     assign a slot to every routed row                          reroute.py
    5 dispatch    send rows to the ranks that serve them                     dispatch.py
    6 experts     run the networks of home experts and replicas              experts/
    7 combine     sum the outputs of each token on its own rank              dispatch.py
    8 reduce      (backward) add gradients of replicas to the home experts   runtime/

These stages are the methods of a `Microbatch` (`microbatch.py`). `BalancedMoE` (`layer.py`) calls
them over the ranks of a `Balancer`. The data planes in `runtime/` run them: `messages`, `mapped`.

    >>> import ultraep
    >>> topology = ultraep.Topology(ranks=4, experts=8, slots=1)
    >>> loads = ultraep.workload.zipf(topology.ranks, topology.experts, ratio=2.0, top_k=2, seed=0)
    >>> plan = ultraep.plan(loads, topology)
    >>> plan.check(loads)
    >>> print(f"{plan.initial_imbalance:.2f} -> {plan.imbalance:.2f}")
    2.00 -> 1.00
"""

from ultraep import supported as _supported  # noqa: F401  # first: it refuses an older Python

# isort: split
from typing import TYPE_CHECKING, Any

from ultraep import workload
from ultraep.backends import backend_names
from ultraep.config import BalanceConfig, Rates
from ultraep.errors import (
    BackendUnavailable,
    CommunicationError,
    ConfigError,
    FileError,
    LoadError,
    NothingToBalance,
    PlanError,
    PlanMismatch,
    SlotError,
    UltraEPError,
)
from ultraep.loads import count_loads
from ultraep.plan import Plan, plan
from ultraep.policies import Problem, policy_names, register_policy
from ultraep.topology import Topology

__version__ = "0.3.0"

if TYPE_CHECKING:
    from ultraep.experts import Experts, ExpertsFrom
    from ultraep.experts.custom import serve
    from ultraep.layer import BalancedMoE, Router, Routing
    from ultraep.runtime.balancer import Balancer
    from ultraep.runtime.local import LocalGroup
    from ultraep.runtime.state import gather_experts, reorder_experts
    from ultraep.trace.read import read_trace
    from ultraep.trace.record import Recorder

# Imported on first use: planning works without torch.
_LAZY = {
    "BalancedMoE": "ultraep.layer",
    "Balancer": "ultraep.runtime.balancer",
    "Experts": "ultraep.experts",
    "ExpertsFrom": "ultraep.experts",
    "LocalGroup": "ultraep.runtime.local",
    "Recorder": "ultraep.trace.record",
    "Router": "ultraep.layer",
    "Routing": "ultraep.layer",
    "gather_experts": "ultraep.runtime.state",
    "reorder_experts": "ultraep.runtime.state",
    "serve": "ultraep.experts.custom",
    "read_trace": "ultraep.trace.read",
}

__all__ = [
    "BackendUnavailable",
    "BalanceConfig",
    "BalancedMoE",
    "Balancer",
    "CommunicationError",
    "ConfigError",
    "Experts",
    "ExpertsFrom",
    "FileError",
    "LoadError",
    "LocalGroup",
    "NothingToBalance",
    "Plan",
    "PlanError",
    "PlanMismatch",
    "Problem",
    "Rates",
    "Recorder",
    "Router",
    "Routing",
    "SlotError",
    "Topology",
    "UltraEPError",
    "__version__",
    "backend_names",
    "count_loads",
    "gather_experts",
    "plan",
    "policy_names",
    "read_trace",
    "register_policy",
    "reorder_experts",
    "serve",
    "workload",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ultraep' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
