"""The control plane on the GPU, ids to routes: every stage in microseconds, beside floors and twin.

    python benchmarks/bench_control.py                         # needs a GPU; two minutes
    python benchmarks/bench_control.py --sizes 8x128,64x256    # ranks x experts
    python benchmarks/bench_control.py --toy                   # tiny, for CI; also without a GPU

Nothing is timed that is not first compared, bit by bit, with the CPU backend, the twin; and after
the timing again, with other loads. `benchmarks/README.md` tells how to read the tables.

Shapes: T tokens of a rank, K experts per token, N = T * K routed rows, R ranks, E experts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, Protocol
from unittest.mock import patch

import harness
import numpy as np
import torch
from harness import (
    ORDERED,
    SHUFFLED,
    Kind,
    Line,
    Metric,
    Report,
    Values,
    progress,
    time_call,
    zipf_kinds,
)

import ultraep
from ultraep import BalanceConfig, ControlPlane, Plan, Topology
from ultraep.arrays import PADDING, IntArray
from ultraep.backends import select
from ultraep.loads import MAX_TOTAL
from ultraep.policies import Problem, get_policy
from ultraep.reroute import Routes, reroute, reroute_dense, rows_received
from ultraep.runtime.mapped.control import DevicePlan, DeviceRoutes

USUAL = Kind(SHUFFLED, 3.0)
WHOLE = "counts to routes"
VERBS = ("count", "plan", "reroute")
KERNELS = ("count", "sum", "place", "split", "lines", "assign", "receive")
STAGES = ("count", "sum", "place", "split", "plan", "lines", "assign", "receive", "reroute", WHOLE)
MAP = "map"  # instead of ids: a bool map of tokens and experts
INNER, REPLAYS = 20, 25  # calls in one graph, and how often it is replayed
COPIED = 1 << 30  # bytes of the copy that shows how fast memory is
ROUTED_EVERY = 4  # of the random plans, those whose ids are rerouted too

LAUNCHES = Metric("launches", "kernels", "launches", ".0f")
GRAPH = Metric("graph_time_p50", "us", "graph us", ".2f")
EAGER = Metric("eager_time_p50", "us", "eager us", ".1f")
FLOOR = Metric("launch_floor", "us", "floor us", ".2f")
OVER_FLOOR = Metric("times_launch_floor", "ratio", "x floor", ".2f")
MOVED = Metric("state_bytes", "MB", "MB", ".3f")
BYTES = Metric("bytes_floor", "us", "bytes us", ".2f")
OVER_BYTES = Metric("times_bytes_floor", "ratio", "x bytes", ".1f")
TWIN = Metric("cpu_twin_time_p50", "us", "CPU us", ".1f")
WALL = Metric("interpreter_time", "us", "interpreter us", ".0f")
BEFORE = Metric("imbalance_before", "max/mean", "before", ".3f")
AFTER = Metric("imbalance", "max/mean", "after")
BOUND = Metric("lower_bound", "max/mean", "bound")
COPIES = Metric("copies", "copies", "copies", ".0f")
FIRST_PLAN = Metric("first_plan", "s", "first plan s", ".2f")
FIRST_ROUTES = Metric("first_routes", "s", "then first routes s", ".2f")
NODE = Metric("launch_floor_per_kernel", "us", "a kernel us", ".3f")
RATE = Metric("copy_rate", "GB/s", "GB/s", ".0f")
PLANS = Metric("plans", "plans", "plans", ".0f", sum)
PLANS_EQUAL = Metric("plans_equal_to_the_twin", "plans", "equal", ".0f", sum)
ROUTES = Metric("routes", "routes", "routes", ".0f", sum)
ROUTES_EQUAL = Metric("routes_equal_to_the_twin", "routes", "equal ", ".0f", sum)


class Mismatch(Exception):
    """The device and its twin disagree."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a control plane is made for, and the microbatches that it gets."""

    ranks: int
    experts: int
    slots: int = 1
    domain: int | None = None
    tolerance: float = 0.0
    ids: str = "int64"
    kind: Kind = USUAL

    @property
    def topology(self) -> Topology:
        return Topology(
            ranks=self.ranks, experts=self.experts, slots=self.slots, domain=self.domain
        )

    @property
    def config(self) -> BalanceConfig:
        return BalanceConfig(tolerance=self.tolerance)

    @property
    def case(self) -> dict[str, str | int | float]:
        return {
            "ranks": self.ranks,
            "experts": self.experts,
            "slots": self.slots,
            "domain": self.domain or self.ranks,
            "tolerance": self.tolerance,
            "load": self.kind.name,
            "ids": self.ids,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Topologies that are padded to the same powers of two, so that few kernels are compiled."""

    domain: tuple[int, ...]  # ranks of a domain, one of these
    domains: int = 1
    homes: tuple[int, ...]  # experts of a rank, one of these
    uneven: bool = False  # up to so many
    slots: int
    tolerances: tuple[float, ...] = (0.0, 0.01, 0.1, 1.0)

    @property
    def case(self) -> dict[str, str | int | float]:
        return {
            "domains": self.domains,
            "of ranks": " or ".join(map(str, self.domain)),
            "homes": ("up to " if self.uneven else "") + " or ".join(map(str, self.homes)),
            "slots": self.slots,
        }


TIGHT, LOOSE = (0.0,), (0.01, 0.1, 1.0)  # tolerances: other kernels for none than for some
# The small ones first: they are for the interpreter too. Those behind them are padded like the
# settings that are timed, but for the last: it is planned by groups of ranks.
FAMILIES = (
    Family(domain=(3, 4), homes=(3, 4), slots=1),
    Family(domain=(5, 8), homes=(2,), slots=2, tolerances=LOOSE),
    Family(domain=(3, 4), domains=2, homes=(5,), uneven=True, slots=3),
    Family(domain=(1,), homes=(3, 4), slots=1, tolerances=TIGHT),
    Family(domain=(6, 8), homes=(3, 4), uneven=True, slots=0, tolerances=TIGHT),
    Family(domain=(5, 8), domains=8, homes=(3, 4), slots=1),
    Family(domain=(37, 64), homes=(3, 4), slots=1),
    Family(domain=(45, 64), homes=(4,), uneven=True, slots=2, tolerances=TIGHT),
    Family(domain=(200, 256), homes=(2,), slots=1),
)
SMALL = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is measured."""

    sizes: tuple[tuple[int, int], ...]  # ranks and experts
    detail: tuple[int, int]  # the size at which loads and variants are measured
    kinds: tuple[Kind, ...]
    variants: tuple[dict[str, Any], ...]
    variant_stages: tuple[str, ...]
    tokens: int
    plans: int
    plan_settings: int  # that the plans are divided among
    families: int
    routed_rows: int  # most of them, of the random plans that are rerouted
    copied: int


FULL = Scale(
    sizes=((8, 128), (16, 128), (64, 256), (72, 288), (256, 1024), (1024, 4096)),
    detail=(64, 256),
    kinds=tuple(zipf_kinds((1.5, 3.0, 4.0))),
    variants=(
        {"slots": 2},
        {"tolerance": 0.01},
        {"domain": 8},
        {"ids": "int32"},
        {"ids": MAP},
    ),
    variant_stages=(*VERBS, WHOLE),
    tokens=8192,
    plans=10_000,
    plan_settings=45,
    families=len(FAMILIES),
    routed_rows=1 << 15,
    copied=COPIED,
)
QUICK = replace(
    FULL,
    sizes=((8, 128), (64, 256)),
    kinds=tuple(zipf_kinds((3.0,))),
    variants=({"tolerance": 0.01}, {"ids": MAP}),
    plans=50,
    plan_settings=3,
    families=3,
)
TOY = Scale(
    sizes=((4, 8),),
    detail=(4, 8),
    kinds=(Kind(ORDERED, 2.0),),
    variants=({"slots": 2, "domain": 2, "tolerance": 0.01, "ids": "int32"}, {"ids": MAP}),
    variant_stages=VERBS,
    tokens=32,
    plans=5,
    plan_settings=5,
    families=SMALL,
    routed_rows=512,
    copied=1 << 26,
)


@dataclass(frozen=True, slots=True)
class Batch:
    """A microbatch on the host, and what the twin makes of it."""

    loads: IntArray  # [R, E]
    choices: torch.Tensor  # of rank 0: [T, K] ids, or a [T, E] map
    probabilities: torch.Tensor  # [T, E], of a map
    plan: Plan
    routes: Routes | tuple[torch.Tensor, torch.Tensor]

    @property
    def rows(self) -> int:
        """What a control plane must have room for."""
        return len(self.choices) if self.is_map else self.choices.numel()

    @property
    def is_map(self) -> bool:
        return self.choices.dtype == torch.bool


def draw(setting: Setting, tokens: int, seed: int) -> Batch:
    """Loads of all ranks, and choices of rank 0 that add up to its row of them."""
    loads = setting.kind.draw(setting.ranks, setting.experts, tokens=tokens, seed=seed)
    plan = ultraep.plan(loads, setting.topology, setting.config, backend="cpu")
    rng = np.random.default_rng(seed)
    if setting.ids == MAP:
        chosen = np.zeros((tokens, setting.experts), dtype=np.bool_)
        for expert, rows in enumerate(loads[0]):
            chosen[rng.permutation(tokens)[:rows], expert] = True
        choices = torch.from_numpy(chosen)
        weights = torch.from_numpy(rng.random(chosen.shape, dtype=np.float32))
        mapped = reroute_dense(choices, weights, plan, 0, backend="cpu")
        return Batch(loads, choices, weights, plan, mapped)
    ids = rng.permutation(np.repeat(np.arange(setting.experts), loads[0])).reshape(tokens, -1)
    choices = torch.from_numpy(ids).to(getattr(torch, setting.ids))
    routes = reroute(choices, plan, 0, backend="cpu")
    return Batch(loads, choices, torch.empty(0), plan, routes)


def same_plan(got: Plan, want: Plan) -> bool:
    return got.digest() == want.digest() and np.array_equal(got.rank_loads, want.rank_loads)


def same_routes(got: DeviceRoutes, want: Routes) -> bool:
    """Whether every part of them is equal, and nothing stands behind the last row."""
    order, rows = got.order.cpu().long(), len(want.order)
    positions = torch.full((want.num_rows,), PADDING)
    positions[want.order] = torch.arange(rows)
    return (
        torch.equal(got.slots.cpu().long(), want.slots)
        and torch.equal(order[:rows], want.order)
        and bool((order[rows:] == PADDING).all())
        and torch.equal(got.positions.cpu().long(), positions)
        and torch.equal(got.rows_of_slot.cpu().long(), want.rows_of_slot)
        and got.send_counts.tolist() == want.send_counts
        and np.array_equal(got.receive_counts.cpu().numpy(), want.receive_counts)
    )


@dataclass(slots=True)
class Tally:
    """Comparisons with the twin that were made in the settings that are timed."""

    plans: int = 0
    routes: int = 0


class Bench:
    """A control plane of rank 0, and the tensors that its kernels read: `put` changes them."""

    def __init__(self, setting: Setting, batch: Batch, tally: Tally) -> None:
        self.setting, self.tally = setting, tally
        self.control = ControlPlane(setting.topology, setting.config, rows=batch.rows)
        device = self.control.device
        self.loads = torch.from_numpy(batch.loads).to(device, torch.int32)
        self.choices = batch.choices.to(device, copy=True)
        self.probabilities = batch.probabilities.to(device, copy=True)

    def put(self, batch: Batch) -> None:
        """Other loads and choices, in the same place."""
        self.loads.copy_(torch.from_numpy(batch.loads))
        self.choices.copy_(batch.choices)
        self.probabilities.copy_(batch.probabilities)

    def count(self) -> torch.Tensor:
        is_map = self.setting.ids == MAP
        return (self.control.count_map if is_map else self.control.count)(self.choices)

    def plan(self) -> DevicePlan:
        return self.control.plan(self.loads)

    def reroute(self) -> object:
        """Nothing is counted again."""
        if self.setting.ids == MAP:
            return self.control.reroute_map(self.choices, self.probabilities, counted=True)
        return self.control.reroute(self.choices, counted=True)

    def all(self) -> object:
        """What lies between the router and dispatch, but for the message with the counts."""
        self.count()
        self.plan()
        return self.reroute()

    @property
    def routes(self) -> DeviceRoutes:
        """The routes of ids, whoever launched the kernels that wrote them."""
        control, rerouter = self.control, self.control._rerouter
        return DeviceRoutes(
            control._slots.view(self.choices.shape),
            control._positions,
            control._order,
            rerouter.rows_of_slot,
            rerouter.send_counts,
            control._received,
        )

    def check(self, batch: Batch, result: object) -> None:
        """Raise unless what stands on the device is what the twin says; `result`: of a map."""
        self.control.check()
        counts = self.control._counter.totals[:-1].cpu().numpy()
        if not np.array_equal(counts, batch.loads[0]):
            raise Mismatch(f"the counts of {self.setting}")
        if not same_plan(self.control._last_plan().to_host(), batch.plan):
            raise Mismatch(f"the plan of {self.setting}")
        self.tally.plans += 1
        if isinstance(batch.routes, Routes):
            same = same_routes(self.routes, batch.routes)
        else:
            assert isinstance(result, tuple)
            pairs = zip(result, batch.routes, strict=True)
            same = all(torch.equal(got.cpu(), want) for got, want in pairs)
        if not same:
            raise Mismatch(f"the routes of {self.setting}")
        self.tally.routes += 1


@dataclass(frozen=True, slots=True)
class Stage:
    """Something to be timed: how it is launched, how the twin does it, and the bytes it moves."""

    name: str
    call: Callable[[], Any]
    twin: Callable[[], object] | None = None
    moved: int | None = None


def stages(bench: Bench, batch: Batch, names: Iterable[str]) -> list[Stage]:
    """The stages of these names, in the order of `STAGES`."""
    every = _map_stages if batch.is_map else _ids_stages
    found = {stage.name: stage for stage in every(bench, batch)}
    return [found[name] for name in STAGES if name in names]


def _ids_stages(bench: Bench, batch: Batch) -> list[Stage]:
    control, loads, ids, routes = bench.control, bench.loads, bench.choices, bench.routes
    planner, rerouter = control._planner, control._rerouter
    totals, result, received = control._counter.totals, planner.result, routes.receive_counts
    slots, order, positions = routes.slots, routes.order, routes.positions
    routed = _bytes(slots, order, positions)
    columns = 4 * batch.plan.num_replicas * planner.ranks  # of the loads: those of copied experts
    count, plan, assign, sum_up, place, split = _twins(bench.setting, batch)
    receive = partial(rows_received, batch.plan, 0)

    def whole() -> object:
        count()
        return reroute(batch.choices, plan(), 0, backend="cpu")

    return [
        Stage("count", bench.count, count, _bytes(ids, totals)),
        Stage("sum", partial(planner.sum, loads), sum_up, _bytes(loads, planner.expert_loads)),
        Stage("place", planner.place, place),
        Stage("split", partial(planner.lay_out, loads), split, columns + _bytes(result)),
        Stage("plan", bench.plan, plan, _bytes(loads, result)),
        Stage("lines", partial(rerouter.lines, loads, 0)),
        Stage(
            "assign",
            partial(rerouter.assign, ids, slots, order, positions),
            moved=_bytes(ids) + routed,
        ),
        Stage(
            "receive",
            partial(rerouter.receive, loads, 0, received),
            receive,
            2 * _bytes(received),
        ),
        Stage("reroute", bench.reroute, assign, _bytes(ids) + routed + 2 * _bytes(received)),
        Stage(WHOLE, bench.all, whole, _bytes(ids, totals, loads, result, received) + routed),
    ]


def _map_stages(bench: Bench, batch: Batch) -> list[Stage]:
    control, loads, chosen = bench.control, bench.loads, bench.choices
    totals, result = control._counter.totals, control._planner.result
    plan = partial(ultraep.plan, batch.loads, batch.plan.topology, batch.plan.config, backend="cpu")
    mapped = _bytes(chosen, bench.probabilities) + (
        sum(_bytes(part) for part in batch.routes) if isinstance(batch.routes, tuple) else 0
    )
    to_map = partial(reroute_dense, batch.choices, batch.probabilities, rank=0, backend="cpu")
    return [
        Stage("count", bench.count, partial(batch.choices.sum, dim=0), _bytes(chosen, totals)),
        Stage("plan", bench.plan, plan, _bytes(loads, result)),
        Stage("reroute", bench.reroute, lambda: to_map(plan=batch.plan), mapped),
        Stage(
            WHOLE,
            bench.all,
            lambda: (batch.choices.sum(dim=0), to_map(plan=plan())),
            mapped + _bytes(totals, loads, result),
        ),
    ]


def _twins(setting: Setting, batch: Batch) -> tuple[Callable[[], Any], ...]:
    """Count, plan and reroute on the CPU; and the parts of plan: sum, place, split."""
    topology, config, engine = setting.topology, setting.config, select("cpu")
    totals = batch.loads.sum(axis=0)
    problem = Problem(batch.loads, totals, topology, config, engine, None)
    place = partial(get_policy(config.policy).decide, problem)
    homes = topology.home_of_expert
    return (
        partial(ultraep.count_loads, batch.choices, setting.experts, backend="cpu"),
        partial(ultraep.plan, batch.loads, topology, config, backend="cpu"),
        partial(reroute, batch.choices, batch.plan, 0, backend="cpu"),
        partial(batch.loads.sum, axis=0),
        place,
        partial(engine.split, batch.loads, homes, place(), config.locality),
    )


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Run(Protocol):
    """A stage that is ready to be repeated, with whatever the inputs hold then."""

    @property
    def values(self) -> Values: ...

    def replay(self) -> Any:
        """Once more; what the call returned, overwritten."""


class Clock(Protocol):
    """Where the stages run, and how they are timed."""

    def start(self, stage: Stage, twin_repeats: int) -> Run: ...

    def wait(self) -> None: ...


class InterpreterRun:
    """Timed by the wall clock whenever it is replayed."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.values: dict[Metric, float | None] = {}

    def replay(self) -> Any:
        begin = time.perf_counter()
        launches, result = launches_of(self._stage.call)
        self.values = {LAUNCHES: launches, WALL: 1e6 * (time.perf_counter() - begin)}
        return result


class Interpreter:
    """Triton's interpreter: its results count, its times tell nothing of a GPU."""

    def start(self, stage: Stage, twin_repeats: int) -> InterpreterRun:
        del twin_repeats
        return InterpreterRun(stage)

    def wait(self) -> None:
        pass


class GraphRun:
    """A captured graph of `INNER` calls, and the times of graph, eager calls and twin."""

    def __init__(self, stage: Stage, gpu: Gpu, twin_repeats: int) -> None:
        launches, _ = launches_of(stage.call)
        self._graph, self._result = captured(stage.call, INNER)
        graph_us, floor = replay_us(self._graph) / INNER, gpu.floor(launches)
        moved = gpu.copy_us(stage.moved) if stage.moved else None
        twin = time_call(stage.twin, twin_repeats, warmup=1).p50 if stage.twin else None
        self.values: dict[Metric, float | None] = {
            LAUNCHES: launches,
            GRAPH: graph_us,
            EAGER: eager_us(stage.call),
            FLOOR: floor,
            OVER_FLOOR: graph_us / floor,
            MOVED: stage.moved / 1e6 if stage.moved else None,
            BYTES: moved,
            OVER_BYTES: graph_us / moved if moved else None,
            TWIN: 1e6 * twin if twin else None,
        }

    def replay(self) -> Any:
        self._graph.replay()
        return self._result


class Gpu:
    """Graphs on the current GPU, and two floors: launches that do nothing, bytes that are copied.

    `rate`: bytes per second, read and written, of a copy within the device.
    """

    def __init__(self, copied: int) -> None:
        self.rate = copy_rate(copied)
        self.floors: dict[int, float] = {}  # microseconds, by number of launches
        self._target = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._nothing = nothing_kernel()

    def start(self, stage: Stage, twin_repeats: int) -> GraphRun:
        return GraphRun(stage, self, twin_repeats)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def floor(self, launches: int) -> float:
        """Microseconds of so many kernels that do nothing, in a graph like that of a stage."""
        if launches not in self.floors:
            launch = partial(self._nothing[(1,)], self._target, num_warps=1)
            graph, _ = captured(launch, launches * INNER)
            self.floors[launches] = replay_us(graph) / INNER
        return self.floors[launches]

    def copy_us(self, moved: int) -> float:
        """Microseconds in which a copy reads and writes so many bytes."""
        return 1e6 * moved / self.rate


def nothing_kernel() -> Any:
    """A kernel that does nothing. Triton is imported late: it reads its settings when it is."""
    import triton

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def nothing(target):  # type: ignore[no-untyped-def]
        pass

    return nothing


def captured(call: Callable[[], Any], times: int) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of so many calls, and what the last of them returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # all kernels must be loaded before they are captured
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph, result = torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph):
        for _ in range(times):
            result = call()
    torch.cuda.synchronize()
    return graph, result


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one replay, the median of many that queue up, so that none is waited for."""
    graph.replay()
    torch.cuda.synchronize()
    graph.replay()
    return _events_us(graph.replay, between=lambda: None)


def eager_us(call: Callable[[], object]) -> float:
    """Microseconds of one call on an idle device, median: mostly those in which it is launched."""
    call()
    return _events_us(call, between=torch.cuda.synchronize)


def _events_us(call: Callable[[], object], between: Callable[[], object]) -> float:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
    for begin, end in events:
        between()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(median(1e3 * begin.elapsed_time(end) for begin, end in events))


def copy_rate(size: int) -> float:
    """Bytes per second of a copy within the device, read and written."""
    source = torch.zeros(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    return 2 * size * 1e6 / _events_us(partial(target.copy_, source), between=lambda: None)


def launches_of(call: Callable[[], Any]) -> tuple[int, Any]:
    """Kernels of this project that the call launches, and what it returns."""
    from ultraep.backends.triton.kernels import place

    kind, launches = type(place.search), 0
    run = kind.run

    def counted(kernel: Any, *args: Any, **options: Any) -> Any:
        nonlocal launches
        launches += 1
        return run(kernel, *args, **options)

    with patch.object(kind, "run", counted):
        result = call()
    return launches, result


@dataclass(slots=True)
class Measured:
    """A setting: how long until its first results, the twin's plan, and the times of its stages."""

    first: dict[Metric, float | None]
    plan: Plan
    stages: dict[str, Values] = field(default_factory=dict)


