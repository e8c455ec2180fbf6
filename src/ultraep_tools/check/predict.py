"""Predicted gain of a layer, on ranks whose speed is fitted to even routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import ultraep
from ultraep import BalanceConfig, Topology
from ultraep.plan import Plan
from ultraep_tools.check.size import LayerSize
from ultraep_tools.sim.cluster import Cluster, load_cluster
from ultraep_tools.sim.costs import Costs, measured_rates
from ultraep_tools.sim.layer import LayerClock
from ultraep_tools.sim.model import GroupedAttention, Model
from ultraep_tools.sim.planning import Replicas
from ultraep_tools.sim.runtime import runtime_of

CLUSTER = "h100-nvl8"  # its ratios of computing, memory and links; its speed is fitted
HALVINGS = 40
SLOWEST, FASTEST = 1e-6, 1e2  # than the cluster


def predicted_gain(
    size: LayerSize, domain: int, loads_RE: Sequence[Sequence[int]], even_seconds: float
) -> float:
    """Return how much faster a balanced step is, on ranks that take this long with even routing."""
    ranks = len(loads_RE)
    topology = Topology(ranks=ranks, experts=size.experts, slots=1, domain=domain)
    rows = size.tokens * size.top_k
    even_RE = np.full((ranks, size.experts), max(1, rows // size.experts))
    even = ultraep.plan(even_RE, topology, BalanceConfig(policy="none"))
    low, high = SLOWEST, FASTEST
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        slower = _seconds(size, middle, even) > even_seconds
        low, high = (middle, high) if slower else (low, middle)
    loads = np.array(loads_RE)
    plans = [
        ultraep.plan(loads, topology, BalanceConfig(policy=policy, objective="balance"))
        for policy in ("none", "ultraep")
    ]
    without, balanced = (_seconds(size, low, plan) for plan in plans)
    return max(1.0, without / balanced)  # by default, replicas that do not pay are not made


def _seconds(size: LayerSize, speed: float, plan: Plan) -> float:
    """Return the seconds of the layer at this multiple of the cluster's speed."""
    cluster = _scaled(load_cluster(CLUSTER), speed, plan.topology)
    clock = clock_of(cluster, size, plan.topology, plan.config.policy)
    return stage_seconds(clock, replicas_of(plan))


def _scaled(cluster: Cluster, speed: float, topology: Topology) -> Cluster:
    rates = ("matmul_tflops", "memory_gb_s", "link_gb_s", "network_gb_s")
    scaled: Any = {name: speed * getattr(cluster, name) for name in rates}
    return replace(cluster, devices=topology.ranks, domain=topology.domain_size, **scaled)


def clock_of(cluster: Cluster, size: LayerSize, topology: Topology, policy: str) -> LayerClock:
    """Return the clock of a model that has only experts, in one layer."""
    sizes: Any = {"experts": size.experts, "top_k": size.top_k, "expert_width": size.ffn}
    sizes |= {"width": size.hidden, "layers": 1, "dense_layers": 0, "vocabulary": 1}
    attention = GroupedAttention(kind="grouped", heads=1, kv_heads=1, head_width=1)
    model = Model(name="layer", title="", source="", attention=attention, **sizes)
    return LayerClock(
        costs=Costs(cluster, model, measured_rates()),
        topology=topology,
        runtime=runtime_of(policy),
        tokens=size.tokens,
        context=0.0,
        recompute=False,
    )


def replicas_of(plan: Plan) -> Replicas:
    """Return a plan as the simulator's record."""
    first = np.zeros(plan.num_replicas, dtype=np.int64)
    placed_C4 = np.column_stack([first, plan.replicas[:, :2], plan.quotas])
    return Replicas.of(plan.topology, placed_C4, plan.loads.sum(axis=0)[None])


def stage_seconds(clock: LayerClock, replicas: Replicas, *without: str) -> float:
    """Return the seconds of a layer, forward and backward, except attention and these stages."""
    times = clock.times(replicas)
    stages = times.forward | times.backward
    left_out = ("attention", "attention back", *without)
    return sum(float(took[0]) for stage, took in stages.items() if stage not in left_out)
