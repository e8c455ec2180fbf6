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
    forced      as many rows, the same number for every expert: what balance could give at best

Shapes: T tokens of a rank, K experts per token, R ranks, E experts, D model width, F hidden width.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from bench_layer import AFTER, BEFORE, COPIES, GAIN, RATE, SHARE, STAGE, STEP
from harness import Case, Line, Metric, Report, Values, common_options
from load_cases import HotRank, Shape, even, ids_with
from timing import device_us, free, on_gpu
from world import Card, Given, Partition, Rank, StageClock, given_layer, split

import ultraep
from ultraep import BalanceConfig, Plan, Topology
from ultraep.arrays import IntArray
from ultraep.policies import Problem
from ultraep.policies.eplb import place_by_past
from ultraep.policies.places import away_from_home, split_equally

LAUNCHING = 30_000_000  # cycles: longer than it takes to launch all ranks
POLICIES = ("none", "eplb", "ultraep", "forced")
MOST = Metric("stage_time_of_the_slowest_rank", "ms", "slowest", ".3f")
CUDA, BF16 = torch.device("cuda"), torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """What is measured."""

    model: str
    top_k: int = 8
    ranks: int = 8
    sms: int = 16
    rounds: int = 7
    loads: int = 5  # of those below


HALF_DEEPSEEK = "DeepSeek-V3, half of its experts"
SIZES = (
    Size(model="Qwen3-235B", hidden=4096, ffn=1536, experts=128, tokens=8192),
    Size(model=HALF_DEEPSEEK, hidden=7168, ffn=2048, experts=128, tokens=4096, loads=3),
)
TOY = Size(model="toy", hidden=256, ffn=128, experts=16, tokens=64, top_k=2, ranks=2, rounds=2)
ONE_HOT = tuple(HotRank(ratio) for ratio in (1.5, 2.0, 3.0))
LOADS = (*ONE_HOT, HotRank(2.0, inner=1.0), HotRank(3.0, inner=1.0, slots=2))


class LayerRank(Rank):
    """A rank with one layer; a step is its forward and backward pass."""

    def __init__(self, number: int, partition: Partition, size: Size) -> None:
        super().__init__(number, partition)
        self.size, self.aside = size, (partition.stream(), partition.stream())
        generator = torch.Generator(device=CUDA).manual_seed(number)
        drawn = partial(torch.randn, generator=generator, device=CUDA, dtype=BF16)
        self.x = drawn(size.tokens, size.hidden).requires_grad_()
        self.dy = drawn(size.tokens, size.hidden)
        gates = torch.rand(size.tokens, size.top_k, generator=torch.Generator().manual_seed(1))
        self.router = Given(
            torch.zeros(size.tokens, size.top_k, dtype=torch.int32, device=CUDA),
            (gates / gates.sum(dim=1, keepdim=True)).cuda().requires_grad_(),
        )
        self.layer: Any = None
        self.y: Any = None
        self.clock: StageClock | None = None

    def become(self, peers: Any, plan: Plan, capacity: int) -> None:
        """A rank of a new group, with the experts that have their home here by the plan."""
        size, topology = self.size, plan.topology
        self.join(
            peers,
            self.aside,
            experts=size.experts,
            tokens=size.tokens,
            slots=topology.slots,
            homes=topology.home_of_expert.tolist(),
            policy="ultraep" if plan.config.policy == "ultraep" else "none",
            capacity=capacity,
            timeout=20.0,
        )
        home = topology.home_experts(self.number).tolist()
        self.layer = given_layer(self.balancer, self.router, drawn_weights(size, home))
        assert self.router.ids is not None
        self.balancer.prepare(self.router.ids, self.x, self.layer.experts.bundle)

    def step(self) -> None:
        if self.clock is not None:
            self.clock.mark("begin")
        self.y = self.layer(self.x)
        self.y.backward(self.dy)
        if self.clock is not None:
            self.clock.mark("backward end")

    def capture(self, clock: StageClock | None = None) -> None:
        """A graph of one step; with stamps of the clock between its stages, if there is one."""
        self.clock = clock
        if clock is not None:
            self.balancer.observe(clock)
        self.graph = self.y = None
        for tensor in (self.x, self.router.gates, *self.layer.parameters()):
            tensor.grad = None
        super().capture()

    def leave(self) -> None:
        self.graph = self.layer = self.balancer = self.y = self.x.grad = None
        assert self.router.gates is not None
        self.router.gates.grad = None


