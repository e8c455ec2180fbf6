"""The planner kernel of the public UltraEP release beside ours, in one program on the same loads.

    python benchmarks/bench_public.py --public FOLDER    # a GPU, nvcc; four minutes
    python benchmarks/bench_public.py --public FOLDER --trace FILE    # also recorded routing
    python benchmarks/bench_public.py --toy              # our side, tiny; also without a GPU

FOLDER is a checkout of the release. Its planner is compiled as its own build does, with the
defaults of its manager. Without `--public`, only our side runs.

Both sides get the same loads in GPU memory, and are timed in the same two ways: per call in a
graph of 20 calls, with everything that a call queues, and by torch's profiler, kernels alone. Our
plans include the rows from every source rank; the public kernel computes them for one source rank.
Before the timing, our plan is compared with the CPU's. `as quota` is the share of loads on which
the public kernel plans the rank loads of our reimplementation of it.

Shapes: R ranks, E experts.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from harness import KERNELS, Bench, Metric, Mismatch, Samples, main
from torch.profiler import ProfilerActivity, profile

import ultraep
from ultraep import BalanceConfig, Rates, Topology, workload
from ultraep.arrays import IntArray
from ultraep.runtime.device_planner import DevicePlanner

PLANNER = "csrc/kernels/placement.cu"
PUBLIC = "public kernel"
INNER = 20  # plans per graph
OURS = {
    "ours, balance": BalanceConfig(objective="balance"),
    "ours, by time": BalanceConfig(rates=Rates(row=5300, copy=4_100_000, layer=1_200_000)),
}
PROFILED = 10  # calls
COUNT = Metric("loads", "loads", "n", ".0f", sum)
BEFORE = Metric("imbalance_before", "max/mean", "before", ".3f")
PLANNED = Metric("imbalance_planned", "max/mean", "planned", ".4f")
SERVED = Metric("imbalance_served", "max/mean", "served", ".4f")
WORST = Metric("imbalance_served_worst", "max/mean", "worst", ".4f", max)
REPLICAS = Metric("replicas", "replicas", "replicas", ".1f")
CALL = Metric("call_time", "us", "call us", ".1f")
SLOWEST = Metric("call_time_max", "us", "slowest", ".1f", max)
KERNEL = Metric("kernel_time", "us", "kernel us", ".1f")
AS_QUOTA = Metric("equal_to_reimplementation", "share", "as quota", ".2f")


def check_plan(control: DevicePlanner, loads_RE: torch.Tensor, wanted: ultraep.Plan) -> None:
    """Raise unless the device makes the plan of the CPU."""
    plan = control.plan(loads_RE).to_host()
    control.check()
    same_loads = np.array_equal(plan.rank_loads, wanted.rank_loads)
    if plan.digest() != wanted.digest() or not same_loads:
        raise Mismatch(f"the plan for {wanted.topology}, {wanted.config}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """What one run measures."""

    sizes: tuple[tuple[int, int, int], ...]  # ranks, experts, slots
    imbalances: tuple[float, ...] = workload.IMBALANCES
    tokens: int = 8192  # per rank
    window: int = 4096  # tokens of a recorded microbatch
    every: int = 8  # so many recorded microbatches, one is planned
    rounds: int = 15
    kinds: tuple[str, ...] = tuple(workload.KINDS)
    ours: tuple[str, ...] = tuple(OURS)
    public: Path | None = None  # checkout
    trace: Path | None = None


FULL = Scale(sizes=((8, 128, 1), (8, 128, 2), (64, 256, 1), (64, 256, 2)))
QUICK = replace(FULL, sizes=((8, 128, 1), (64, 256, 2)), imbalances=(1.5, 3.0), every=40)
TOY = Scale(
    sizes=((2, 8, 1),),
    imbalances=(1.5,),
    tokens=16,
    window=64,
    rounds=1,
    kinds=("even", "adversarial", "hot rank"),
    ours=("ours, balance",),
)


class PublicPlanner:
    """The public planner for one topology, with its six output tables."""

    def __init__(self, library: ctypes.CDLL, topology: Topology, device: torch.device) -> None:
        ranks, experts = topology.ranks, topology.experts
        self.topology, self._plan = topology, library.plan
        self._plan.restype = ctypes.c_char_p
        self.hosts = experts // ranks + topology.slots  # physical experts of a rank
        shapes = [(ranks * self.hosts,), (experts, ranks), (experts,), *[(experts, ranks)] * 3]
        tables = [torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes]
        _, self.places, self.counts, self.quotas, _, self.prefix = tables
        self._tables = (ctypes.c_void_p * 6)(*(table.data_ptr() for table in tables))
        self._kept = tables

    def plan(self, loads_RE: torch.Tensor, loads_E: torch.Tensor, source: int = 0) -> None:
        """Queue a plan, and the rows of one source rank for every instance of an expert."""
        loads = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (loads_E, loads_RE)]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        sizes = self.topology.experts, self.topology.ranks, self.topology.slots, source
        message = self._plan(*loads, self._tables, stream, *sizes)
        if message is not None:
            raise Mismatch(f"the public planner: {message.decode()}")

    def result(self, loads_RE: torch.Tensor, loads_E: torch.Tensor) -> tuple[IntArray, IntArray]:
        """[R] rows that every rank should serve, and that it does serve, by the split of sources.

        Every source rank rounds its own split, so the two differ.
        """
        prefixes = []
        for source in range(self.topology.ranks):
            self.plan(loads_RE, loads_E, source)
            prefixes.append(self.prefix.cpu().numpy())
        places, quotas = self.places.cpu().numpy() // self.hosts, self.quotas.cpu().numpy()
        quotas = np.where(places < 0, 0, quotas)
        if not np.array_equal(quotas.sum(axis=1), loads_E.cpu()):
            raise Mismatch("the public quotas do not add up to the loads")
        splits = np.diff(np.stack(prefixes), axis=2, prepend=0)
        return rank_rows(places, quotas), rank_rows(places, np.where(places < 0, 0, splits).sum(0))


def rank_rows(places: IntArray, rows: IntArray) -> IntArray:
    """[R] rows by rank, from tables [E, R] of the instances' ranks, below 0 for none, and rows.

    >>> rank_rows(np.array([[0, 1], [1, -1]]), np.array([[3, 4], [5, 0]]))
    array([3, 9])
    """
    valid = places >= 0
    counts = np.bincount(places[valid], rows[valid], minlength=places.shape[1])
    return counts.astype(np.int64)


def build(checkout: Path, folder: Path) -> ctypes.CDLL:
    """Compile the planner of a checkout with our binding, with the flags of its setup.py."""
    if not (checkout / PLANNER).is_file():
        raise Mismatch(f"{checkout} has no {PLANNER}; pass a checkout of the public release")
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise Mismatch("nvcc was not found on PATH")
    major, minor = torch.cuda.get_device_capability()
    library = folder / "planner.so"
    sources = [Path(__file__).with_name("public_binding.cu"), checkout / PLANNER]
    flags = ["-O3", "-std=c++17", "-rdc=true", "--ptxas-options=--register-usage-level=10"]
    flags += ["-DDISABLE_AGGRESSIVE_PTX_INSTRS", f"-arch=sm_{major}{minor}", "-shared"]
    flags += ["-Xcompiler", "-fPIC", "-I", str(checkout / "csrc")]
    flags += ["-I", str(Path(nvcc).resolve().parent.parent / "include" / "cccl")]
    command = [nvcc, *flags, *map(str, sources), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Mismatch(f"{nvcc} failed: {done.stderr.strip()[-500:]}")
    return ctypes.CDLL(str(library))


def kernel_us(call: Callable[[], object]) -> float | None:
    """Microseconds of all kernels of a call by the profiler; None if it reports no kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(PROFILED):
            call()
        torch.cuda.synchronize()
    events = [event for event in recorded.events() if event.device_type.name == "CUDA"]
    kernels = [event for event in events if not event.name.startswith("Mem")]
    us = sum(event.time_range.elapsed_us() for event in kernels)
    return us / PROFILED if kernels else None