def measure(
    setting: Setting, names: Sequence[str], tokens: int, clock: Clock, tally: Tally
) -> Measured:
    """Compare with the twin, time the stages, and compare again while loads and ids change."""
    batch, other = (draw(setting, tokens, seed) for seed in (0, 1))
    bench = Bench(setting, batch, tally)
    measured = Measured(_first(bench, batch, clock), batch.plan)
    repeats = 20 if setting.ranks <= 64 else 5
    runs = {stage.name: clock.start(stage, repeats) for stage in stages(bench, batch, names)}
    ways = [way for way in (KERNELS, VERBS, (WHOLE,)) if all(name in runs for name in way)]
    for turn, way in enumerate(ways):
        now = batch if turn % 2 else other
        bench.put(now)
        result = None
        for name in way:
            result = runs[name].replay()
        bench.check(now, result)
    measured.stages = {name: run.values for name, run in runs.items()}
    return measured


def _first(bench: Bench, batch: Batch, clock: Clock) -> dict[Metric, float | None]:
    """Seconds until kernels are compiled and have run once; and whether they are right."""
    clock.wait()
    begin = time.perf_counter()
    bench.plan()
    clock.wait()
    seconds: dict[Metric, float | None] = {FIRST_PLAN: time.perf_counter() - begin}
    if isinstance(clock, Interpreter):  # it is slow, and compares every call later on
        return seconds
    begin = time.perf_counter()
    bench.count()
    result = bench.reroute()
    clock.wait()
    seconds[FIRST_ROUTES] = time.perf_counter() - begin
    bench.check(batch, result)
    return seconds


