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
import gc
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise, product
from statistics import median
from typing import Any
from unittest import mock

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # before CUDA starts: ranks * streams

import numpy as np
import torch
import triton
import triton.language as tl
from bench_layer import AFTER, BEFORE, COPIES, GAIN, RATE, SHARE, STAGE, STEP
from harness import Line, Metric, Report, common_options
from torch import nn

import ultraep
from ultraep import BalanceConfig, Plan, Topology, workload
from ultraep.arrays import IntArray
from ultraep.experts import Experts
from ultraep.policies.eplb import place_by_past
from ultraep.policies.places import away_from_home, split_equally

LAUNCHING = 30_000_000  # cycles: longer than it takes to launch all ranks
POLICIES = ("none", "eplb", "ultraep", "forced")
MOST = Metric("stage_time_of_the_slowest_rank", "ms", "slowest", ".3f")


@dataclass(frozen=True)
class Size:
    """What is measured."""

    model: str
    hidden: int
    ffn: int
    experts: int
    tokens: int
    top_k: int = 8
    ranks: int = 8
    sms: int = 16
    rounds: int = 7
    loads: int = 5  # of those below


SIZES = (
    Size("Qwen3-235B", 4096, 1536, 128, 8192),
    Size("DeepSeek-V3, half of its experts", 7168, 2048, 128, 4096, loads=3),
)
TOY = Size("toy", 256, 128, 16, 64, top_k=2, ranks=2, rounds=2)


@dataclass(frozen=True)
class Load:
    """How tokens are routed."""

    ratio: float
    inner: float = 4.0  # how much one expert of a rank stands out
    slots: int = 1

    @property
    def name(self) -> str:
        return "one expert hot" if self.inner > 2 else "many experts hot"

    def draw(self, size: Size) -> IntArray:
        """[R, E] loads."""
        return workload.zipf(
            size.ranks,
            size.experts,
            ratio=self.ratio,
            inner=self.inner,
            top_k=size.top_k,
            tokens=size.tokens,
        )


LOADS = (
    Load(1.5),
    Load(2.0),
    Load(3.0),
    Load(2.0, inner=1.0),
    Load(3.0, inner=1.0, slots=2),
)