def drawn_weights(size: Size, home_experts: list[int]) -> dict[str, torch.Tensor]:
    """Weights by the number of the expert, drawn on the card: quicker than those of training."""
    homes, widths = len(home_experts), (2 * size.ffn, size.hidden)
    weights = {
        "gate_up_proj": torch.empty(homes, *widths, device=CUDA, dtype=BF16),
        "down_proj": torch.empty(homes, size.hidden, size.ffn, device=CUDA, dtype=BF16),
    }
    for index, expert in enumerate(home_experts):
        generator = torch.Generator(device=CUDA).manual_seed(1_000_003 + expert)
        for stack in weights.values():
            bound = stack.shape[-1] ** -0.5
            stack[index].uniform_(-bound, bound, generator=generator)
    return weights


class World(Card):
    """All ranks of the card, each with one layer."""

    def __init__(self, size: Size, kind: type[LayerRank] = LayerRank) -> None:
        parts = split(size.ranks, size.sms)
        super().__init__([kind(rank, part, size) for rank, part in enumerate(parts)])
        self.size = size

    def regroup(self, plan: Plan, capacity: int) -> None:
        """Shared memory, balancers and weights anew."""
        from ultraep.runtime.mapped.peers import LocalPeers

        for rank in self.ranks:
            rank.leave()
        free()
        group = LocalPeers(self.size.ranks)
        for rank in self.ranks:
            rank.become(group.of(rank.number), plan, capacity)
        torch.cuda.synchronize()

    def route(self, loads: IntArray) -> None:
        """Give every rank ids with these loads."""
        for rank in self.ranks:
            rank.router.ids.copy_(ids_with(loads[rank.number], self.size, seed=rank.number))
        torch.cuda.synchronize()

    def adopt(self, plan: Plan) -> None:
        """Work by a plan that was made before, with copies that were sent before."""
        for rank in self.ranks:
            rank.balancer.plane(CUDA).adopt(plan)
        torch.cuda.synchronize()
        for rank in self.ranks:
            with torch.cuda.stream(rank.stream):
                rank.balancer.plane(CUDA).keep(rank.layer.experts.bundle)
        self.check()

    def time(self) -> float:
        """Milliseconds of a step. The card waits until all ranks are launched: one host launches
        them here one after the other, where eight would do it at the same time.
        """
        wait = torch.cuda.synchronize
        us = device_us(self.replay, self.size.rounds, warmup=3, before=wait, cycles=LAUNCHING)
        return us / 1e3

    def breakdown(self) -> dict[str, tuple[float, float]]:
        """Milliseconds of every stage of a step: mean of the ranks, and the slowest."""
        clocks = [StageClock.on_device() for _ in self.ranks]
        for rank, clock in zip(self.ranks, clocks, strict=True):
            rank.capture(clock)
        torch.cuda.synchronize()
        for _ in range(3):
            self.replay()
            self.check()
        found: dict[str, list[float]] = defaultdict(list)
        for clock in clocks:
            for stage, ms in clock.times().items():
                found[stage].append(ms)
        return {stage: (sum(times) / len(times), max(times)) for stage, times in found.items()}


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
    if policy == "forced":
        loads, slots, name = even(size), 0, "none"
    else:
        loads, slots, name = load.draw(size), 0 if policy == "none" else load.slots, policy
    if policy == "eplb":
        return loads, eplb_plan(loads, size, slots)
    topology = Topology(ranks=size.ranks, experts=size.experts, slots=slots)
    return loads, ultraep.plan(loads, topology, BalanceConfig(policy=name))


def before(loads: IntArray, size: Size) -> float:
    """Imbalance without copies."""
    served = loads.sum(axis=0).reshape(size.ranks, -1).sum(axis=1)
    return float(served.max() / served.mean())


