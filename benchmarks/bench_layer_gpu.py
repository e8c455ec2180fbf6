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

and as ceilings the kinds of even routing, and the plain products, of `ceilings.py`: these take
turns with ultraep, since a card that is warm is slower.

Shapes: T tokens of a rank, K experts per token, R ranks, E experts, D model width, F hidden width.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from bench_layer import AFTER, BEFORE, COPIES, GAIN, RATE, STAGE, STEP
from ceilings import (
    DRAWN,
    Ceilings,
    Seen,
    capacity_of,
    drawn,
    even_plan,
)
from harness import Case, Line, Metric, Report, Values, common_options
from layer_card import Size, World
from load_cases import HotRank, loads_of
from timing import on_gpu

import ultraep
from ultraep import BalanceConfig, Plan, Topology
from ultraep.arrays import IntArray
from ultraep.policies import Problem
from ultraep.policies.peers.eplb import place_by_past
from ultraep.policies.places import away_from_home, split_equally

POLICIES = ("none", "eplb", "ultraep")
UNEVEN_ROUNDS = 3  # of the others: they are further apart
MOST = Metric("stage_time_of_the_slowest_rank", "ms", "slowest", ".3f")

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


def before(loads: IntArray, size: Size) -> float:
    """Imbalance without copies."""
    served = loads.sum(axis=0).reshape(size.ranks, -1).sum(axis=1)
    return float(served.max() / served.mean())


Stages = dict[str, tuple[float, float]]


@dataclass
class Result:
    ms: float
    after: float
    copies: int
    stages: Stages
    outputs: list[torch.Tensor]
    seen: Seen | None = None


def measure(
    world: World, load: HotRank, policy: str, *, stages: bool, ceilings: Ceilings | None = None
) -> Result:
    """One policy on one load, by itself or in turn with the ceilings."""
    loads, plan = plan_for(world.size, load, policy)
    world.regroup(plan, capacity_of(plan))
    world.route(loads)
    world.capture()  # compiles, so that no kernel is loaded while another rank waits
    if policy == "eplb":
        world.adopt(plan)
        world.capture()
    world.replay()
    world.check()
    seen = ceilings.in_turn_with(world.replay, world.size.rounds) if ceilings else None
    ms = seen.ms if seen else world.time(UNEVEN_ROUNDS)
    world.check()
    outputs = [rank.y.detach().clone() for rank in world.ranks]
    found = world.breakdown() if stages else {}
    return Result(ms, plan.imbalance, plan.num_replicas, found, outputs, seen)


def measure_all(
    report: Report, world: World, loads: tuple[HotRank, ...], staged: HotRank | None
) -> tuple[dict[HotRank, dict[str, Result]], dict[str, Stages]]:
    """All policies on all loads, and the stages of even routing if any are asked for.

    What is uneven needs the most memory, and comes before the ceilings are there.
    """
    size = world.size
    found: dict[HotRank, dict[str, Result]] = {load: {} for load in loads}
    for load, policy in product(loads, ("none", "eplb")):
        report.note(f"... {size.model}, {load.name}, {policy}")
        found[load][policy] = measure(world, load, policy, stages=load is staged)
        compare(load, found[load])
    for rank in world.ranks:
        rank.leave()
    ceilings = Ceilings(World(size, parts=world.parts))
    for load in loads:
        report.note(f"... {size.model}, {load.name}, ultraep and ceilings")
        found[load]["ultraep"] = measure(
            world, load, "ultraep", stages=load is staged, ceilings=ceilings
        )
        compare(load, found[load])
    return found, ceilings.breakdown() if staged else {}


def compare(load: HotRank, results: Mapping[str, Result]) -> None:
    """Every policy gives the bits of the unbalanced layer, and numbers; if not, nothing is kept."""
    for policy, result in results.items():
        for rank, (own, wanted) in enumerate(
            zip(result.outputs, results["none"].outputs, strict=True)
        ):
            wrong = int((own != wanted).any(dim=1).sum())
            if wrong:
                raise SystemExit(
                    f"{load.name}: {policy} gives other outputs than the unbalanced layer for "
                    f"{wrong} of {len(own)} tokens of rank {rank}"
                )


