"""Eight ranks on one card: a whole MoE layer, forward and backward, with true stragglers.

    python benchmarks/bench_layer_gpu.py                 # a card whose SMs can be split
    python benchmarks/bench_layer_gpu.py --toy           # tiny; without a GPU, plans and no times

Green contexts cut the card into partitions of the same size, one for each rank. Every rank runs the
layer in a CUDA graph of its own, waits for the others through shared memory and has its own
multiprocessors, so a rank that gets more rows takes longer and all others wait for it. Memory
bandwidth is shared by all. In one run, on the same weights:

    none        every row goes to its home
    eplb        experts placed and copied by the loads of an earlier window, in which half of the
                tokens were of another topic; done before, so it costs nothing here
    ultraep     plans on the exact loads, sends the copies, in every step

and as ceilings the kinds of even routing, and the plain products, of `card.py`: these take turns
with ultraep, since a card that is warm is slower.

Shapes: T tokens of a rank, K experts per token, R ranks, E experts, D model width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from card import DRAWN, Ceilings, Seen, Size, World, drawn, even_plan
from harness import KERNELS, Bench, Case, Line, Mismatch, main
from layers import BEFORE, STEP, plan_values, step_values
from load_cases import HotRank, loads_of

import ultraep
from ultraep import BalanceConfig, Plan, Topology
from ultraep.arrays import IntArray
from ultraep.policies import Problem
from ultraep.policies.peers.eplb import place_by_past
from ultraep.policies.places import away_from_home, split_equally

POLICIES = ("none", "eplb", "ultraep")
UNEVEN_ROUNDS = 3  # of the others: they are further apart
HALF_DEEPSEEK = "DeepSeek-V3, half of its experts"
SIZES = (
    Size(model="Qwen3-235B", hidden=4096, ffn=1536, experts=128, tokens=8192),
    Size(model=HALF_DEEPSEEK, hidden=7168, ffn=2048, experts=128, tokens=4096, loads=4),
)
TOY = Size(model="toy", hidden=256, ffn=128, experts=16, tokens=64, top_k=2, ranks=2, rounds=2)
ONE_HOT = tuple(HotRank(ratio) for ratio in (1.5, 2.0, 3.0))
LOADS = (*ONE_HOT, HotRank(2.0, inner=1.0), HotRank(3.0, inner=1.0, slots=2))


def place_with(slots: int) -> str:
    """The name of a policy: as EPLB places by the past with so many spare places of a rank.

    EPLB moves homes as well. Here some have been called homes already, and slots are what the rest
    needs: so the places are not those of the topology that is planned for.
    """

    def place(problem: Problem) -> IntArray:
        """EPLB, with homes that were chosen among its places."""
        topology = problem.topology
        seen = Topology(ranks=topology.ranks, experts=topology.experts, slots=slots)
        assert problem.history is not None
        places = place_by_past(problem.history, seen)
        shares = split_equally(problem.expert_loads[None], places)
        return away_from_home(*shares, topology)[:, 1:]

    name = f"eplb placed, {slots} slots"
    if name not in ultraep.policy_names():
        ultraep.register_policy(name, needs_history=True)(place)
    return name


def eplb_plan(loads: IntArray, size: Size, slots: int) -> Plan:
    """By the loads of a window in which half of the tokens were of another topic.

    EPLB moves homes as well: of all instances of an expert, one is called its home here.
    """
    other = loads[:, np.random.default_rng(7).permutation(size.experts)]
    past = (loads + other).sum(axis=0)
    seen = Topology(ranks=size.ranks, experts=size.experts, slots=slots)
    places = place_by_past(past, seen)
    homes: list[int] = []
    for ranks in (np.flatnonzero(row) for row in places):
        homes.append(int(min(ranks, key=lambda rank: (homes.count(int(rank)), rank))))
    held = np.count_nonzero(places, axis=0) - np.bincount(homes, minlength=size.ranks)
    topology = replace(seen, slots=max(1, int(held.max())), homes=homes)
    return ultraep.plan(loads, topology, BalanceConfig(policy=place_with(slots)), history=past)


def plan_for(size: Size, load: HotRank, policy: str) -> tuple[IntArray, Plan]:
    """The loads, and the plan by which a policy serves them."""
    if policy in DRAWN:
        return loads_of(drawn(size, policy), size), even_plan(size, policy)
    loads, slots = load.draw(size), 0 if policy == "none" else load.slots
    if policy == "eplb":
        return loads, eplb_plan(loads, size, slots)
    topology = Topology(ranks=size.ranks, experts=size.experts, slots=slots)
    return loads, ultraep.plan(loads, topology, BalanceConfig(policy=policy))


@dataclass
class Result:
    ms: float
    plan: Plan
    outputs: list[torch.Tensor]
    seen: Seen | None = None


def measure(world: World, load: HotRank, policy: str, ceilings: Ceilings | None = None) -> Result:
    """One policy on one load, by itself or in turn with the ceilings."""
    loads, plan = plan_for(world.size, load, policy)
    world.prepare(loads, plan, placed=policy == "eplb")
    seen = ceilings.in_turn_with(world.replay, world.size.rounds) if ceilings else None
    ms = seen.ms if seen else world.time(UNEVEN_ROUNDS)
    world.check()
    outputs = [rank.y.detach().clone() for rank in world.ranks]
    return Result(ms, plan, outputs, seen)


def measure_all(
    bench: Bench, size: Size, loads: tuple[HotRank, ...]
) -> dict[HotRank, dict[str, Result]]:
    """All policies on all loads. Uneven ones need the most memory and come before the ceilings."""
    world = World(size)
    found: dict[HotRank, dict[str, Result]] = {load: {} for load in loads}
    for load, policy in product(loads, ("none", "eplb")):
        bench.report.note(f"... {size.model}, {load.name}, {policy}")
        found[load][policy] = measure(world, load, policy)
        compare(load, found[load])
    world.leave()
    ceilings = Ceilings(world.beside())
    for load in loads:
        bench.report.note(f"... {size.model}, {load.name}, ultraep and ceilings")
        found[load]["ultraep"] = measure(world, load, "ultraep", ceilings)
        compare(load, found[load])
    return found


def compare(load: HotRank, results: Mapping[str, Result]) -> None:
    """Every policy gives the bits of the unbalanced layer, and numbers; if not, nothing is kept."""
    for policy, result in results.items():
        for rank, (own, wanted) in enumerate(
            zip(result.outputs, results["none"].outputs, strict=True)
        ):
            wrong = int((own != wanted).any(dim=1).sum())
            if wrong:
                raise Mismatch(
                    f"{load.name}: {policy} gives other outputs than the unbalanced layer for "
                    f"{wrong} of {len(own)} tokens of rank {rank}"
                )


def on_card(bench: Bench, size: Size, loads: tuple[HotRank, ...]) -> None:
    """The tables of one model."""
    found = measure_all(bench, size, loads)
    lines = [line for load, results in found.items() for line in gain_lines(size, load, results)]
    about = f"{size.model}: {size.about}"
    about += f", {size.tokens} tokens a rank, EP{size.ranks} on {size.sms} SMs each"
    bench.table(about, lines, section="gain")
    flops = 3 * 2 * 3 * size.hidden * size.ffn * size.ranks * size.rows  # forward, twice backward
    lines = []
    for load, results in found.items():
        seen = results["ultraep"].seen
        assert seen is not None
        case: Case = {"load": load.name, "policy": "ultraep"}
        lines.append(Line(case, {STEP: seen.ms, **seen.values(flops)}))
    title = f"{size.model}: shares of three ceilings, in turn; clock and power"
    bench.table(title, lines, section="ceilings")


def case_of(load: HotRank, policy: str) -> Case:
    return {"load": load.name, "policy": policy, "slots": load.slots}


def gain_lines(size: Size, load: HotRank, results: Mapping[str, Result]) -> list[Line]:
    """Of the policies, and of both kinds of even routing."""
    none, seen = results["none"], results["ultraep"].seen
    assert seen is not None
    found = {policy: (result.ms, result.plan) for policy, result in results.items()}
    found |= {kind: (seen.ceilings[kind], even_plan(size, kind)) for kind in DRAWN}
    lines = []
    for policy, (ms, plan) in found.items():
        values = {**step_values(size, ms, none.ms), **seen.shares(ms), **plan_values(plan)}
        if policy == "eplb":  # which has moved homes
            values[BEFORE] = none.plan.initial_imbalance
        lines.append(Line(case_of(load, policy), values))
    return lines


def only_plans(bench: Bench, size: Size, loads: tuple[HotRank, ...]) -> None:
    """Without a GPU: what the policies would make of the loads."""
    bench.report.note("There is no GPU: nothing is timed.")
    lines = []
    for load, policy in product(loads, (*POLICIES, *DRAWN)):
        _, plan = plan_for(size, load, policy)
        lines.append(Line(case_of(load, policy), plan_values(plan)))
    bench.table(size.model, lines, section="plans")


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    sizes: tuple[Size, ...] = SIZES
    loads: tuple[HotRank, ...] = LOADS


def layers(bench: Bench) -> None:
    """All models, or the one that was asked for."""
    measured: Any = on_card if bench.on_gpu else only_plans
    for size in sizes_of(bench):
        measured(bench, size, bench.scale.loads[: size.loads])


def sizes_of(bench: Bench) -> list[Size]:
    """The models, or only the one of `--model`."""
    model = bench.options.model or ""
    return [size for size in bench.scale.sizes if model in size.model.lower()]


OPTIONS = {"model": (str, "only the model with this in its name: qwen, deepseek")}


if __name__ == "__main__":
    toy = Scale((TOY,), (replace(LOADS[0], ratio=1.2),))
    scales = {"toy": toy, "quick": Scale(loads=LOADS[1:2]), "full": Scale()}
    main("layer_gpu", __doc__, {"": layers}, scales, needs=KERNELS, extra=OPTIONS)