@dataclass
class Result:
    ms: float
    after: float
    copies: int
    stages: dict[str, tuple[float, float]]
    outputs: list[torch.Tensor]


def measure(world: World, load: HotRank, policy: str, *, stages: bool) -> Result:
    """One policy on one load."""
    loads, plan = plan_for(world.size, load, policy)
    capacity = -(-int(plan.rank_loads.max() * 1.02) // 256) * 256
    world.regroup(plan, capacity)
    world.route(loads)
    world.capture()  # compiles, so that no kernel is loaded while another rank waits
    if policy == "eplb":
        world.adopt(plan)
        world.capture()
    world.replay()
    world.check()
    ms = world.time()
    world.check()
    outputs = [rank.y.detach().clone() for rank in world.ranks]
    found = world.breakdown() if stages else {}
    return Result(ms, plan.imbalance, plan.num_replicas, found, outputs)


def measure_all(
    report: Report, world: World, loads: tuple[HotRank, ...], staged: HotRank | None
) -> dict[HotRank, dict[str, Result]]:
    """All policies on all loads; stages of the load that is asked for."""
    size = world.size
    found: dict[HotRank, dict[str, Result]] = {}
    report.note(f"... {size.model}, forced")
    forced = measure(world, loads[0], "forced", stages=staged is not None)
    for load in loads:
        results = found[load] = {}
        for policy in POLICIES[:-1]:
            report.note(f"... {size.model}, {load.name}, {policy}")
            results[policy] = measure(world, load, policy, stages=load is staged)
        results["forced"] = forced
        for policy in ("eplb", "ultraep"):
            if not all(map(torch.equal, results["none"].outputs, results[policy].outputs)):
                raise SystemExit(f"{policy} gives other outputs than the unbalanced layer")
    return found


def run(report: Report, size: Size, loads: tuple[HotRank, ...], *, stages: bool) -> None:
    """The table of one model, and of one load the stages."""
    staged = loads[len(loads) > 1] if stages else None
    found = measure_all(report, World(size), loads, staged)
    lines = [line for load, results in found.items() for line in gain_lines(size, load, results)]
    about = f"{size.model}: D {size.hidden}, F {size.ffn}, {size.experts} experts, top-{size.top_k}"
    about += f", {size.tokens} tokens a rank, EP{size.ranks} on {size.sms} SMs each"
    report.section = "gain"
    report.add(about, lines)
    if staged is not None:
        report.section = "stages"
        title = f"{size.model}: stages of a step; {staged.name}"
        report.add(title, stage_lines(found[staged]))
    report.section = ""


def case_of(load: HotRank, policy: str) -> Case:
    return {"load": load.name, "policy": policy, "slots": load.slots}


def gain_lines(size: Size, load: HotRank, results: Mapping[str, Result]) -> list[Line]:
    lines = []
    for policy, result in results.items():
        values: Values = {
            STEP: result.ms,
            RATE: size.ranks * size.tokens / result.ms * 1e3,
            SHARE: results["forced"].ms / result.ms,
            GAIN: results["none"].ms / result.ms,
            BEFORE: 1.0 if policy == "forced" else before(load.draw(size), size),
            AFTER: result.after,
            COPIES: result.copies,
        }
        lines.append(Line(case_of(load, policy), values))
    return lines


def stage_lines(results: Mapping[str, Result]) -> list[Line]:
    return [
        Line({"policy": policy, "stage": stage}, {STAGE: mean, MOST: most})
        for policy, result in results.items()
        for stage, (mean, most) in result.stages.items()
    ]


def only_plans(report: Report, size: Size, loads: tuple[HotRank, ...]) -> None:
    """Without a GPU: what the policies would make of the loads."""
    report.note("There is no GPU: nothing is timed.")
    lines = []
    for load, policy in product(loads, POLICIES):
        drawn, plan = plan_for(size, load, policy)
        after = plan.imbalance
        values: Values = {BEFORE: before(drawn, size), AFTER: after, COPIES: plan.num_replicas}
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