class Preset(nn.Module):
    """A router whose choices are given."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        shape = (size.tokens, size.top_k)
        self.ids = torch.zeros(shape, dtype=torch.int32, device="cuda")
        drawn = torch.rand(shape, generator=torch.Generator().manual_seed(1))
        self.weights = (drawn / drawn.sum(dim=1, keepdim=True)).cuda().requires_grad_()

    def forward(self, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ids, self.weights


class Rank:
    """One rank: its partition of the card, its layer, and a graph of a step."""

    def __init__(self, rank: int, size: Size, partition: Any) -> None:
        self.rank, self.size = rank, size
        self.sms: int = partition.sms
        self.main = partition.stream()
        self.aside = (partition.stream(), partition.stream())
        generator = torch.Generator(device="cuda").manual_seed(rank)
        shape = (size.tokens, size.hidden)

        def drawn() -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

        self.x, self.dy = drawn().requires_grad_(), drawn()
        self.router = Preset(size)
        self.layer: Any = None
        self.balancer: Any = None
        self.graph: Any = None
        self.y: Any = None

    def join(self, peers: Any, plan: Plan, capacity: int) -> None:
        """Become a rank of a group, with the experts that have their home here."""
        from ultraep.runtime.device import DeviceBalancer

        size, topology = self.size, plan.topology
        self.layer = self.balancer = None
        self.balancer = DeviceBalancer(
            peers,
            experts=size.experts,
            tokens=size.tokens,
            top_k=size.top_k,
            slots=topology.slots,
            homes=topology.home_of_expert.tolist(),
            policy="ultraep" if plan.config.policy == "ultraep" else "none",
            capacity=capacity,
            timeout=20.0,
            sms=self.sms,
            streams=self.aside,
        )
        self.layer = ultraep.BalancedMoE.swiglu(
            size.hidden,
            size.ffn,
            size.experts,
            size.top_k,
            balancer=self.balancer,
            dtype=torch.bfloat16,
            device=torch.device("cuda"),
        )
        self.layer.router = self.router
        self.balancer.prepare(self.layer.experts.bundle, size.hidden, torch.bfloat16)

    def step(self) -> torch.Tensor:
        y: torch.Tensor = self.layer(self.x)
        y.backward(self.dy)
        return y

    def capture(self, clock: Clock | None = None) -> None:
        """A graph of one step. Nothing runs yet, so no rank waits for another."""
        self.graph = self.y = None
        for tensor in (self.x, self.router.weights, *self.layer.parameters()):
            tensor.grad = None
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.graph(graph, stream=self.main, capture_error_mode="relaxed"),
            clocked(clock) if clock else nullcontext(),
        ):
            self.y = self.step()
        self.graph = graph


class World:
    """All ranks of the card."""

    def __init__(self, size: Size) -> None:
        from partitions import split

        self.size = size
        partitions = split(size.ranks, size.sms)
        self.ranks = [Rank(rank, size, part) for rank, part in enumerate(partitions)]

    def regroup(self, plan: Plan, capacity: int) -> None:
        """Shared memory, balancers and weights anew."""
        from ultraep.runtime.mapped.peers import LocalPeers

        self.leave()
        group = LocalPeers(self.size.ranks)
        for rank in self.ranks:
            rank.join(group.of(rank.rank), plan, capacity)
        torch.cuda.synchronize()

    def leave(self) -> None:
        """Give back all memory of the group."""
        for rank in self.ranks:
            rank.graph = rank.layer = rank.balancer = rank.y = None
            rank.x.grad = rank.router.weights.grad = None
        gc.collect()
        torch.cuda.empty_cache()

    def route(self, loads: IntArray) -> None:
        """Give every rank ids with these loads."""
        for rank in self.ranks:
            rank.router.ids.copy_(ids_of(loads[rank.rank], self.size, seed=rank.rank))
        torch.cuda.synchronize()

    def adopt(self, plan: Plan) -> None:
        """Work by a plan that was made before, with copies that were sent before."""
        for rank in self.ranks:
            rank.balancer.adopt(plan)
        torch.cuda.synchronize()
        for rank in self.ranks:
            with torch.cuda.stream(rank.main):
                rank.balancer.keep(rank.layer.experts.bundle)
        self.check()

    def capture(self) -> None:
        for rank in self.ranks:
            rank.capture()
        torch.cuda.synchronize()

    def replay(self) -> None:
        """One step of all ranks at once."""
        main = torch.cuda.current_stream()
        for rank in self.ranks:
            rank.main.wait_stream(main)
            with torch.cuda.stream(rank.main):
                rank.graph.replay()
        for rank in self.ranks:
            main.wait_stream(rank.main)

    def check(self) -> None:
        torch.cuda.synchronize()
        for rank in self.ranks:
            rank.balancer.check()

    def time(self, rounds: int) -> float:
        """Milliseconds of a step. The card waits until all ranks are launched: one host launches
        them here one after the other, where eight would do it at the same time.
        """
        found = []
        for round_ in range(rounds + 3):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(LAUNCHING)
            begin.record()
            self.replay()
            end.record()
            torch.cuda.synchronize()
            if round_ >= 3:
                found.append(begin.elapsed_time(end))
        return float(median(found))


def ids_of(loads_E: IntArray, size: Size, seed: int) -> torch.Tensor:
    """[T, K] ids with exactly these loads, no expert twice for one token, tokens in any order."""
    line = np.repeat(np.arange(size.experts), loads_E)
    ids = line.reshape(size.top_k, size.tokens).T
    return torch.from_numpy(np.random.default_rng(seed).permutation(ids).astype(np.int32))


def even(size: Size) -> IntArray:
    """[R, E] the same load for every expert."""
    loads = np.full((size.ranks, size.experts), size.tokens * size.top_k // size.experts)
    assert loads.sum() == size.ranks * size.tokens * size.top_k
    return loads


def eplb_plan(loads: IntArray, size: Size, slots: int) -> Plan:
    """By the loads of a window in which half of the tokens were of another topic.

    EPLB moves homes as well: of all instances of an expert, one is called its home here.
    """
    other = loads[:, np.random.default_rng(7).permutation(size.experts)]
    seen = Topology(ranks=size.ranks, experts=size.experts, slots=slots)
    places = place_by_past((loads + other).sum(axis=0), seen)
    homes: list[int] = []
    for ranks in (np.flatnonzero(row) for row in places):
        homes.append(int(min(ranks, key=lambda rank: (homes.count(int(rank)), rank))))
    held = np.count_nonzero(places, axis=0) - np.bincount(homes, minlength=size.ranks)
    topology = Topology(
        ranks=size.ranks, experts=size.experts, slots=max(1, int(held.max())), homes=homes
    )
    if "eplb placed" not in ultraep.policy_names():
        ultraep.register_policy("eplb placed")(
            lambda p: away_from_home(*split_equally(p.expert_loads[None], PLACES[0]), p.topology)[
                :, 1:
            ]
        )
    PLACES[:] = [places]
    return ultraep.plan(loads, topology, BalanceConfig(policy="eplb placed"))


PLACES: list[Any] = []  # what the policy above hands out


def served(loads: IntArray, size: Size) -> IntArray:
    """[R] rows of every rank, without copies."""
    rows: IntArray = loads.sum(axis=0).reshape(size.ranks, -1).sum(axis=1)
    return rows


def imbalance(rank_loads: IntArray) -> float:
    return float(rank_loads.max() / rank_loads.mean())


@dataclass
class Result:
    ms: float
    after: float
    copies: int
    stages: dict[str, tuple[float, float]]
    outputs: list[torch.Tensor]


def plan_for(size: Size, load: Load, policy: str) -> tuple[IntArray, Plan]:
    """The loads, and the plan by which a policy serves them."""
    if policy == "forced":
        loads, slots, name = even(size), 0, "none"
    else:
        loads, slots, name = load.draw(size), 0 if policy == "none" else load.slots, policy
    if policy == "eplb":
        return loads, eplb_plan(loads, size, slots)
    topology = Topology(ranks=size.ranks, experts=size.experts, slots=slots)
    return loads, ultraep.plan(loads, topology, BalanceConfig(policy=name))


def measure(world: World, load: Load, policy: str, *, stages: bool) -> Result:
    """One policy on one load."""
    size = world.size
    loads, plan = plan_for(size, load, policy)
    capacity = -(-int(plan.rank_loads.max() * 1.02) // 256) * 256
    world.regroup(plan, capacity)
    world.route(loads)
    world.capture()  # compiles, so that no kernel is loaded while another rank waits
    if policy == "eplb":
        world.adopt(plan)
        world.capture()
    world.replay()
    world.check()
    ms = world.time(size.rounds)
    world.check()
    outputs = [rank.y.detach().clone() for rank in world.ranks]
    found = breakdown(world) if stages else {}
    return Result(ms, imbalance(plan.rank_loads), plan.num_replicas, found, outputs)


class Clock:
    """The time on the device between the stages of a rank, written anew at every replay."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.stamps = torch.zeros(64, dtype=torch.int64, device="cuda")
        self.backward = False

    def mark(self, stage: str) -> None:
        """What the stream did since the last mark belongs to this stage."""
        write_time[(1,)](self.stamps, len(self.stages), num_warps=1)
        self.stages.append(f"backward {stage}" if self.backward else stage)

    def times(self) -> dict[str, float]:
        """Milliseconds of every stage."""
        found: dict[str, float] = defaultdict(float)
        for stage, (begin, end) in zip(
            self.stages[1:], pairwise(self.stamps.tolist()), strict=False
        ):
            found[stage] += (end - begin) / 1e6
        return found


