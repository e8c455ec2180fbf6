"""EPLB: experts placed by past load; the current load is split equally.

Source: DeepSeek's EPLB (2025), its flat variant. By the loads of a past window, the next replica
always goes to the expert with the largest load per instance. Then the instances are packed,
heaviest first, each on the lightest rank with a free place. A rank with two instances of an expert
serves two shares. Past loads are in single precision, as in the original.

A rank has one place per home expert and per spare slot. Homes move freely, across domains, too.
Unlike the original, shares are whole rows, homes may be uneven, and without past load the experts
stay at home.

Shapes: R ranks, E experts, C replicas.
"""

from __future__ import annotations

import numpy as np

from ultraep.arrays import IntArray
from ultraep.policies import Problem, register_policy
from ultraep.topology import Topology
from ultraep_tools.baselines.places import pack, remember_last, replicated_items, served_equally


@register_policy("eplb", within_limits=False, needs_history=True, offline=True)
def eplb(problem: Problem) -> IntArray:
    """DeepSeek EPLB: placed by past loads, split equally over the instances."""
    return served_equally(problem, place_by_past)


@remember_last
def place_by_past(history_E: IntArray, topology: Topology) -> IntArray:
    """[E, R] instances of every expert on every rank."""
    instances_ER = np.zeros((topology.experts, topology.ranks), dtype=np.int64)
    past_E = history_E.astype(np.float32)
    places_R = topology.homes_per_rank + topology.slots
    replicated = replicated_items(past_E, int(places_R.sum()) - topology.experts)
    expert_N = np.concatenate([np.arange(topology.experts), replicated])
    share_E = past_E / np.bincount(expert_N).astype(np.float32)
    np.add.at(instances_ER, (expert_N, pack(share_E[expert_N], places_R)), 1)
    return instances_ER