def named_loads(scale: Scale, ranks: int, experts: int) -> Iterator[tuple[str, IntArray]]:
    """Group and [R, E] loads: swept kinds grouped by imbalance, the others by name."""
    top_k = min(8, experts // 4)
    sweep = partial(workload.sweep, kinds=scale.kinds, imbalances=scale.imbalances)
    for load in sweep(ranks, experts, top_k=top_k):
        group = load.kind if load.imbalance is None else f"imbalance {load.imbalance:g}"
        # Of one or two choices, the adversarial expert can get half of all rows.
        choices = min(top_k, 2) if load.kind == "adversarial" else top_k
        yield group, load.draw(ranks, experts, top_k=choices, tokens=scale.tokens)


def recorded(scale: Scale, path: Path, ranks: int) -> list[IntArray]:
    """[R, E] loads of some layers and windows of recorded routing."""
    texts = workload.recorded_loads(path, ranks=ranks, tokens=scale.window)
    return [loads for text in texts for loads in text.reshape(-1, *text.shape[2:])][:: scale.every]


class Contest:
    """All planners for one topology: timed calls, and their plans."""

    def __init__(self, bench: Bench, topology: Topology, library: ctypes.CDLL | None) -> None:
        self.topology, self._bench = topology, bench
        self._ours = {
            name: DevicePlanner(topology, OURS[name], rows=1) for name in bench.scale.ours
        }
        device = next(iter(self._ours.values())).device
        shape = topology.ranks, topology.experts
        self._loads_RE = torch.ones(shape, dtype=torch.int32, device=device)
        self._loads_E = self._loads_RE.sum(0, dtype=torch.int32)
        calls: dict[str, Callable[[], object]] = {
            name: partial(planner.plan, self._loads_RE) for name, planner in self._ours.items()
        }
        self._public = None
        if library is not None:
            self._public = PublicPlanner(library, topology, device)
            calls[PUBLIC] = partial(self._public.plan, self._loads_RE, self._loads_E)
        self._calls = calls
        self._watches = {name: bench.clock.stopwatch(call, INNER) for name, call in calls.items()}

    def measure(self, loads: IntArray) -> dict[str, dict[Metric, float | None]]:
        """Plan these loads with every planner."""
        self._loads_RE.copy_(torch.from_numpy(loads))
        self._loads_E.copy_(self._loads_RE.sum(0))
        values = {name: self._of_ours(name, loads) for name in self._ours}
        if self._public is not None:
            values[PUBLIC] = self._of_public(self._public, loads)
        for name, watch in self._watches.items():
            us = watch()
            kernel = kernel_us(self._calls[name]) if self._bench.on_gpu else None
            values[name] |= {CALL: us, SLOWEST: us, KERNEL: kernel}
        return values

    def _of_ours(self, name: str, loads: IntArray) -> dict[Metric, float | None]:
        plan = ultraep.plan(loads, self.topology, OURS[name], backend="cpu")
        check_plan(self._ours[name], self._loads_RE, plan)
        return _values(loads, plan.rank_loads, plan.rank_loads, plan.num_replicas)

    def _of_public(self, public: PublicPlanner, loads: IntArray) -> dict[Metric, float | None]:
        planned, served = public.result(self._loads_RE, self._loads_E)
        if not planned.sum() == served.sum() == loads.sum():
            raise Mismatch(f"the public plan serves {served.sum()} of {loads.sum()} rows")
        config = BalanceConfig(policy="quota", min_tokens_per_replica=1024)
        quota = ultraep.plan(loads, self.topology, config)
        replicas = int((public.counts.cpu() - 1).sum())
        equal = float(np.array_equal(quota.rank_loads, planned))
        return _values(loads, planned, served, replicas) | {AS_QUOTA: equal}


def _values(
    loads: IntArray, planned: IntArray, served: IntArray, replicas: int
) -> dict[Metric, float | None]:
    homes = loads.sum(axis=0).reshape(len(loads), -1).sum(axis=1)
    imbalance = float(served.max() / served.mean())
    return {
        COUNT: 1,
        BEFORE: float(homes.max() / homes.mean()),
        PLANNED: float(planned.max() / planned.mean()),
        SERVED: imbalance,
        WORST: imbalance,
        REPLICAS: float(replicas),
        AS_QUOTA: None,
    }


def plans(bench: Bench) -> None:
    """Measure all sizes and loads."""
    scale, library = bench.scale, None
    with tempfile.TemporaryDirectory() as folder:
        if scale.public is not None:
            if not bench.on_gpu:
                raise Mismatch("--public needs a GPU")
            library = build(scale.public, Path(folder))
        for ranks, experts, slots in scale.sizes:
            loads = list(named_loads(scale, ranks, experts))
            compare(bench, Topology(ranks=ranks, experts=experts, slots=slots), loads, library)
        if scale.trace is not None:
            for ranks in dict.fromkeys(size[0] for size in scale.sizes if size[0] <= 16):
                matrices = recorded(scale, scale.trace, ranks)
                topology = Topology(ranks=ranks, experts=matrices[0].shape[1])
                compare(bench, topology, [("recorded", loads) for loads in matrices], library)


def compare(
    bench: Bench, topology: Topology, loads: list[tuple[str, IntArray]], library: ctypes.CDLL | None
) -> None:
    """Measure all planners on these loads and print the table of a topology."""
    contest, samples = Contest(bench, topology, library), Samples()
    for group, matrix in loads:
        for planner, values in contest.measure(matrix).items():
            sizes = {"ranks": topology.ranks, "experts": topology.experts}
            samples.add(
                {**sizes, "slots": topology.slots, "load": group, "planner": planner}, values
            )
    bench.table("plans", samples.lines())


if __name__ == "__main__":
    options = {
        "public": (Path, "checkout of the public UltraEP release"),
        "trace": (Path, "recorded routing: .npz with arrays *_ids [tokens, layers, top_k]"),
    }
    scales = {"toy": TOY, "quick": QUICK, "full": FULL}
    main("public", __doc__, {"plans": plans}, scales, needs=KERNELS, extra=options)
