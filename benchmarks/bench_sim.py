"""The accuracy of the simulator.

A layer on eight partitions of one H200 with 16 multiprocessors each (`results/layer_gpu_*`),
predicted for the same plans and loads on a cluster of eight such partitions. Ranks share the power
of the GPU, so a busy rank is faster while others wait, by the factors in
`results/grouped_h200_202611.json`. A dash means that another plan was measured.

    python benchmarks/bench_sim.py --json out.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from harness import ROOT, Bench, Line, Metric, main
from load_cases import Shape, loads_of, tile_perfect_ids
from numpy.typing import NDArray

import ultraep
from ultraep import BalanceConfig, Plan, Topology, workload
from ultraep.arrays import IntArray
from ultraep.policies import Problem
from ultraep_tools.baselines.eplb import place_by_past
from ultraep_tools.baselines.places import away_from_home, split_equally
from ultraep_tools.check.predict import clock_of, replicas_of, stage_seconds
from ultraep_tools.check.size import LayerSize
from ultraep_tools.sim.cluster import load_cluster

FloatArray = NDArray[np.float64]
Table = tuple[str, list[Line]]  # title

PARTITIONS = "h200-eight-parts"
ON_CARD = (("qwen", "qwen3", 0), ("deepseek", "deepseek", 1))  # results, curve, size
SAME = 1e-5  # tolerance: results are stored with seven digits

PREDICTED = Metric("predicted_share", "share", "predicted", ".3f")
MEASURED = Metric("measured_share", "share", "measured", ".3f")
POINTS = Metric("error", "points", "points off", "+.1f")


TILE_PERFECT = "tile-perfect"  # every expert gets the same number of rows, a multiple of a tile
SHARE_OF_TILE_PERFECT = "share_of_tile_perfect"  # metric


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """A layer, and the number of loads that were measured."""

    model: str
    top_k: int = 8
    ranks: int = 8
    loads: int = 5


@dataclass(frozen=True)
class HotRank:
    """Ordered Zipf loads of a layer, and its spare slots per rank."""

    ratio: float
    inner: float = 4.0  # how much one expert of a rank exceeds the others
    slots: int = 1

    @property
    def name(self) -> str:
        kind = "one expert hot" if self.inner > 2 else "many experts hot"
        return f"{kind} {self.ratio:g}"

    def draw(self, shape: Shape) -> IntArray:
        """[R, E] loads."""
        options: dict[str, Any] = {"top_k": shape.top_k, "tokens": shape.tokens}
        options |= {"ratio": self.ratio, "inner": self.inner}
        return workload.zipf(shape.ranks, shape.experts, **options)


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
        shares = split_equally(problem.expert_loads, places)
        return away_from_home(*shares, topology)

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


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of a results file."""
    path = ROOT / "benchmarks" / "results" / f"{name}_202611.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def line(model: str, load: str, policy: str, predicted: float, measured: float | None) -> Line:
    """One line with the predicted and the measured share."""
    case = {"model": model, "load": load, "policy": policy}
    points = None if measured is None else 100 * (predicted - measured)
    return Line(case, {PREDICTED: predicted, MEASURED: measured, POINTS: points})


@cache
def speed_by_busy(curve: str, direction: str) -> FloatArray:
    """[0..8] speed of a partition by number of busy partitions, relative to eight."""
    times = {
        row["case"]["busy"]: row["value"]
        for row in rows_of("grouped_h200")
        if (row["benchmark"], row["metric"]) == ("grouped/partitions", f"{direction}_time_p50")
        and (row["case"]["model"], row["case"]["rows"]) == (curve, 4096)
    }
    busy = sorted(times)
    speed: FloatArray = np.interp(np.arange(9), busy, [times[8] / times[n] for n in busy])
    return speed


def card_seconds(work_R: FloatArray, speed: FloatArray) -> float:
    """Seconds until the last rank is done; `work_R`: seconds per rank if all stayed busy."""
    work = np.diff(np.sort(work_R), prepend=0.0)  # of the ranks that are still busy
    return float((work / speed[len(work) : 0 : -1]).sum())


def predict_on_card(size: Size, curve: str, plan: Plan, policy: str) -> float:
    """Seconds of a layer, forward and backward, on eight partitions of a card."""
    runtime = "none" if policy in ("none", TILE_PERFECT) else "ultraep"
    layer = LayerSize(*(size.hidden, size.ffn, size.experts, size.top_k, size.tokens))
    clock = clock_of(load_cluster(PARTITIONS), layer, plan.topology, runtime)
    replicas = replicas_of(plan)
    seconds = stage_seconds(clock, replicas, "experts", "experts back")
    for direction in ("forward", "backward"):
        work_SR = clock.experts_by_rank(replicas, backward=direction == "backward")
        seconds += card_seconds(work_SR[0], speed_by_busy(curve, direction))
    return seconds


def card_tables(small: bool = False) -> Iterator[Table]:
    """Predicted and measured shares of tile-perfect routing."""
    for name, curve, index in ON_CARD:
        size = SIZES[index]
        recorded = rows_of(f"layer_gpu_{name}_h200")
        lines = []
        for load in LOADS[: 1 if small else size.loads]:
            plans = {
                policy: plan_for(size, load, policy)
                for policy in ("none", "eplb", "ultraep", TILE_PERFECT)
            }
            seconds = {
                policy: predict_on_card(size, curve, plan, policy) for policy, plan in plans.items()
            }
            for policy in ("none", "eplb", "ultraep"):
                share = seconds[TILE_PERFECT] / seconds[policy]
                measured = share_on_card(recorded, load.name, policy, plans[policy])
                lines.append(line(curve, load.name, policy, share, measured))
        yield f"{size.model}, EP8 on one H200: share of tile-perfect routing", lines


def share_on_card(
    recorded: list[dict[str, Any]], load: str, policy: str, plan: Plan
) -> float | None:
    """The measured share; None if it was not measured, or with another plan."""
    values = {
        row["metric"]: row["value"]
        for row in recorded
        if (row["case"].get("load"), row["case"].get("policy")) == (load, policy)
    }
    if not values or abs(values["imbalance_after"] - plan.imbalance) >= SAME:
        return None
    return float(values[SHARE_OF_TILE_PERFECT])


def on_card(bench: Bench) -> None:
    for table in card_tables(bench.scale):
        bench.table(*table)


if __name__ == "__main__":
    small = {"toy": True, "quick": True, "full": False}
    main("sim", __doc__, {"card": on_card}, small)
