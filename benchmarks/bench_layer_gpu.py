"""Eight ranks on one GPU: a whole MoE layer, forward and backward, with real stragglers.

    python benchmarks/bench_layer_gpu.py              # a GPU with green contexts, cuda-python
    python benchmarks/bench_layer_gpu.py --toy        # tiny; without a GPU, only plans

Green contexts split the GPU into equal partitions, one per rank. Every rank runs the layer in its
own CUDA graph on its own multiprocessors and synchronises with the others through shared memory, so
all ranks wait for a rank with more rows. They share the memory bandwidth. In one run, with the same
weights:

    none        every row goes to its home
    eplb        experts placed and replicated by earlier loads, half of them from another topic;
                placed in advance, at no cost
    ultraep     plans on the exact loads and sends the replicas, in every step

The ceilings of `card.py` alternate with ultraep, because a warm GPU is slower.

Shapes: T tokens of a rank, K experts per token, R ranks, E experts, D model width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from card import DRAWN, Ceilings, Measured, Size, World, drawn, even_plan
from harness import KERNELS, Bench, Case, Line, Mismatch, main
from layers import BEFORE, STEP, plan_values, step_values
from load_cases import HotRank, loads_of

import ultraep
from ultraep import BalanceConfig, Plan, Topology
from ultraep.arrays import IntArray
from ultraep.policies import Problem
from ultraep.tools.baselines.eplb import place_by_past
from ultraep.tools.baselines.places import away_from_home, split_equally

POLICIES = ("none", "eplb", "ultraep")
UNEVEN_ROUNDS = 3  # rounds of the other policies, whose times differ more
HALF_DEEPSEEK = "DeepSeek-V3, half of its experts"
SIZES = (
    Size(model="Qwen3-235B", hidden=4096, ffn=1536, experts=128, tokens=8192),
    Size(model=HALF_DEEPSEEK, hidden=7168, ffn=2048, experts=128, tokens=4096, loads=4),
)
TOY = Size(model="toy", hidden=256, ffn=128, experts=16, tokens=64, top_k=2, ranks=2, rounds=2)
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


def plan_for(size: Size, load: HotRank, policy: str) -> tuple[IntArray, Plan]:
    """The loads, and the plan of a policy for them."""
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
    measured: Measured | None = None


def measure(world: World, load: HotRank, policy: str, ceilings: Ceilings | None = None) -> Result:
    """Measure one policy on one load, alone or in turn with the ceilings."""
    loads, plan = plan_for(world.size, load, policy)
    world.prepare(loads, plan, placed=policy == "eplb")
    measured = ceilings.in_turn_with(world.replay, world.size.rounds) if ceilings else None
    ms = measured.ms if measured else world.time(UNEVEN_ROUNDS)
    world.check()
    outputs = [rank.y.detach().clone() for rank in world.ranks]
    return Result(ms, plan, outputs, measured)


def measure_all(
    bench: Bench, size: Size, loads: tuple[HotRank, ...]
) -> dict[HotRank, dict[str, Result]]:
    """Measure all policies on all loads, the uneven ones first: they need the most memory."""
    world = World(size)
    results: dict[HotRank, dict[str, Result]] = {load: {} for load in loads}
    for load, policy in product(loads, ("none", "eplb")):
        bench.report.note(f"... {size.model}, {load.name}, {policy}")
        results[load][policy] = measure(world, load, policy)
        compare(load, results[load])
    world.leave()
    ceilings = Ceilings(world.beside())
    for load in loads:
        bench.report.note(f"... {size.model}, {load.name}, ultraep and ceilings")
        results[load]["ultraep"] = measure(world, load, "ultraep", ceilings)
        compare(load, results[load])
    return results


def compare(load: HotRank, results: Mapping[str, Result]) -> None:
    """Raise unless the outputs of all policies are finite and equal bit by bit."""
    for policy, result in results.items():
        for rank, (own, wanted) in enumerate(
            zip(result.outputs, results["none"].outputs, strict=True)
        ):
            wrong = int((own != wanted).any(dim=1).sum())
            if wrong:
                raise Mismatch(
                    f"{load.name}: outputs of {policy} differ from the unbalanced layer for "
                    f"{wrong} of {len(own)} tokens of rank {rank}"
                )


def on_card(bench: Bench, size: Size, loads: tuple[HotRank, ...]) -> None:
    """Print the tables of one model."""
    results = measure_all(bench, size, loads)
    lines = [line for load, of_load in results.items() for line in gain_lines(size, load, of_load)]
    about = f"{size.model}: {size.about}"
    about += f", {size.tokens} tokens per rank, EP{size.ranks} on {size.sms} SMs each"
    bench.table(about, lines, section="gain")
    # Forward, and twice as many operations in backward.
    flops = 3 * 2 * 3 * size.hidden * size.ffn * size.ranks * size.rows
    lines = []
    for load, of_load in results.items():
        measured = of_load["ultraep"].measured
        assert measured is not None
        case: Case = {"load": load.name, "policy": "ultraep"}
        lines.append(Line(case, {STEP: measured.ms, **measured.values(flops)}))
    title = f"{size.model}: shares of three ceilings, in turn; clock and power"
    bench.table(title, lines, section="ceilings")


def case_of(load: HotRank, policy: str) -> Case:
    return {"load": load.name, "policy": policy, "slots": load.slots}


def gain_lines(size: Size, load: HotRank, results: Mapping[str, Result]) -> list[Line]:
    """Lines of the policies and of both kinds of even routing."""
    none, measured = results["none"], results["ultraep"].measured
    assert measured is not None
    times = {policy: (result.ms, result.plan) for policy, result in results.items()}
    times |= {kind: (measured.ceilings[kind], even_plan(size, kind)) for kind in DRAWN}
    lines = []
    for policy, (ms, plan) in times.items():
        values = {**step_values(size, ms, none.ms), **measured.shares(ms), **plan_values(plan)}
        if policy == "eplb":  # EPLB has moved homes
            values[BEFORE] = none.plan.initial_imbalance
        lines.append(Line(case_of(load, policy), values))
    return lines


def only_plans(bench: Bench, size: Size, loads: tuple[HotRank, ...]) -> None:
    """Without a GPU: only plan the loads."""
    bench.report.note("No GPU: plans only, nothing is timed.")
    lines = []
    for load, policy in product(loads, (*POLICIES, *DRAWN)):
        _, plan = plan_for(size, load, policy)
        lines.append(Line(case_of(load, policy), plan_values(plan)))
    bench.table(size.model, lines, section="plans")


@dataclass(frozen=True)
class Scale:
    """What one run measures."""

    sizes: tuple[Size, ...] = SIZES
    loads: tuple[HotRank, ...] = LOADS


def layers(bench: Bench) -> None:
    """Measure all models, or the model of `--model`."""
    measured: Any = on_card if bench.on_gpu else only_plans
    for size in sizes_of(bench):
        measured(bench, size, bench.scale.loads[: size.loads])


def sizes_of(bench: Bench) -> list[Size]:
    """All models, or the model of `--model`."""
    model = bench.options.model or ""
    return [size for size in bench.scale.sizes if model in size.model.lower()]


OPTIONS = {"model": (str, "measure only the model with this in its name: qwen or deepseek")}


if __name__ == "__main__":
    toy = Scale((TOY,), (replace(LOADS[0], ratio=1.2),))
    scales = {"toy": toy, "quick": Scale(loads=LOADS[1:2]), "full": Scale()}
    main("layer_gpu", __doc__, {"": layers}, scales, needs=KERNELS, extra=OPTIONS)
