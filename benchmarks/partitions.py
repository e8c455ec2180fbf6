"""The layers that were measured on eight partitions of one H200: `results/layer_gpu_*`.

Eight ranks had 16 multiprocessors each. `bench_sim.py` predicts these results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from load_cases import HotRank, Shape, loads_of, tile_perfect_ids

import ultraep
from ultraep import BalanceConfig, Plan, Topology
from ultraep.arrays import IntArray
from ultraep.policies import Problem
from ultraep_tools.baselines.eplb import place_by_past
from ultraep_tools.baselines.places import away_from_home, split_equally

TILE_PERFECT = "tile-perfect"  # every expert gets the same number of rows, a multiple of a tile
SHARE_OF_TILE_PERFECT = "share_of_tile_perfect"  # metric


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """A layer, and the number of loads that were measured."""

    model: str
    top_k: int = 8
    ranks: int = 8
    loads: int = 5


SIZES = (
    Size(model="Qwen3-235B", hidden=4096, ffn=1536, experts=128, tokens=8192),
    Size(
        model="DeepSeek-V3, half of its experts",
        hidden=7168,
        ffn=2048,
        experts=128,
        tokens=4096,
        loads=4,
    ),
)
ONE_HOT = tuple(HotRank(ratio) for ratio in (1.5, 2.0, 3.0))
LOADS = (*ONE_HOT, HotRank(2.0, inner=1.0), HotRank(3.0, inner=1.0, slots=2))


def place_with(slots: int) -> str:
    """Register a policy that places like EPLB with this many spare slots; return its name.

    EPLB moves homes as well. Here the homes were chosen among its places before, so the slots of
    the topology are not the places that EPLB fills.
    """

    def place(problem: Problem) -> IntArray:
        """Place like EPLB, with homes chosen among its places."""
        topology = problem.topology
        own_topology = Topology(ranks=topology.ranks, experts=topology.experts, slots=slots)
        assert problem.history is not None
        places = place_by_past(problem.history, own_topology)
        shares = split_equally(problem.expert_loads[None], places)
        return away_from_home(*shares, topology)[:, 1:]

    name = f"eplb placed, {slots} slots"
    if name not in ultraep.policy_names():
        ultraep.register_policy(name, needs_history=True)(place)
    return name


def eplb_plan(loads: IntArray, size: Size, slots: int) -> Plan:
    """Place by loads of which half came from another topic.

    EPLB moves homes as well: one of the places of each expert becomes its home here.
    """
    other = loads[:, np.random.default_rng(7).permutation(size.experts)]
    past = (loads + other).sum(axis=0)
    own_topology = Topology(ranks=size.ranks, experts=size.experts, slots=slots)
    places = place_by_past(past, own_topology)
    homes: list[int] = []
    for ranks in (np.flatnonzero(row) for row in places):
        homes.append(int(min(ranks, key=lambda rank: (homes.count(int(rank)), rank))))
    held = np.count_nonzero(places, axis=0) - np.bincount(homes, minlength=size.ranks)
    topology = replace(own_topology, slots=max(1, int(held.max())), homes=homes)
    return ultraep.plan(loads, topology, BalanceConfig(policy=place_with(slots)), history=past)


def plan_for(size: Size, load: HotRank, policy: str) -> Plan:
    """The plan of a policy for these loads."""
    if policy == TILE_PERFECT:
        drawn = [tile_perfect_ids(size, rank) for rank in range(size.ranks)]
        topology = Topology(ranks=size.ranks, experts=size.experts, slots=0)
        loads = loads_of(drawn, size)
        return ultraep.plan(loads, topology, BalanceConfig(policy="none"))
    loads, slots = load.draw(size), 0 if policy == "none" else load.slots
    if policy == "eplb":
        return eplb_plan(loads, size, slots)
    topology = Topology(ranks=size.ranks, experts=size.experts, slots=slots)
    return ultraep.plan(loads, topology, BalanceConfig(policy=policy))
