"""A cluster, a model and rates so small and round that seconds can be computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ultraep.tools.sim.cluster import Cluster
from ultraep.tools.sim.costs import Costs, MeasuredRates
from ultraep.tools.sim.model import GroupedAttention, Model, load_model
from ultraep.tools.sim.planning import Replicas
from ultraep.tools.sim.runtime import Runtime
from ultraep.tools.sim.scenario import Scenario
from ultraep.tools.sim.workload import Skew
from ultraep.topology import Topology

MICRO = 1e-6


def small_cluster(**changes: Any) -> Cluster:
    """Per microsecond: 1000 operations, 100 bytes of memory, 10 of the link, 1 of the network."""
    sizes: Any = {"name": "small", "title": "", "source": "", "devices": 64, "domain": 8}
    sizes |= {"memory_gb": 1.0, "matmul_tflops": 0.001, "memory_gb_s": 0.1, "link_gb_s": 0.01}
    sizes |= {"link_us": 3.0, "network_gb_s": 0.001, "network_us": 7.0}
    return Cluster(**sizes | changes)


def small_model(**changes: Any) -> Model:
    """Experts of 3 * 8 * 4 = 96 weights; attention of 8 * 4 * (2 * 2 + 2) = 192."""
    attention = GroupedAttention(kind="grouped", heads=2, kv_heads=1, head_width=4)
    sizes: Any = {"name": "small", "title": "", "source": "", "attention": attention}
    sizes |= {"layers": 3, "dense_layers": 1, "experts": 4, "top_k": 2, "vocabulary": 16}
    sizes |= {"width": 8, "expert_width": 4, "dense_width": 5, "shared_width": 2}
    return Model(**sizes | changes)


def gpt_oss(layers: int) -> Model:
    """Return gpt-oss-20b with fewer layers; half of them have a window, as in the whole model."""
    model = load_model("gpt-oss-20b")
    attention = replace(model.attention, windowed_layers=layers // 2)
    return replace(model, layers=layers, attention=attention)


def plain_rates(**changes: Any) -> MeasuredRates:
    """Data-sheet rates are reached; the control plane takes no time."""
    efficiencies = "dense_matmul attention_forward attention_backward memory link network framework"
    rates: Any = dict.fromkeys(efficiencies.split(), 1.0)
    rates |= dict.fromkeys(("barrier_us", "count_us", "reroute_us", "hop_us"), 0.0)
    rates |= dict.fromkeys(("rows", "ranks"), (1.0, 1024.0))
    rates |= dict.fromkeys(("grouped_forward", "grouped_backward"), (1.0, 1.0))
    rates |= dict.fromkeys(("plan_us", "schedule_us"), (1e-9, 1e-9))
    return MeasuredRates(**rates | changes)


def small_costs(**rates: Any) -> Costs:
    return Costs(small_cluster(), small_model(), plain_rates(**rates))


def small_scenario(job: Any, **changes: Any) -> Scenario:
    sizes: Any = {"cluster": small_cluster(), "model": small_model(), "rates": plain_rates()}
    sizes |= {"workload": Skew(experts=4, top_k=2, spread=1.0, noise=0.5), "ranks": 2}
    return Scenario(job=job, **sizes | changes)


def small_runtime(**changes: Any) -> Runtime:
    """Weights are sent directly and before the rows; nothing else takes time."""
    entries: Any = {"name": "small", "source": "", "relay": "direct", "reduce_under": "experts"}
    return Runtime(**entries | {"plan_us": 0.0} | changes)


def replicas_of(
    loads_SE: Any, placed: list[tuple[int, int, int, int]], topology: Topology
) -> Replicas:
    """Replicas (microbatch, expert, host, rows) of these loads."""
    placed_C4 = np.array(placed, dtype=np.int64).reshape(-1, 4)
    return Replicas.of(topology, placed_C4, np.array(loads_SE))
