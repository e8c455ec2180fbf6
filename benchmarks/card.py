"""Eight ranks on one GPU with one layer each, and three ceilings for such a layer.

Green contexts split a GPU into partitions with their own multiprocessors and streams, so a rank
with more rows really takes longer, as on several GPUs. Memory, its bandwidth and the L2 cache stay
shared. Every rank has a graph of its step. All graphs run at the same time and synchronise through
shared memory.

The ceilings alternate with the layer, because the power limit sets the speed of a GPU under load:

    random even     every token chooses its experts at random; frameworks call it forced balance
    tile-perfect    the same, but every expert gets the same number of rows, a multiple of a tile
    matmul peak     plain torch products of large matrices, on the whole GPU

Shapes: T tokens of a rank, K experts per token, R ranks, E experts, D model width, F hidden width.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness import Metric, Values
from layers import FixedRouter, drawn_weights, layer_with_weights
from load_cases import Shape, ids_with, loads_of, random_even_ids, tile_perfect_ids
from timing import Call, device_us, free, in_turns, medians

import ultraep
from ultraep import BalanceConfig, Plan, Topology
from ultraep.arrays import IntArray
from ultraep.runtime.settings import DeviceShare

LAUNCHING = 30_000_000  # cycles: longer than launching all ranks takes
CUDA, BF16 = torch.device("cuda"), torch.bfloat16
SIDE, PRODUCTS = 8192, 60  # of the plain products, which take as long as a step
WARMUP = 3  # rounds
RANDOM_EVEN, TILE_PERFECT, MATMUL = "random even", "tile-perfect", "matmul"
OF_RANDOM = Metric("share_of_random_even", "ratio", "of random", ".3f")
OF_TILES = Metric("share_of_tile_perfect", "ratio", "of tiles", ".3f")
OF_MATMUL = Metric("share_of_matmul_peak", "ratio", "of matmul", ".3f")
RANDOM_MS = Metric("random_even_time_p50", "ms", "random ms", ".2f")
TILES_MS = Metric("tile_perfect_time_p50", "ms", "tiles ms", ".2f")
TAX = Metric("random_even_over_tile_perfect", "ratio", "random / tiles", ".3f")
PEAK = Metric("matmul_rate", "TFLOP/s", "matmul", ".0f")
CLOCK = Metric("sm_clock", "MHz", "MHz", ".0f")
POWER = Metric("power", "W", "W", ".0f")


@dataclass
class Partition:
    """Some multiprocessors of the GPU."""

    sms: int
    context: Any

    def stream(self) -> torch.cuda.Stream:
        """Create a stream whose kernels run only on these multiprocessors."""
        from cuda.bindings import driver

        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        made = _ok(driver.cuGreenCtxStreamCreate(self.context, flags, 0))
        return torch.cuda.ExternalStream(int(made))


def split(count: int, sms: int) -> list[Partition]:
    """Split the GPU into `count` partitions of `sms` multiprocessors."""
    from cuda.bindings import driver

    torch.cuda.init()
    torch.zeros(1, device="cuda")  # creates the primary context
    device = _ok(driver.cuDeviceGet(torch.cuda.current_device()))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = _ok(driver.cuDeviceGetDevResource(device, kind))
    groups, made, _ = _ok(driver.cuDevSmResourceSplitByCount(count, whole, 0, sms))
    if made < count:
        raise SystemExit(
            f"the GPU has {made} partitions of {sms} multiprocessors, {count} are needed"
        )
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    partitions = []
    for group in groups[:count]:
        description = _ok(driver.cuDevResourceGenerateDesc([group], 1))
        context = _ok(driver.cuGreenCtxCreate(description, device, flags))
        partitions.append(Partition(int(group.sm.smCount), context))
    return partitions


def _ok(result: Any) -> Any:
    """Return the values of a driver call, or exit if its code is not 0."""
    code, *values = result
    if int(code) != 0:
        raise SystemExit(f"a call of the CUDA driver failed: {code!r}")
    return values[0] if len(values) == 1 else values


def graph_on(stream: torch.cuda.Stream, call: Call) -> torch.cuda.CUDAGraph:
    """Capture one call. Nothing runs yet, so no rank waits for another."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        call()
    return graph


def together(calls: Sequence[Call], streams: Sequence[torch.cuda.Stream]) -> None:
    """Run all calls, each on its stream; the current stream waits for all of them."""
    main = torch.cuda.current_stream()
    for stream, call in zip(streams, calls, strict=True):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            call()
    for stream in streams:
        main.wait_stream(stream)


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """A layer, its partitions, and the number of rounds."""

    model: str
    top_k: int = 8
    ranks: int = 8
    sms: int = 16
    rounds: int = 7
    loads: int = 5  # number of loads that are measured


