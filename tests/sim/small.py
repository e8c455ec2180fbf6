"""A cluster, a model and rates so small and round that seconds can be computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from ultraep.tools.sim.cluster import Cluster
from ultraep.tools.sim.costs import Costs, Reached
from ultraep.tools.sim.model import GroupedAttention, Model
from ultraep.tools.sim.planning import CopySets
from ultraep.tools.sim.runtime import Runtime
from ultraep.topology import Topology


def small_cluster(**changes: Any) -> Cluster:
    """A thousand operations, a hundred bytes of memory, ten and one of links in a microsecond."""
    sizes: dict[str, Any] = {
        "name": "small",
        "title": "",
        "source": "",
        "devices": 64,
        "domain": 8,
        "memory_gb": 1.0,
        "matmul_tflops": 0.001,
        "memory_gb_s": 0.1,
        "link_gb_s": 0.01,
        "link_us": 3.0,
        "network_gb_s": 0.001,
        "network_us": 7.0,
    }
    return Cluster(**{**sizes, **changes})


def small_model(**changes: Any) -> Model:
    """Experts of 3 * 8 * 4 = 96 weights; attention of 8 * 4 * (2 * 2 + 2) = 192."""
    sizes: dict[str, Any] = {
        "name": "small",
        "title": "",
        "source": "",
        "layers": 3,
        "dense_layers": 1,
        "width": 8,
        "experts": 4,
        "top_k": 2,
        "expert_width": 4,
        "vocabulary": 16,
        "dense_width": 5,
        "shared_width": 2,
        "attention": GroupedAttention(kind="grouped", heads=2, kv_heads=1, head_width=4),
    }
    return Model(**{**sizes, **changes})


def plain_rates(**changes: Any) -> Reached:
    """All of the data sheet is reached; control takes no time."""
    parts: dict[str, Any] = {
        **dict.fromkeys(("dense_matmul", "attention_forward", "attention_backward"), 1.0),
        **dict.fromkeys(("memory", "link", "network", "framework"), 1.0),
        **dict.fromkeys(("meeting_us", "count_us", "reroute_us", "hop_us"), 0.0),
        "rows": np.array([1.0, 1024.0]),
        "grouped_forward": np.ones(2),
        "grouped_backward": np.ones(2),
        "ranks": np.array([1.0, 1024.0]),
        "plan_us": np.full(2, 1e-9),
        "schedule_us": np.full(2, 1e-9),
    }
    return Reached(**{**parts, **changes})


def small_costs(*, cluster: Any = None, model: Any = None, **rates: Any) -> Costs:
    return Costs(cluster or small_cluster(), model or small_model(), plain_rates(**rates))


def small_runtime(**changes: Any) -> Runtime:
    """Weights are sent directly and before the rows; nothing else takes time."""
    entries: dict[str, Any] = {
        "name": "small",
        "planner": "given",
        "relay": "direct",
        "beside": False,
        "kept": False,
        "plan_us": 0.0,
        "layer_us": 0.0,
        "backward_us": 0.0,
        "hidden": "experts",
        "reduce_gb_s": 0.0,
        "source": "",
    }
    return Runtime(**{**entries, **changes})


def copies_of(
    loads_SE: Any, copies: list[tuple[int, int, int, int]], topology: Topology
) -> CopySets:
    """Copies (microbatch, expert, host, rows) of these loads."""
    at_home_SE = np.array(loads_SE)
    for microbatch, expert, _, rows in copies:
        at_home_SE[microbatch, expert] -= rows
    columns = np.array(copies, dtype=np.int64).reshape(-1, 4).T
    return CopySets(*columns, at_home_SE)