def all_stages(
    report: Report,
    scale: Scale,
    sizes: Sequence[tuple[int, int]],
    clock: Clock,
    tally: Tally,
) -> None:
    """Every stage at every size, then the variants; and how long the first plans take."""
    compiled = []
    report.section = "stages"
    for ranks, experts in sizes:
        setting = Setting(ranks=ranks, experts=experts)
        tell(f"stages of {ranks} x {experts}")
        measured = measure(setting, STAGES, scale.tokens, clock, tally)
        report.add("stages", _stage_lines(setting, measured))
        compiled.append(Line({"ranks": ranks, "experts": experts}, measured.first))
    ranks, experts = scale.detail
    for variant in scale.variants if scale.detail in sizes else ():
        setting = Setting(ranks=ranks, experts=experts, **variant)
        tell(f"stages of {ranks} x {experts}, {variant}")
        measured = measure(setting, scale.variant_stages, scale.tokens, clock, tally)
        report.add("stages", _stage_lines(setting, measured))
    if isinstance(clock, Gpu):
        report.note("graph: a call inside a CUDA graph; eager: launched one by one; floor: as many")
        report.note("kernels that do nothing; bytes: a copy of as many; CPU: the twin, one core.")
    report.section = "compile"
    report.add("first call of every size", compiled)