def run(report: Report, size: Size, loads: tuple[HotRank, ...], *, stages: bool) -> None:
    """The tables of one model, and of one load the stages."""
    staged = loads[len(loads) > 1] if stages else None
    found, even_stages = measure_all(report, World(size), loads, staged)
    lines = [line for load, results in found.items() for line in gain_lines(size, load, results)]
    about = f"{size.model}: D {size.hidden}, F {size.ffn}, {size.experts} experts, top-{size.top_k}"
    about += f", {size.tokens} tokens a rank, EP{size.ranks} on {size.sms} SMs each"
    report.section = "gain"
    report.add(about, lines)
    report.section = "ceilings"
    seen = {load: results["ultraep"].seen for load, results in found.items()}
    flops = 3 * 2 * 3 * size.hidden * size.ffn * size.ranks * size.rows  # forward, twice backward
    lines = [
        Line({"load": load.name, "policy": "ultraep"}, {STEP: own.ms, **own.values(flops)})
        for load, own in seen.items()
        if own is not None
    ]
    report.add(f"{size.model}: shares of three ceilings, in turn; clock and power", lines)
    if staged is not None:
        report.section = "stages"
        title = f"{size.model}: stages of a step; {staged.name}"
        of_policies = {policy: result.stages for policy, result in found[staged].items()}
        report.add(title, stage_lines(of_policies | even_stages))
    report.section = ""


def case_of(load: HotRank, policy: str) -> Case:
    return {"load": load.name, "policy": policy, "slots": load.slots}


def gain_lines(size: Size, load: HotRank, results: Mapping[str, Result]) -> list[Line]:
    """Of the policies, and of both kinds of even routing."""
    seen = results["ultraep"].seen
    assert seen is not None
    lines = []
    for policy, result in results.items():
        balance = {
            BEFORE: before(load.draw(size), size),
            AFTER: result.after,
            COPIES: result.copies,
        }
        lines.append(gain_line(size, load, policy, result.ms, results["none"].ms, seen, balance))
    for kind in DRAWN:
        imbalance = even_plan(size, kind).imbalance
        balance = {BEFORE: imbalance, AFTER: imbalance, COPIES: 0}
        ms = seen.ceilings[kind]
        lines.append(gain_line(size, load, kind, ms, results["none"].ms, seen, balance))
    return lines


def gain_line(
    size: Size, load: HotRank, policy: str, ms: float, uneven: float, seen: Seen, balance: Values
) -> Line:
    values: Values = {
        STEP: ms,
        RATE: size.ranks * size.tokens / ms * 1e3,
        **seen.shares(ms),
        GAIN: uneven / ms,
        **balance,
    }
    return Line(case_of(load, policy), values)


def stage_lines(stages: Mapping[str, Stages]) -> list[Line]:
    return [
        Line({"policy": policy, "stage": stage}, {STAGE: mean, MOST: most})
        for policy, found in stages.items()
        for stage, (mean, most) in found.items()
    ]


def only_plans(report: Report, size: Size, loads: tuple[HotRank, ...]) -> None:
    """Without a GPU: what the policies would make of the loads."""
    report.note("There is no GPU: nothing is timed.")
    lines = []
    for load, policy in product(loads, (*POLICIES, *DRAWN)):
        routed, plan = plan_for(size, load, policy)
        after = plan.imbalance
        values: Values = {BEFORE: before(routed, size), AFTER: after, COPIES: plan.num_replicas}
        lines.append(Line(case_of(load, policy), values))
    report.section = "plans"
    report.add(size.model, lines)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common_options(parser)
    parser.add_argument("--model", choices=["qwen", "deepseek"], help="one of the two models")
    parser.add_argument("--no-stages", action="store_true", help="leave the breakdown out")
    options = parser.parse_args(argv[1:])
    timed = on_gpu(toy=options.toy)
    report = Report("layer_gpu", argv, device=torch.cuda.get_device_name() if timed else None)
    report.header()
    sizes = [TOY] if options.toy else list(SIZES)
    if options.model:
        sizes = [size for size in sizes if options.model in size.model.lower()]
    loads = LOADS if not (options.quick or options.toy) else LOADS[1:2]
    if options.toy:
        loads = (replace(LOADS[0], ratio=1.2),)
    for size in sizes:
        if timed:
            run(report, size, loads[: size.loads], stages=not (options.no_stages or options.toy))
        else:
            only_plans(report, size, loads[: size.loads])
        report.write(options.json)  # what is measured is not lost if the next one fails


if __name__ == "__main__":
    main(sys.argv)
