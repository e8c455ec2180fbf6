"""The control plane on a GPU, from ids to routes: microseconds of every stage.

    python benchmarks/bench_control.py                         # needs a GPU; a minute
    python benchmarks/bench_control.py --toy                   # tiny, for CI; also without a GPU

Every stage is timed inside a CUDA graph, and launched eagerly. The floor is a graph of the same
number of empty kernels. The graphs are then replayed with other loads and ids, and plans and routes
are compared bit by bit with the CPU backend. `benchmarks/README.md` explains the tables.

Shapes: T tokens of a rank, K experts per token, R ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import numpy as np
import torch
from harness import KERNELS, Bench, Case, Line, Metric, Mismatch, Values, main
from timing import REPLAYS, Gpu, captured, device_us, time_call

import ultraep
from ultraep import BalanceConfig, Plan, Topology
from ultraep.arrays import PADDING, IntArray
from ultraep.reroute import Routes, reroute
from ultraep.runtime.device_plan import DeviceRoutes
from ultraep.runtime.device_planner import DevicePlanner
from ultraep.workload import Load

INNER = 20  # calls per graph
SIZES = ((8, 128), (16, 128), (64, 256), (72, 288), (256, 1024), (1024, 4096))  # ranks, experts
VARIANTS: tuple[dict[str, Any], ...] = (
    *({"slots": 2}, {"tolerance": 0.01}, {"domain": 8}, {"ids": "int32"}),
)
WHOLE = "counts to routes"
VERBS = ("count", "plan", "reroute")
KERNEL_STAGES = ("count", "sum", "place", "split", "lines", "assign", "receive")
LAUNCHES = Metric("launches", "kernels", "launches", ".0f")
GRAPH = Metric("graph_time_p50", "us", "graph us", ".2f")
EAGER = Metric("eager_time_p50", "us", "eager us", ".1f")
FLOOR = Metric("launch_floor", "us", "floor us", ".2f")
OVER_FLOOR = Metric("times_launch_floor", "ratio", "x floor", ".2f")
WALL = Metric("interpreter_time", "us", "interpreter us", ".0f")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A topology and config of a control plane, and its microbatches."""

    ranks: int
    experts: int
    slots: int = 1
    domain: int | None = None
    tolerance: float = 0.0
    ids: str = "int64"
    load: Load

    @property
    def topology(self) -> Topology:
        return Topology(
            ranks=self.ranks, experts=self.experts, slots=self.slots, domain=self.domain
        )

    @property
    def config(self) -> BalanceConfig:
        return BalanceConfig(tolerance=self.tolerance, objective="balance")

    @property
    def case(self) -> Case:
        names = ("ranks", "experts", "slots", "domain", "tolerance", "ids")
        case = {name: getattr(self, name) for name in names} | {"load": self.load.name}
        return case | {"domain": self.domain or self.ranks, "objective": "balance"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """What one run measures."""

    sizes: tuple[tuple[int, int], ...] = SIZES
    detail: tuple[int, int] = (64, 256)  # the size at which variants are measured
    variants: tuple[dict[str, Any], ...] = VARIANTS
    stages: tuple[str, ...] = (*KERNEL_STAGES, "plan", "reroute", WHOLE)
    load: Load = Load("zipf shuffled", 3.0)  # noqa: RUF009  frozen
    tokens: int = 8192


TOY = Scale(
    sizes=((2, 4),),
    detail=(2, 4),
    variants=(),
    stages=KERNEL_STAGES,
    load=Load("zipf shuffled", 1.5),
    tokens=16,
)


@dataclass(frozen=True, slots=True)
class Batch:
    """A microbatch on the host, with plan and routes of the CPU backend."""

    loads: IntArray  # [R, E]
    ids: torch.Tensor  # [T, K] of rank 0
    plan: Plan
    routes: Routes


def draw(setting: Setting, tokens: int, seed: int) -> Batch:
    """Draw loads of all ranks, and ids of rank 0 with its loads."""
    top_k = min(8, max(1, setting.experts // 8))
    loads = setting.load.draw(setting.ranks, setting.experts, top_k=top_k, tokens=tokens, seed=seed)
    plan = ultraep.plan(loads, setting.topology, setting.config, backend="cpu")
    rng = np.random.default_rng(seed)
    rows = rng.permutation(np.repeat(np.arange(setting.experts), loads[0])).reshape(tokens, -1)
    ids = torch.from_numpy(rows).to(getattr(torch, setting.ids))
    return Batch(loads, ids, plan, reroute(ids, plan, 0, backend="cpu"))


class Rig:
    """The control plane of rank 0 and its input tensors, which `put` overwrites."""

    def __init__(self, setting: Setting, batch: Batch) -> None:
        self.setting = setting
        self.control = DevicePlanner(setting.topology, setting.config, rows=batch.ids.numel())
        self.loads = torch.from_numpy(batch.loads).to(self.control.device, torch.int32)
        self.ids = batch.ids.to(self.control.device, copy=True)

    def put(self, batch: Batch) -> None:
        """Overwrite loads and ids in place."""
        self.loads.copy_(torch.from_numpy(batch.loads))
        self.ids.copy_(batch.ids)

    def whole(self) -> DeviceRoutes:
        """Everything between the router and dispatch, except the all-gather of the counts."""
        self.control.count(self.ids)
        self.control.plan(self.loads)
        return self.control.reroute(self.ids, counted=True)

    def stages(self, routes: DeviceRoutes) -> dict[str, Callable[[], object]]:
        """The timed calls: single kernels, count, plan and reroute, and all together.

        routes: memory that the single kernels write.
        """
        control, loads, ids = self.control, self.loads, self.ids
        planner, rerouter = control._planner, control._rerouter
        assign = partial(rerouter.assign, ids, routes.slots, routes.order, routes.positions)
        return {
            "count": partial(control.count, ids),
            "sum": partial(planner.sum, loads),
            "place": planner.place,
            "split": partial(planner.lay_out, loads),
            "plan": partial(control.plan, loads),
            "lines": partial(rerouter.lines, loads, 0),
            "assign": assign,
            "receive": partial(rerouter.receive, loads, 0, routes.receive_counts),
            "reroute": partial(control.reroute, ids, counted=True),
            WHOLE: self.whole,
        }

    def check(self, batch: Batch, routes: DeviceRoutes) -> None:
        """Raise unless counts, plan and routes on the device equal the CPU backend."""
        self.control.check()
        counts = self.control._counter.totals[:-1].cpu().numpy()
        plan = self.control._last_plan().to_host()
        same = {
            "counts": np.array_equal(counts, batch.loads[0]),
            "plan": plan.digest() == batch.plan.digest()
            and np.array_equal(plan.rank_loads, batch.plan.rank_loads),
            "routes": same_routes(routes, batch.routes),
        }
        if wrong := [name for name, equal in same.items() if not equal]:
            raise Mismatch(f"{', '.join(wrong)} of {self.setting}")


def same_routes(got: DeviceRoutes, want: Routes) -> bool:
    """Whether all parts are equal and nothing is written behind the last row."""
    order, rows = got.order.cpu().long(), len(want.order)
    positions = torch.full((want.num_rows,), PADDING)
    positions[want.order] = torch.arange(rows)
    return (
        torch.equal(got.slots.cpu().long(), want.slots)
        and torch.equal(order[:rows], want.order)
        and bool((order[rows:] == PADDING).all())
        and torch.equal(got.positions.cpu().long(), positions)
        and np.array_equal(got.rows_of_slot.cpu().numpy(), want.rows_of_slot)
        and got.send_counts.tolist() == want.send_counts
        and np.array_equal(got.receive_counts.cpu().numpy(), want.receive_counts)
    )


@contextmanager
def launch_hook(hook: Callable[..., None]) -> Iterator[None]:
    """Call the hook before every kernel of this project."""
    from ultraep.backends.triton import kernels

    modules = [
        import_module(f"{kernels.__name__}.{m.name}") for m in iter_modules(kernels.__path__)
    ]
    launched = {id(k): k for m in modules for k in vars(m).values() if hasattr(k, "pre_run_hooks")}
    for kernel in launched.values():
        kernel.add_pre_run_hook(hook)
    try:
        yield
    finally:
        for kernel in launched.values():
            kernel.pre_run_hooks.remove(hook)


def timed(bench: Bench, call: Callable[[], object]) -> tuple[Callable[[], object], Values]:
    """Return a function that runs the stage again with the current inputs, and its times.

    The function returns the result of the stage, which a graph writes in place.
    """
    launched: list[None] = []
    with launch_hook(lambda *_, **__: launched.append(None)):
        wall = time_call(call, 1, 0).p50
    launches = len(launched)
    if not isinstance(bench.clock, Gpu):
        return call, {LAUNCHES: launches, WALL: 1e6 * wall}
    graph, result = captured(call, INNER)
    us, floor = bench.clock.replay_us(graph, INNER), bench.clock.floor_us(launches, INNER)
    eager = device_us(call, REPLAYS, warmup=1, before=torch.cuda.synchronize)

    def replay() -> object:
        graph.replay()
        return result

    return replay, {
        LAUNCHES: launches,
        GRAPH: us,
        EAGER: eager,
        FLOOR: floor,
        OVER_FLOOR: us / floor,
    }


def measure(bench: Bench, setting: Setting, names: Sequence[str]) -> dict[str, Values]:
    """Time the stages, then compare with the CPU backend for changing loads and ids."""
    batch, other = (draw(setting, bench.scale.tokens, seed) for seed in (0, 1))
    rig = Rig(setting, batch)
    written = rig.whole()
    rig.check(batch, written)
    stages = rig.stages(written)
    runs = {name: timed(bench, stages[name]) for name in stages if name in names}
    ways = (KERNEL_STAGES, VERBS, (WHOLE,))
    for turn, way in enumerate(way for way in ways if all(name in runs for name in way)):
        now = batch if turn % 2 else other
        rig.put(now)
        results = [runs[name][0]() for name in way]
        routes = results[-1]  # None: of single kernels
        rig.check(now, routes if isinstance(routes, DeviceRoutes) else written)
    return {name: values for name, (_, values) in runs.items()}


def stages(bench: Bench) -> None:
    """Measure every stage at every size, then the variants."""
    scale: Scale = bench.scale
    settings = [
        (Setting(ranks=r, experts=e, load=scale.load), scale.stages) for r, e in scale.sizes
    ]
    if scale.detail in scale.sizes:
        ranks, experts = scale.detail
        for variant in scale.variants:
            changed = Setting(ranks=ranks, experts=experts, load=scale.load, **variant)
            settings.append((changed, (*VERBS, WHOLE)))
    for setting, names in settings:
        measured = measure(bench, setting, names)
        lines = [Line({**setting.case, "stage": stage}, v) for stage, v in measured.items()]
        bench.table("stages", lines)


if __name__ == "__main__":
    scales = {"toy": TOY, "quick": Scale(sizes=SIZES[:4]), "full": Scale()}
    main("control", __doc__, {"stages": stages}, scales, needs=KERNELS)