@triton.jit(do_not_specialize=["index"])
def write_time(stamps, index):  # type: ignore[no-untyped-def]
    """Nanoseconds of the device's clock."""
    tl.store(stamps + index, tl.extra.cuda.globaltimer().to(tl.int64))


@contextmanager
def clocked(clock: Clock) -> Iterator[None]:
    """While this lasts, the verbs of the runtime leave marks."""
    from ultraep.runtime.device import DeviceBalancer
    from ultraep.runtime.device_replicas import DeviceReplicas
    from ultraep.runtime.device_roads import DeviceRoads

    def after(verb: Any, stage: str, before: str | None = None) -> Any:
        def marked(*args: Any, **named: Any) -> Any:
            if before:
                clock.mark(before)
            result = verb(*args, **named)
            clock.mark(stage)
            return result

        return marked

    def returning(verb: Any) -> Any:
        def turned(*args: Any) -> Any:
            clock.backward = True
            return verb(*args)

        return turned

    verbs: list[tuple[Any, str, Any]] = [
        (DeviceBalancer, "gather", lambda v: after(v, "1 loads")),
        (DeviceBalancer, "plan", lambda v: after(v, "2 plan")),
        (DeviceBalancer, "reroute", lambda v: after(v, "4 reroute")),
        (DeviceReplicas, "arrived", lambda v: after(v, "3 replicate, waited for", "6 experts")),
        (DeviceReplicas, "reduced", lambda v: after(v, "8 reduce, waited for", "6 experts")),
        (DeviceRoads, "to_slots", lambda v: after(v, "to slots", "6 experts")),
        (DeviceRoads, "to_tokens", lambda v: after(v, "to tokens", "6 experts")),
        (DeviceRoads, "on_return", returning),
    ]
    with ExitStack() as stack:
        for owner, name, wrap in verbs:
            stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
        clock.mark("begin")
        yield
        clock.mark("end")


def breakdown(world: World) -> dict[str, tuple[float, float]]:
    """Milliseconds of every stage of a step: mean of the ranks, and the slowest."""
    clocks = [Clock() for _ in world.ranks]
    for rank, clock in zip(world.ranks, clocks, strict=True):
        rank.capture(clock)
    torch.cuda.synchronize()
    for _ in range(3):
        world.replay()
        world.check()
    found: dict[str, list[float]] = defaultdict(list)
    for clock in clocks:
        for stage, ms in clock.times().items():
            found[stage].append(ms)
    return {stage: (sum(times) / len(times), max(times)) for stage, times in found.items()}


