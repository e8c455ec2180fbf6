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
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch
from control_parity import SMALL, Effort, parity
from control_stages import (
    KERNELS,
    MAP,
    STAGES,
    VERBS,
    WHOLE,
    Batch,
    Rig,
    Setting,
    Stage,
    Tally,
    draw,
    stages,
)
from harness import Bench, Line, Metric, Values, common_options
from load_cases import ORDERED, Kind, zipf_kinds
from timing import (
    REPLAYS,
    Call,
    Clock,
    Gpu,
    Host,
    captured,
    device_us,
    nothing,
    on_gpu,
    tell,
    time_call,
)

from ultraep import Plan

INNER = 20  # calls in one graph
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is measured."""

    sizes: tuple[tuple[int, int], ...]  # ranks and experts
    detail: tuple[int, int]  # the size at which loads and variants are measured
    kinds: tuple[Kind, ...]
    variants: tuple[dict[str, Any], ...]
    variant_stages: tuple[str, ...]
    tokens: int
    parity: Effort
    copied: int  # bytes of the copy that shows how fast memory is


FULL = Scale(
    sizes=((8, 128), (16, 128), (64, 256), (72, 288), (256, 1024), (1024, 4096)),
    detail=(64, 256),
    kinds=tuple(zipf_kinds((1.5, 3.0, 4.0))),
    variants=(
        {"slots": 2},
        {"tolerance": 0.01},
        {"objective": "time"},
        {"domain": 8},
        {"ids": "int32"},
        {"ids": MAP},
    ),
    variant_stages=(*VERBS, WHOLE),
    tokens=8192,
    parity=Effort(plans=10_000, settings=50, families=10, routed_rows=1 << 15),
    copied=1 << 30,
)
QUICK = replace(
    FULL,
    sizes=((8, 128), (64, 256)),
    kinds=tuple(zipf_kinds((3.0,))),
    variants=({"tolerance": 0.01}, {"objective": "time"}, {"ids": MAP}),
    parity=Effort(plans=50, settings=3, families=3, routed_rows=1 << 15),
)
TOY = Scale(
    sizes=((4, 8),),
    detail=(4, 8),
    kinds=(Kind(ORDERED, 2.0),),
    variants=({"slots": 2, "domain": 2, "tolerance": 0.01, "ids": "int32"}, {"ids": MAP}),
    variant_stages=VERBS,
    tokens=32,
    parity=Effort(plans=6, settings=6, families=SMALL, routed_rows=512),
    copied=1 << 26,
)


class InterpreterRun:
    """A stage in Triton's interpreter, timed by the host's clock whenever it is repeated."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.values: Values = {}

    def replay(self) -> Any:
        """Once more, with whatever the inputs hold then; what the call returned."""
        begin = time.perf_counter()
        launches, result = launches_of(self._stage.call)
        self.values = {LAUNCHES: launches, WALL: 1e6 * (time.perf_counter() - begin)}
        return result


class GraphRun:
    """A captured graph of `INNER` calls, and the times of graph, eager calls and twin.

    rate: bytes per second, read and written, of a copy within the device.
    """

    def __init__(self, stage: Stage, gpu: Gpu, rate: float, twin_repeats: int) -> None:
        launches, _ = launches_of(stage.call)
        self._graph, self._result = captured(stage.call, INNER)
        graph_us = gpu.replay_us(self._graph, INNER)
        floor = gpu.floor_us(launches, INNER)
        moved = 1e6 * stage.moved / rate if stage.moved else None
        twin = time_call(stage.twin, twin_repeats, warmup=1).p50 if stage.twin else None
        eager = device_us(stage.call, REPLAYS, warmup=1, before=torch.cuda.synchronize)
        self.values: Values = {
            LAUNCHES: launches,
            GRAPH: graph_us,
            EAGER: eager,
            FLOOR: floor,
            OVER_FLOOR: graph_us / floor,
            MOVED: stage.moved / 1e6 if stage.moved else None,
            BYTES: moved,
            OVER_BYTES: graph_us / moved if moved else None,
            TWIN: 1e6 * twin if twin else None,
        }

    def replay(self) -> Any:
        """Once more; what the call returned, overwritten."""
        self._graph.replay()
        return self._result


