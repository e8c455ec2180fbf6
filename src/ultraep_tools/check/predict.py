"""Predicted gain of a layer, on ranks whose speed is fitted to even routing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import ultraep
from ultraep import BalanceConfig, Topology
from ultraep.arrays import IntArray
from ultraep.plan import Plan
from ultraep_tools.check.size import LayerSize
from ultraep_tools.sim.cluster import Cluster, load_cluster
from ultraep_tools.sim.costs import Costs, measured_rates
from ultraep_tools.sim.layer import LayerClock
from ultraep_tools.sim.model import GroupedAttention, Model
from ultraep_tools.sim.planning import Replicas
from ultraep_tools.sim.runtime import runtime_of

CLUSTER = "h100-nvl8"  # its ratios of computing, memory and links; its speed is fitted
RATES = ("matmul_tflops", "memory_gb_s", "link_gb_s", "network_gb_s")
FITS = 10


def predicted_gain(size: LayerSize, domain: int, loads_RE: IntArray, even_seconds: float) -> float:
    """Return how much faster a balanced step is, on ranks that take this long with even routing."""
    ranks, experts = loads_RE.shape
    topology = Topology(ranks=ranks, experts=experts, slots=1, domain=domain)
    preset = replace(load_cluster(CLUSTER), devices=ranks, domain=domain)

    def seconds(speed: float, loads: IntArray, policy: str) -> float:
        rates: Any = {name: speed * getattr(preset, name) for name in RATES}
        plan = ultraep.plan(loads, topology, BalanceConfig(policy=policy, objective="balance"))
        clock = clock_of(replace(preset, **rates), size, topology, policy)
        return stage_seconds(clock, replicas_of(plan))

    even, speed = np.full_like(loads_RE, size.tokens * size.top_k // experts), 1.0
    for _ in range(FITS):
        speed *= seconds(speed, even, "none") / even_seconds
    gain = seconds(speed, loads_RE, "none") / seconds(speed, loads_RE, "ultraep")
    return max(1.0, gain)  # by default, replicas that do not pay are not made


def clock_of(cluster: Cluster, size: LayerSize, topology: Topology, policy: str) -> LayerClock:
    """Return the clock of a model that has only experts, in one layer."""
    sizes: Any = {"experts": size.experts, "top_k": size.top_k, "expert_width": size.ffn}
    sizes |= {"width": size.hidden, "layers": 1, "dense_layers": 0, "vocabulary": 1}
    attention = GroupedAttention(kind="grouped", heads=1, kv_heads=1, head_width=1)
    model = Model(name="layer", title="", source="", attention=attention, **sizes)
    costs = Costs(cluster, model, measured_rates())
    options: Any = {"tokens": size.tokens, "context": 0.0, "recompute": False}
    return LayerClock(costs=costs, topology=topology, runtime=runtime_of(policy), **options)


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