def _stage_lines(setting: Setting, measured: Measured) -> list[Line]:
    return [
        Line(setting.case | {"stage": name}, values) for name, values in measured.stages.items()
    ]


def all_loads(report: Report, scale: Scale, clock: Clock, tally: Tally) -> None:
    """Time and imbalance of the plans for every load."""
    ranks, experts = scale.detail
    lines, shown = [], (LAUNCHES, GRAPH, EAGER, OVER_FLOOR, TWIN, WALL)
    for kind in scale.kinds:
        tell(f"plans for {kind.name}")
        setting = Setting(ranks=ranks, experts=experts, kind=kind)
        measured = measure(setting, VERBS, scale.tokens, clock, tally)
        values: dict[Metric, float | None] = {
            BEFORE: measured.plan.initial_imbalance,
            AFTER: measured.plan.imbalance,
            BOUND: measured.plan.lower_bound,
            COPIES: measured.plan.num_replicas,
        }
        times = {m: v for m, v in measured.stages["plan"].items() if m in shown}
        lines.append(Line(setting.case, values | times))
    report.section = "loads"
    report.add("plans", lines)


def floors(report: Report, gpu: Gpu, copied: int) -> None:
    """What was measured to compare with."""
    report.section = "floor"
    launched = sorted(gpu.floors.items())
    report.add(
        "kernels that do nothing, in a graph",
        [Line({"launches": n}, {FLOOR: floor, NODE: floor / n}) for n, floor in launched],
    )
    report.add(
        "copy within the device", [Line({"copied MB": copied >> 20}, {RATE: gpu.rate / 1e9})]
    )


