"""Exact load balance for expert-parallel Mixture-of-Experts models.

The load of every layer of every microbatch is known exactly after gating. From it:

    1 loads       gating ids      -> tokens per source rank and expert          loads.py
    2 plan        loads           -> copies of hot experts, and their quotas    plan.py

    >>> import ultraep
    >>> topology = ultraep.Topology(ranks=4, experts=8, slots=1)
    >>> loads = ultraep.workload.zipf(topology.ranks, topology.experts, ratio=2.0, top_k=2, seed=0)
    >>> plan = ultraep.plan(loads, topology)
    >>> plan.check(loads)
    >>> print(f"{plan.initial_imbalance:.2f} -> {plan.imbalance:.2f}")
    2.00 -> 1.00
"""

from ultraep import workload
from ultraep.backends import backend_names
from ultraep.config import BalanceConfig
from ultraep.errors import (
    BackendUnavailable,
    ConfigError,
    FileError,
    LoadError,
    PlanError,
    UltraEPError,
)
from ultraep.loads import count_loads
from ultraep.plan import Plan, plan
from ultraep.policies import Problem, policy_names, register_policy
from ultraep.topology import Topology
from ultraep.version import __version__

__all__ = [
    "BackendUnavailable",
    "BalanceConfig",
    "ConfigError",
    "FileError",
    "LoadError",
    "Plan",
    "PlanError",
    "Problem",
    "Topology",
    "UltraEPError",
    "__version__",
    "backend_names",
    "count_loads",
    "plan",
    "policy_names",
    "register_policy",
    "workload",
]