def copy_rate(size: int) -> float:
    """Bytes per second of a copy within the device, read and written."""
    source = torch.zeros(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2e6 * size / device_us(partial(target.copy_, source), REPLAYS, warmup=3)


def launches_of(call: Callable[[], Any]) -> tuple[int, Any]:
    """Kernels of this project that the call launches, and what it returns."""
    launches: list[None] = []
    with told_of_launches(lambda *_, **__: launches.append(None)):
        result = call()
    return len(launches), result


@contextmanager
def told_of_launches(hook: Callable[..., None]) -> Iterator[None]:
    """Every kernel of this project calls the hook before it runs."""
    from ultraep.backends.triton import kernels

    modules = [
        import_module(f"{kernels.__name__}.{m.name}") for m in iter_modules(kernels.__path__)
    ]
    found = {id(k): k for m in modules for k in vars(m).values() if hasattr(k, "pre_run_hooks")}
    for kernel in found.values():
        kernel.add_pre_run_hook(hook)
    try:
        yield
    finally:
        for kernel in found.values():
            kernel.pre_run_hooks.remove(hook)


@dataclass(slots=True)
class Measured:
    """A setting: how long until its first results, the twin's plan, and the times of its stages."""

    first: Values
    plan: Plan
    stages: dict[str, Values]


class Control:
    """Measures settings, and counts what was compared with the twin meanwhile."""

    def __init__(self, bench: Bench) -> None:
        self.report, self.scale, self.clock = bench.report, bench.scale, bench.clock
        self.table, self.tally = bench.table, Tally()
        self.rate = copy_rate(bench.scale.copied) if isinstance(bench.clock, Gpu) else 0.0

    def start(self, stage: Stage, twin_repeats: int) -> InterpreterRun | GraphRun:
        if isinstance(self.clock, Host):
            return InterpreterRun(stage)
        return GraphRun(stage, self.clock, self.rate, twin_repeats)

    def measure(self, setting: Setting, names: Sequence[str]) -> Measured:
        """Compare with the twin, time the stages, and compare again while loads and ids change."""
        batch, other = (draw(setting, self.scale.tokens, seed) for seed in (0, 1))
        rig = Rig(setting, batch, self.tally)
        first = self._first(rig, batch)
        repeats = 20 if setting.ranks <= 64 else 5
        runs = {stage.name: self.start(stage, repeats) for stage in stages(rig, batch, names)}
        ways = [way for way in (KERNELS, VERBS, (WHOLE,)) if all(name in runs for name in way)]
        for turn, way in enumerate(ways):
            now = batch if turn % 2 else other
            rig.put(now)
            result = None
            for name in way:
                result = runs[name].replay()
            rig.check(now, result)
        return Measured(first, batch.plan, {name: run.values for name, run in runs.items()})

    def _first(self, rig: Rig, batch: Batch) -> Values:
        """Seconds until kernels are compiled and have run once; and whether they are right."""
        wait: Call = torch.cuda.synchronize if isinstance(self.clock, Gpu) else nothing
        wait()
        begin = time.perf_counter()
        rig.plan()
        wait()
        planned = time.perf_counter() - begin
        if isinstance(self.clock, Host):  # it is slow, and compares every call later on
            return {FIRST_PLAN: planned}
        begin = time.perf_counter()
        rig.count()
        result = rig.reroute()
        wait()
        routed = time.perf_counter() - begin
        rig.check(batch, result)
        return {FIRST_PLAN: planned, FIRST_ROUTES: routed}

    def stages(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Every stage at every size, then the variants; and how long the first plans take."""
        scale, compiled = self.scale, []
        self.report.section = "stages"
        for ranks, experts in sizes:
            measured = self._stages_of(Setting(ranks=ranks, experts=experts), STAGES)
            compiled.append(Line({"ranks": ranks, "experts": experts}, measured.first))
        ranks, experts = scale.detail
        for variant in scale.variants if scale.detail in sizes else ():
            setting = Setting(ranks=ranks, experts=experts, **variant)
            self._stages_of(setting, scale.variant_stages)
        if isinstance(self.clock, Gpu):
            self.report.note(
                "graph: a call inside a CUDA graph; eager: launched one by one; floor: as many\n"
                "kernels that do nothing; bytes: a copy of as many; CPU: the twin, one core."
            )
        self.report.section = "compile"
        self.table("first call of every size", compiled)

    def _stages_of(self, setting: Setting, names: Sequence[str]) -> Measured:
        tell(f"stages of {setting}")
        measured = self.measure(setting, names)
        of_stage = measured.stages.items()
        self.table("stages", [Line(setting.case | {"stage": s}, v) for s, v in of_stage])
        return measured

    def loads(self) -> None:
        """Time and imbalance of the plans for every load."""
        ranks, experts = self.scale.detail
        lines, shown = [], (LAUNCHES, GRAPH, EAGER, OVER_FLOOR, TWIN, WALL)
        for kind in self.scale.kinds:
            tell(f"plans for {kind.name}")
            setting = Setting(ranks=ranks, experts=experts, kind=kind)
            measured = self.measure(setting, VERBS)
            values: dict[Metric, float | None] = {
                BEFORE: measured.plan.initial_imbalance,
                AFTER: measured.plan.imbalance,
                BOUND: measured.plan.lower_bound,
                COPIES: measured.plan.num_replicas,
            }
            times = {m: v for m, v in measured.stages["plan"].items() if m in shown}
            lines.append(Line(setting.case, values | times))
        self.report.section = "loads"
        self.table("plans", lines)

    def floors(self, gpu: Gpu) -> None:
        """What was measured to compare with."""
        self.report.section = "floor"
        launched = sorted(gpu.floors.items())
        self.table(
            "kernels that do nothing, in a graph",
            [Line({"launches": n}, {FLOOR: floor, NODE: floor / n}) for n, floor in launched],
        )
        case = {"copied MB": self.scale.copied >> 20}
        self.table("copy within the device", [Line(case, {RATE: self.rate / 1e9})])


def main(argv: Sequence[str]) -> None:
    """Run all sections, print their tables, and write their rows."""
    options = _options(argv[1:])
    clock: Clock = Gpu() if on_gpu(toy=options.toy) else Host()
    torch.set_num_threads(1)  # for the twin; it has one thread anyway, but for maps
    scale = TOY if options.toy else QUICK if options.quick else FULL
    bench = Bench.of("control", argv, scale, clock, options.json)
    sizes = options.sizes or scale.sizes
    control = Control(bench)
    control.stages(sizes)
    if scale.detail in sizes:
        control.loads()
    if isinstance(clock, Gpu):
        control.floors(clock)
    plans = scale.parity.plans if options.plans is None else options.plans
    effort = replace(scale.parity, plans=plans)
    differ = parity(bench.report, effort, control.tally) if plans else 0
    tell("done")
    bench.report.write(options.json)
    if differ:
        raise SystemExit(f"{differ} plans or routes are not equal to the twin's")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    common_options(parser)
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