def run(report: Report, size: Size, loads: tuple[Load, ...], *, stages: bool) -> None:
    """The table of one model, and of the first load the stages."""
    world = World(size)
    staged = loads[len(loads) > 1]
    lines, stage_lines = [], []
    report.note(f"... {size.model}, forced")
    forced = measure(world, loads[0], "forced", stages=stages)
    for load in loads:
        results = {}
        for policy in POLICIES[:-1]:
            report.note(f"... {size.model}, {load.name} {load.ratio:g}, {policy}")
            results[policy] = measure(world, load, policy, stages=stages and load is staged)
        results["forced"] = forced
        for policy in ("eplb", "ultraep"):
            if not all(map(torch.equal, results["none"].outputs, results[policy].outputs)):
                raise SystemExit(f"{policy} gives other outputs than the unbalanced layer")
        before = imbalance(served(load.draw(size), size))
        for policy, result in results.items():
            case: dict[str, str | int | float] = {
                "load": f"{load.name} {load.ratio:g}",
                "policy": policy,
                "slots": load.slots,
            }
            lines.append(
                Line(
                    case,
                    {
                        STEP: result.ms,
                        RATE: size.ranks * size.tokens / result.ms * 1e3,
                        SHARE: results["forced"].ms / result.ms,
                        GAIN: results["none"].ms / result.ms,
                        BEFORE: 1.0 if policy == "forced" else before,
                        AFTER: result.after,
                        COPIES: result.copies,
                    },
                )
            )
            for stage, (mean, most) in result.stages.items() if load is staged else ():
                stage_lines.append(
                    Line({"policy": policy, "stage": stage}, {STAGE: mean, MOST: most})
                )
    about = f"{size.model}: D {size.hidden}, F {size.ffn}, {size.experts} experts, top-{size.top_k}"
    report.section = "gain"
    report.add(
        f"{about}, {size.tokens} tokens a rank, EP{size.ranks} on {size.sms} SMs each", lines
    )
    if stage_lines:
        report.section = "stages"
        report.add(
            f"{size.model}: stages of a step; {staged.name} {staged.ratio:g}",
            stage_lines,
        )
    report.section = ""


def draw_on_device(self: Experts, home_experts: list[int], seed: int) -> None:
    """Weights from the number of the expert, drawn on the card: quicker than those of training."""
    for index, expert in enumerate(home_experts):
        generator = torch.Generator(device="cuda").manual_seed(seed * 1_000_003 + expert)
        for stack in (self.gate_up_proj, self.down_proj):
            bound = stack.shape[-1] ** -0.5
            stack.data[index].uniform_(-bound, bound, generator=generator)


def only_plans(report: Report, size: Size, loads: tuple[Load, ...]) -> None:
    """Without a GPU: what the policies would make of the loads."""
    report.note("There is no GPU: nothing is timed.")
    lines = []
    for load, policy in product(loads, POLICIES):
        drawn, plan = plan_for(size, load, policy)
        before, after = imbalance(served(drawn, size)), imbalance(plan.rank_loads)
        case: dict[str, str | int | float] = {"load": f"{load.name} {load.ratio:g}"}
        case |= {"policy": policy, "slots": load.slots}
        lines.append(Line(case, {BEFORE: before, AFTER: after, COPIES: plan.num_replicas}))
    report.section = "plans"
    report.add(size.model, lines)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common_options(parser)
    parser.add_argument("--model", choices=["qwen", "deepseek"], help="one of the two models")
    parser.add_argument("--no-stages", action="store_true", help="leave the breakdown out")
    options = parser.parse_args(argv[1:])
    Experts._draw = draw_on_device  # type: ignore[method-assign]
    timed = torch.cuda.is_available()
    report = Report("layer_gpu", argv, device=torch.cuda.get_device_name() if timed else None)
    report.header()
    sizes = [TOY] if options.toy else list(SIZES)
    if options.model:
        sizes = [size for size in sizes if options.model in size.model.lower()]
    loads = LOADS if not (options.quick or options.toy) else LOADS[1:2]
    if options.toy:
        loads = (replace(LOADS[0], ratio=1.2),)
    for size in sizes:
        if options.json and report.rows:
            report.write(options.json)  # what is measured is not lost if the next one fails
        if timed:
            run(report, size, loads[: size.loads], stages=not (options.no_stages or options.toy))
        else:
            only_plans(report, size, loads[: size.loads])
    if options.json:
        report.write(options.json)


if __name__ == "__main__":
    main(sys.argv)