def random_setting(family: Family, rng: np.random.Generator) -> tuple[Topology, BalanceConfig]:
    """One of the family, with any config."""
    domain, most = int(rng.choice(family.domain)), int(rng.choice(family.homes))
    ranks = domain * family.domains
    homes, experts = None, ranks * most
    if family.uneven:
        counts = rng.integers(0, most + 1, ranks)
        counts[rng.integers(ranks)] = most
        homes = rng.permutation(np.repeat(np.arange(ranks), counts)).tolist()
        experts = len(homes)
    return (
        Topology(
            ranks=ranks,
            experts=experts,
            slots=family.slots,
            domain=domain,
            homes=homes,
        ),
        BalanceConfig(
            tolerance=float(rng.choice(family.tolerances)),
            min_tokens_per_replica=int(rng.choice([1, 1, 2, 50])),
            max_replicas=(None, None, None, None, 0, 1, 3)[rng.integers(7)],
            locality=bool(rng.integers(2)),
        ),
    )


def random_loads(topology: Topology, rng: np.random.Generator) -> IntArray:
    """[R, E] loads of many shapes: flat, skewed, sparse, tiny and huge."""
    shape = (topology.ranks, topology.experts)
    popularity = np.exp(rng.normal(0.0, rng.choice([0.0, 0.5, 1.0, 2.0, 4.0]), topology.experts))
    mean = min(float(rng.choice([0.3, 3, 30, 3000, 1e6])), MAX_TOTAL / 2 / np.prod(shape))
    loads: IntArray = rng.poisson(popularity * (mean / popularity.mean()), shape)
    return loads