class Rank:
    """One rank on one partition of a GPU: a layer and a graph of its step.

    A step is the forward pass of the layer and, with `backward`, the backward pass.
    """

    def __init__(self, number: int, partition: Partition, size: Size, *, backward: bool) -> None:
        self.number, self.sms, self.stream = number, partition.sms, partition.stream()
        self.size, self.backward, self.aside = size, backward, partition.stream()
        generator = torch.Generator(device=CUDA).manual_seed(number)
        drawn = partial(torch.randn, generator=generator, device=CUDA, dtype=BF16)
        self.x = drawn(size.tokens, size.hidden).requires_grad_()
        self.dy = drawn(size.tokens, size.hidden)
        gates = torch.rand(size.tokens, size.top_k, generator=torch.Generator().manual_seed(1))
        self.router = FixedRouter(
            torch.zeros(size.tokens, size.top_k, dtype=torch.int32, device=CUDA),
            (gates / gates.sum(dim=1, keepdim=True)).cuda().requires_grad_(),
        )
        self.balancer: Any = None
        self.layer: Any = None
        self.graph: Any = None
        self.record: str | None = None  # folder of a trace
        self.y: Any = None

    def become(self, peers: Any, plan: Plan, capacity: int | str) -> None:
        """Join a new group, with the home experts of this rank in the plan."""
        size, topology = self.size, plan.topology
        self.balancer = ultraep.Balancer(
            peers=peers,
            data_plane="mapped",
            share=DeviceShare(sms=self.sms, stream=self.aside),  # weights move on their own stream
            experts=size.experts,
            tokens=size.tokens,
            slots=topology.slots,
            homes=topology.home_of_expert.tolist(),
            policy="ultraep" if plan.config.policy == "ultraep" else "none",
            capacity=capacity,
            timeout=20.0,
            record=self.record,
        )
        home = topology.home_experts(self.number).tolist()
        self.layer = layer_with_weights(
            self.balancer, self.router, drawn_weights(size, home, CUDA, BF16)
        )
        assert self.router.ids is not None
        self.balancer.prepare(self.router.ids, self.x, self.layer.experts.bundle)

    def step(self) -> None:
        with torch.set_grad_enabled(self.backward):
            self.y = self.layer(self.x)
            if self.backward:
                self.y.backward(self.dy)

    def forget(self) -> None:
        """Drop the graph, outputs and gradients of the last step."""
        self.graph = self.y = None
        for tensor in (self.x, self.router.gates, *self.layer.parameters()):
            tensor.grad = None

    def capture(self) -> None:
        self.forget()
        self.graph = graph_on(self.stream, self.step)

    def leave(self) -> None:
        self.graph = self.layer = self.balancer = self.y = self.x.grad = None
        assert self.router.gates is not None
        self.router.gates.grad = None


class World:
    """All ranks of the GPU with one layer each; two worlds may use its partitions in turn."""

    def __init__(
        self, size: Size, parts: Sequence[Partition] | None = None, *, backward: bool = True
    ) -> None:
        self.parts = parts or split(size.ranks, size.sms)
        self.size, self.backward = size, backward
        self.ranks = [Rank(n, part, size, backward=backward) for n, part in enumerate(self.parts)]

    def beside(self) -> World:
        """Another world on the same partitions."""
        return World(self.size, self.parts, backward=self.backward)

    def leave(self) -> None:
        for rank in self.ranks:
            rank.leave()
        free()

    def regroup(self, plan: Plan, capacity: int | str) -> None:
        """Create new shared memory, balancers and weights."""
        from ultraep.runtime.mapped.peers import LocalPeers

        self.leave()
        group = LocalPeers(self.size.ranks)
        for rank in self.ranks:
            rank.become(group.of(rank.number), plan, capacity)
        torch.cuda.synchronize()

    def route(self, loads: IntArray) -> None:
        """Set ids with these loads on every rank."""
        ids = (ids_with(own, self.size, seed=rank) for rank, own in enumerate(loads))
        self.choose(list(ids))

    def choose(self, ids: Sequence[torch.Tensor]) -> None:
        """Set these ids `[T, K]` on every rank."""
        for rank, own in zip(self.ranks, ids, strict=True):
            assert rank.router.ids is not None
            rank.router.ids.copy_(own)
        torch.cuda.synchronize()

    def capture(self) -> None:
        for rank in self.ranks:
            rank.capture()
        torch.cuda.synchronize()

    def replay(self) -> None:
        """Run one step of all ranks concurrently."""
        together([rank.graph.replay for rank in self.ranks], [rank.stream for rank in self.ranks])

    def check(self) -> None:
        """Raise errors recorded on the device; waits for it."""
        torch.cuda.synchronize()
        for rank in self.ranks:
            rank.balancer.check()

    def prepare(self, loads: IntArray, plan: Plan, *, placed: bool = False) -> None:
        """Capture a step with this plan and run it once. placed: replicas are sent in advance."""
        self.regroup(plan, capacity_of(plan))
        self.route(loads)
        self.capture()  # compiles, so that no rank loads a kernel while others wait
        if placed:
            self.adopt(plan)
            self._keep_replicas()
            self.capture()
        self.replay()
        self.check()

    def adopt(self, plan: Plan) -> None:
        """Use this plan in all replays from now on."""
        for rank in self.ranks:
            rank.balancer.plane(CUDA).adopt(plan)

    def _keep_replicas(self) -> None:
        torch.cuda.synchronize()
        for rank in self.ranks:
            with torch.cuda.stream(rank.stream):
                rank.balancer.plane(CUDA).keep(rank.layer.experts.bundle)
        self.check()

    def time(self, rounds: int | None = None, warmup: int = 2) -> float:
        """Median milliseconds of a step.

        The GPU waits until all ranks are launched, because one host launches them one after the
        other, where eight hosts would launch them at the same time.
        """
        wait, rounds = torch.cuda.synchronize, rounds or self.size.rounds
        return device_us(self.replay, rounds, warmup=warmup, before=wait, cycles=LAUNCHING) / 1e3


