"""EPLB: experts placed by their past load, and the current load split equally.

Source: DeepSeek's EPLB (2025), its flat variant. From the loads of a past window, the next copy
goes, again and again, to the expert with the largest load per instance. Then the instances are
packed, heaviest first, each on the lightest rank with a free place; two instances of one expert
may meet on a rank, which then has two shares. Between two such placements nothing adapts: every
instance of an expert gets the same share of its tokens. Shares of past loads are in single
precision, as in the original, and equal ones are taken in order of their index.

A rank has places for as many instances as it has home experts and spare slots; homes move freely.
Slots and domains are therefore not kept.

Ours adds three things: shares are whole tokens, so an instance may serve one more than another;
homes may be uneven; and without any past load (all zeros) the experts stay at home. The variant for
nodes is not here. `tolerance` changes nothing, there is nothing to stop early.
`min_tokens_per_replica` and `max_replicas` are refused.

Shapes: S microbatches, R ranks, E experts, C copies.
"""

from __future__ import annotations

import numpy as np

from ultraep.arrays import IntArray
from ultraep.policies import Problem, register_policy
from ultraep.policies.places import copied_items, pack, served_equally
from ultraep.topology import Topology


def over_interval(problem: Problem, loads_SE: IntArray) -> IntArray:
    """[C, 4] microbatch, expert, host and quota: one placement, equal shares of every load."""
    return served_equally(problem, loads_SE, place_by_past)


@register_policy("eplb", within_limits=False, needs_history=True, over_interval=over_interval)
def eplb(problem: Problem) -> IntArray:
    """DeepSeek EPLB: placed by past loads, split equally over the instances."""
    return over_interval(problem, problem.expert_loads[None])[:, 1:]


def place_by_past(history_E: IntArray, topology: Topology) -> IntArray:
    """[E, R] instances of every expert on every rank."""
    instances_ER = np.zeros((topology.experts, topology.ranks), dtype=np.int64)
    past_E = history_E.astype(np.float32)
    places_R = topology.homes_per_rank + topology.slots
    places = int(places_R.sum())
    copied = copied_items(past_E, places - topology.experts, most=places)
    expert_N = np.concatenate([np.arange(topology.experts), copied])
    share_E = past_E / np.bincount(expert_N).astype(np.float32)
    np.add.at(instances_ER, (expert_N, pack(share_E[expert_N], places_R)), 1)
    return instances_ER