@dataclass(slots=True)
class Compared:
    """Plans and routes of one setting, and how many of them are equal to those of the twin."""

    setting: tuple[Topology, BalanceConfig]
    plans: int = 0
    plans_equal: int = 0
    routes: int = 0
    routes_equal: int = 0

    @property
    def differ(self) -> int:
        return self.plans - self.plans_equal + self.routes - self.routes_equal

    @property
    def values(self) -> Values:
        return {
            PLANS: self.plans,
            PLANS_EQUAL: self.plans_equal,
            ROUTES: self.routes,
            ROUTES_EQUAL: self.routes_equal,
        }


def compare(family: Family, plans: int, routed_rows: int, seed: Sequence[int]) -> Compared:
    """Random loads of one random setting, planned by the device and by the twin."""
    rng = np.random.default_rng(seed)
    topology, config = random_setting(family, rng)
    found = Compared((topology, config))
    rank = int(rng.integers(topology.ranks))
    control = ControlPlane(topology, config, rows=routed_rows, rank=rank)
    for number in range(plans):
        loads = random_loads(topology, rng)
        want = ultraep.plan(loads, topology, config, backend="cpu")
        got = control.plan(torch.from_numpy(loads).to(control.device, torch.int32))
        found.plans += 1
        found.plans_equal += same_plan(got.to_host(), want)
        rows = int(loads[rank].sum())
        if number % ROUTED_EVERY == 0 and rows < routed_rows:
            padding = rng.integers(min(8, routed_rows - rows) + 1)
            ids = np.repeat(np.arange(-1, topology.experts), [padding, *loads[rank]])
            choices = torch.from_numpy(rng.permutation(ids)[:, None])
            routes = control.reroute(choices.to(control.device))
            found.routes += 1
            found.routes_equal += same_routes(routes, reroute(choices, want, rank, backend="cpu"))
    control.check()
    return found