DRAWN: dict[str, Callable[[Size, int], torch.Tensor]] = {
    RANDOM_EVEN: random_even_ids,
    TILE_PERFECT: tile_perfect_ids,
}


@dataclass(frozen=True)
class Measured:
    """Milliseconds of a step, and of the ceilings that alternated with it."""

    ms: float
    ceilings: dict[str, float]
    clock: float | None
    power: float | None

    def shares(self, ms: float) -> Values:
        """Shares of both kinds of even routing that a step of `ms` milliseconds reaches."""
        return {
            OF_RANDOM: self.ceilings[RANDOM_EVEN] / ms,
            OF_TILES: self.ceilings[TILE_PERFECT] / ms,
        }

    def values(self, flops: float) -> Values:
        """All shares of a step with `flops` operations, and the ceilings themselves."""
        peak = PRODUCTS * 2 * SIDE**3 / self.ceilings[MATMUL] / 1e9
        return {
            **self.shares(self.ms),
            OF_MATMUL: flops / self.ms / 1e9 / peak,
            RANDOM_MS: self.ceilings[RANDOM_EVEN],
            TILES_MS: self.ceilings[TILE_PERFECT],
            TAX: self.ceilings[RANDOM_EVEN] / self.ceilings[TILE_PERFECT],
            PEAK: peak,
            CLOCK: self.clock,
            POWER: self.power,
        }


class Ceilings:
    """A world without replicas that runs both kinds of even routing, and plain products."""

    def __init__(self, world: World) -> None:
        self.world, size = world, world.size
        self.ids = {kind: drawn(size, kind) for kind in DRAWN}
        plans = [even_plan(size, kind) for kind in DRAWN]
        fullest = max(plans, key=lambda plan: int(plan.rank_loads.max()))
        world.regroup(fullest, capacity_of(fullest))
        world.choose(self.ids[RANDOM_EVEN])
        world.capture()
        world.replay()
        world.check()
        left, right = (torch.randn(SIDE, SIDE, device="cuda").bfloat16() for _ in range(2))
        self._matrices = left, right, torch.empty_like(left)

    def _multiply(self) -> None:
        left, right, out = self._matrices
        for _ in range(PRODUCTS):
            torch.mm(left, right, out=out)

    def in_turn_with(self, step: Call, rounds: int) -> Measured:
        """Time a step and all ceilings in turn."""
        calls = {"step": step, MATMUL: self._multiply} | dict.fromkeys(DRAWN, self.world.replay)

        def microseconds(name: str) -> float:
            before = partial(self.world.choose, self.ids[name]) if name in DRAWN else wait
            return device_us(calls[name], 1, before=before, cycles=LAUNCHING)

        wait = torch.cuda.synchronize
        times = in_turns(list(calls), rounds, microseconds, warmup=WARMUP)
        clock, power = clock_and_power(step)
        self.world.check()
        ms = {name: us / 1e3 for name, us in medians(times).items()}
        return Measured(ms.pop("step"), ms, clock, power)


def drawn(size: Size, kind: str) -> list[torch.Tensor]:
    """[T, K] ids of every rank, for one kind of even routing."""
    return [DRAWN[kind](size, rank) for rank in range(size.ranks)]


def even_plan(size: Size, kind: str) -> Plan:
    """The plan for even routing, without replicas."""
    topology = Topology(ranks=size.ranks, experts=size.experts, slots=0)
    loads = loads_of(drawn(size, kind), size)
    return ultraep.plan(loads, topology, BalanceConfig(policy="none"))


def capacity_of(plan: Plan) -> int:
    """Row capacity for a plan, with a small reserve."""
    return row_capacity(int(plan.rank_loads.max()))


def row_capacity(rows: int) -> int:
    return -(-int(rows * 1.02) // 256) * 256


def clock_and_power(step: Call) -> tuple[float | None, float | None]:
    """Read clock (MHz) and power (W) during some steps, if nvidia-smi is installed."""
    if shutil.which("nvidia-smi") is None:
        return None, None
    for _ in range(8):
        step()
    query = "--query-gpu=clocks.sm,power.draw"
    command: Sequence[str] = ("nvidia-smi", query, "--format=csv,noheader,nounits", "--id=0")
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    torch.cuda.synchronize()
    clock, power = (float(part) for part in answer.split(","))
    return clock, power