def parity(report: Report, scale: Scale, plans: int, tally: Tally) -> int:
    """Random plans and routes, equal to the twin's or not; the number of those that are not."""
    families, number = FAMILIES[: scale.families], min(scale.plan_settings, plans)
    samples, together, differ = harness.Samples(), harness.Samples(), 0
    tell(f"parity of {plans} random plans")
    for index in progress(range(number), "parity"):
        family = families[index % len(families)]
        share = plans * (index + 1) // number - plans * index // number
        found = compare(family, share, scale.routed_rows, (2026, index))
        samples.add(family.case, found.values)
        together.add({"domains": "all"}, found.values)
        if found.differ:
            report.note(f"{found.differ} plans or routes differ: {found.setting}")
        differ += found.differ
    timed: Values = {
        PLANS: tally.plans,
        PLANS_EQUAL: tally.plans,
        ROUTES: tally.routes,
        ROUTES_EQUAL: tally.routes,
    }
    report.section = "parity"
    lines = [*samples.lines(), *together.lines(), Line({"domains": "as timed"}, timed)]
    report.add("plans and routes, equal to the twin's", lines)
    return differ


_BEGIN = time.perf_counter()


def tell(what: str) -> None:
    """What it is at, for those who wait."""
    print(f"{time.perf_counter() - _BEGIN:6.1f} s  {what}", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> None:
    """Run all sections, print their tables, and write their rows."""
    options = _options(argv[1:])
    gpu = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
    if not gpu and not options.toy:
        raise SystemExit("a GPU is needed; without one, only --toy runs (Triton's interpreter)")
    if not gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before a kernel is imported
    name = torch.cuda.get_device_name() if gpu else "Triton interpreter"
    torch.set_num_threads(1)  # for the twin; it has one thread anyway, but for maps
    report = Report("control", argv, device=f"{name}; host {harness.cpu_device()}")
    report.header()
    scale = TOY if options.toy else QUICK if options.quick else FULL
    sizes = options.sizes or scale.sizes
    plans = scale.plans if options.plans is None else options.plans
    clock: Clock = Gpu(scale.copied) if gpu else Interpreter()
    tally = Tally()
    all_stages(report, scale, sizes, clock, tally)
    if scale.detail in sizes:
        all_loads(report, scale, clock, tally)
    if isinstance(clock, Gpu):
        floors(report, clock, scale.copied)
    differ = parity(report, scale, plans, tally) if plans else 0
    tell("done")
    if options.json:
        report.write(options.json)
    if differ:
        raise SystemExit(f"{differ} plans or routes are not equal to the twin's")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    harness.common_options(parser)
    parser.add_argument("--sizes", type=_sizes, metavar="RxE,RxE", help="ranks x experts")
    parser.add_argument("--plans", type=int, metavar="N", help="random plans; 0: none")
    return parser.parse_args(arguments)


def _sizes(text: str) -> list[tuple[int, int]]:
    sizes = []
    for size in text.split(","):
        ranks, _, experts = size.partition("x")
        if not ranks.isdecimal() or not experts.isdecimal() or not int(ranks):
            raise argparse.ArgumentTypeError(f"want sizes like 8x128,64x256, got {size!r}")
        if not int(experts) or int(experts) % int(ranks):
            raise argparse.ArgumentTypeError(f"{experts} experts on {ranks} ranks: not even")
        sizes.append((int(ranks), int(experts)))
    return list(dict.fromkeys(sizes))


if __name__ == "__main__":
    main(sys.argv)
