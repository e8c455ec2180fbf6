"""A rank that is slower than the others: balance of rows, learnt speeds, and the ideal split.

    python benchmarks/bench_speeds.py               # two and four CPU processes, one core slowed
    python benchmarks/bench_speeds.py --only equal  # 10,000 microbatches of equal ranks
    python benchmarks/bench_speeds.py --gpu         # eight processes on one GPU, with CUDA MPS
    python benchmarks/bench_speeds.py --gpu --slow stream
    python benchmarks/bench_speeds.py --toy         # two CPU processes, tiny, for CI

`straggler`: a process with a lower priority competes for the core of the last rank. On a GPU, the
last rank has a smaller share of the multiprocessors (`--slow share`), or a thread of the rank runs
products on another stream (`--slow stream`). Ranks learn their speeds with `speeds="auto"`. Then
three variants alternate: equal rows, the learnt speeds, and fixed speeds that follow from the
measured time per row of every rank. The last one is the ideal split. At the end the cause ends, if
it can, and the ranks forget their speeds. `probe`, on a GPU: the multiprocessors of every rank,
products on all ranks at once, and barriers through mapped memory. Every phase prints its name, and
a rank that exceeds the limit of a phase prints its stack and ends the run. `equal` counts how often
the speeds of equal ranks change; they are not bound to cores, so other programs slow down both.
`cost` is the CPU time of learning in a microbatch, beside the time of the step in the same run.

Shapes: T tokens of a rank, R ranks.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import Line, Metric, Report, comma_list, options_parser
from layers import FixedRouter, drawn_weights, layer_with_weights, on_ranks, slowest
from load_cases import HotRank, Shape, ids_with
from mps import device_of_rank, phase, report_of_ranks
from timing import in_turns, print_progress

import ultraep
from ultraep import BalanceConfig, Plan
from ultraep.passes import Passes, PassRecord
from ultraep.runtime.cost import CostModel
from ultraep.runtime.speeds import BLOCK, Speeds

ROWS, LEARNT, IDEAL = "equal rows", 'speeds="auto"', "ideal split"
MS = Metric("step_time_p50", "ms", "ms", ".2f")
OVER = Metric("step_time_over_ideal", "ratio", "over ideal", ".3f")
GAIN = Metric("gain_over_equal_rows", "ratio", "over equal rows", ".3f")
SPEED = Metric("speed_of_the_slowest_rank", "thousandths", "slowest rank", ".0f")
MICROBATCHES = Metric("microbatches", "microbatches", "microbatches", ".0f")
CHANGES = Metric("changes_of_speeds", "changes", "changes", ".0f")
P99 = Metric("step_time_p99", "ms", "p99 ms", ".1f")
MINUTES = Metric("duration", "minutes", "minutes", ".1f")
COST = Metric("time_of_learning", "us", "us per microbatch", ".2f")
SHARE = Metric("share_of_a_step", "share", "of a step", ".5f")
PRODUCT = Metric("product_time_p50", "ms", "product ms", ".2f")
SMS = Metric("multiprocessors", "multiprocessors", "multiprocessors", ".0f")
BARRIER = Metric("barrier_time", "us", "barrier us", ".1f")
SECTIONS = ("probe", "straggler", "equal", "cost")
HOOKS = ("report", "gathered", "add")
USUAL, USUAL_GPU = SECTIONS[1:], SECTIONS[:2]
CORE, SHARED, STREAM = "core", "share", "stream"  # where the last rank is slowed
SIDE, PRODUCTS, BARRIERS = 4096, 10, 200  # of the probe
SPARE = 20.0  # seconds to end all processes
COMPETE = "import os, sys\nos.nice(int(sys.argv[1]))\nwhile True:\n    pass"


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """A layer, how one rank is slowed down, and how long the ranks learn."""

    hidden: int = 1024
    ffn: int = 512
    experts: int = 16
    top_k: int = 2
    tokens: int = 512
    ranks: int = 2
    layers: int = 1
    ratio: float = 1.3  # imbalance of the loads
    slow: str = CORE
    nice: int = 6  # of the competing process
    percentage: int = 9  # of the multiprocessors, for the last rank; the others have an equal share
    most: int = 400  # microbatches until speeds must be found, and forgotten
    rounds: int = 9
    steps: int = 3  # timed together
    quiet: int = 10_000  # microbatches of equal ranks


CPU_SIZES = (Size(), Size(ranks=4, tokens=256, nice=3))
CARD = Size(
    hidden=4096,
    ffn=1536,
    experts=128,
    top_k=8,
    tokens=4096,
    ranks=8,
    layers=6,
    rounds=7,
    steps=2,
    slow=SHARED,
)
LIMIT = 190.0  # seconds of a run on a GPU
TOY = Size(hidden=16, ffn=16, tokens=32, most=3, rounds=1, steps=1, quiet=3)


class Variants:
    """The layer of one rank with every config, with the same weights, tokens and routing."""

    def __init__(self, size: Size, rank: int, device: torch.device) -> None:
        self.size, self.rank, self.device = size, rank, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        draw = torch.Generator().manual_seed(rank)
        x = torch.randn(size.tokens, size.hidden, generator=draw)
        self.x = x.to(device, self.dtype)
        ids = ids_with(HotRank(size.ratio).draw(size)[rank], size, seed=rank).to(device)
        gates = torch.full(ids.shape, 1 / size.top_k, device=device, dtype=self.dtype)
        self.router = FixedRouter(ids, gates)
        homes = size.experts // size.ranks
        home_experts = list(range(rank * homes, (rank + 1) * homes))
        self.weights = drawn_weights(size, home_experts, device, self.dtype)
        self.layers: dict[str, list[ultraep.BalancedMoE]] = {}

    def add(self, name: str, speeds: tuple[int, ...] | str | None) -> ultraep.Balancer:
        config = BalanceConfig(objective="balance", speeds=speeds)
        balancer = ultraep.Balancer(
            dist.group.WORLD, experts=self.size.experts, slots=2, config=config, timeout=120.0
        )
        self.layers[name] = [  # of one model; they share their weights
            layer_with_weights(balancer, self.router, self.weights) for _ in range(self.size.layers)
        ]
        return balancer

    @torch.no_grad()
    def step(self, name: str) -> None:
        for layer in self.layers[name]:
            layer(self.x)

    def until(self, name: str, done: Callable[[], bool]) -> int:
        """Run steps until all ranks are `done`, or the most that the size allows."""
        for count in range(1, self.size.most + 1):
            self.step(name)
            if done():
                return count
        return self.size.most

    def measured(self, name: str) -> tuple[int, ...]:
        """Return the speed of every rank from its time per row, in thousandths of the fastest."""
        layer = self.layers[name][0]
        layer.balancer.reset_stats()
        for _ in range(BLOCK):
            self.step(name)
        seconds = layer.balancer.stats()["seconds"]["experts"]
        assert layer.last_plan is not None
        rows = int(layer.last_plan.to_host().rank_loads[self.rank])
        of_row = layer.balancer.comm.gather_objects(seconds / max(1, rows))
        return tuple(max(10, round(1000 * min(of_row) / own)) for own in of_row)

    def seconds(self, name: str) -> float:
        return slowest(lambda: self.step(name), self.size.steps, self.device)[0]

    def close(self) -> None:
        for layer, *_ in self.layers.values():
            layer.balancer.close()


@contextmanager
def slowed(size: Size, here: bool) -> Iterator[None]:
    """Slow this rank down, if it is the slow one and its share of a GPU does not do so already."""
    ends: list[Callable[[], Any]] = []
    if here and size.slow == CORE:
        process = subprocess.Popen([sys.executable, "-c", COMPETE, str(size.nice)])
        ends += [process.kill, process.wait]
    if here and size.slow == STREAM:
        stop = threading.Event()
        thread = threading.Thread(target=run_products, args=(stop,), daemon=True)
        thread.start()
        ends += [stop.set, thread.join]
    dist.barrier()
    try:
        yield
    finally:
        for end in ends:
            end()
        dist.barrier()


def run_products(stop: threading.Event) -> None:
    """Run products on a stream of their own, half of the time."""
    side = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    product, done = torch.empty_like(side), torch.cuda.Event(blocking=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        while not stop.is_set():
            begin = time.perf_counter()
            torch.mm(side, side, out=product)
            done.record()
            done.synchronize()
            time.sleep(time.perf_counter() - begin)


class Phases:
    """Names and limits the phases of one rank; see `mps.phase`. CPUs have no limits."""

    def __init__(self, rank: int, end: float | None) -> None:
        self.rank, self.end = rank, end

    def __call__(self, what: str, seconds: float = 60.0) -> AbstractContextManager[None]:
        if self.end is None:
            return nullcontext()
        return phase(f"rank {self.rank}: {what}", seconds, self.end)


def open_device(rank: int, size: Size, cuda: bool) -> torch.device:
    if cuda and size.slow == SHARED and rank == size.ranks - 1:  # before it opens the GPU
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(size.percentage)
    device = device_of_rank(cuda=cuda)
    torch.ones(1, device=device).item()
    return device


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def probe_on_rank(rank: int, size: Size, cuda: bool, end: float | None) -> dict[str, Any]:
    from ultraep.backends.triton.signals import Signals
    from ultraep.runtime.mapped.peers import SymmetricPeers

    phases = Phases(rank, end)
    with phases("open the GPU"):
        device = open_device(rank, size, cuda)
        sms = gathered(torch.cuda.get_device_properties(device).multi_processor_count)
        say(rank, f"multiprocessors of the ranks: {sms}")
    with phases("products and barriers of the hosts", 30), slowed(size, rank == size.ranks - 1):
        side = torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16)
        seconds = []
        for _ in range(5):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(PRODUCTS):
                torch.mm(side, side)
            torch.cuda.synchronize()
            seconds.append((time.perf_counter() - begin) / PRODUCTS)
        products = gathered(1e3 * median(seconds))
        say(rank, f"milliseconds of a product on every rank: {[round(ms, 2) for ms in products]}")
    with phases("mapped memory", 30):
        assert dist.group.WORLD is not None
        peers = SymmetricPeers(dist.group.WORLD, device)
        signals = Signals(peers, slots=1, buffers=1, timeout=10.0)
    with phases("barriers of the GPUs", 30):
        signals.barrier("rows")  # compiles the kernel
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(BARRIERS):
            signals.barrier("rows")
        torch.cuda.synchronize()
        barrier = 1e6 * (time.perf_counter() - begin) / BARRIERS
        signals.check()
        say(rank, f"microseconds of a barrier of the GPUs: {barrier:.1f}")
    return {"sms": sms, "products": products, "barrier": barrier}


def say(rank: int, text: str) -> None:
    if rank == 0:
        print_progress(text)


def probe(report: Report, size: Size, *, cuda: bool, end: float | None) -> None:
    if not cuda:
        raise SystemExit("the section probe needs --gpu")
    facts = on_ranks(size.ranks, probe_on_rank, size, cuda, end)
    pairs = zip(facts["sms"], facts["products"], strict=True)
    lines = [
        Line({"rank": rank}, {SMS: sms, PRODUCT: ms, BARRIER: facts["barrier"]})
        for rank, (sms, ms) in enumerate(pairs)
    ]
    report.add(f"EP{size.ranks}, the last rank is slow by {size.slow}: products, barriers", lines)


def straggler_on_rank(rank: int, size: Size, cuda: bool, end: float | None) -> dict[str, Any]:
    last, phases = rank == size.ranks - 1, Phases(rank, end)
    with phases("open the device"):
        variants = Variants(size, rank, open_device(rank, size, cuda))
        balancer = variants.add(LEARNT, "auto")
        variants.add(ROWS, None)
    facts: dict[str, Any] = {}
    with phases("first step"):
        variants.step(LEARNT)
        variants.step(ROWS)
        torch.cuda.synchronize() if cuda else None
    with slowed(size, last):
        with phases("learn", 90):
            facts["found"] = 1 + variants.until(LEARNT, lambda: bool(balancer.speeds))
            say(rank, f"after {facts['found']} microbatches: {balancer.speeds or 'equal speeds'}")
        with phases("learn more"):
            for _ in range(2 * BLOCK if size.most > BLOCK else 1):
                variants.step(LEARNT)
            facts["learnt"] = balancer.speeds or (1000,) * size.ranks
        with phases("measure the time per row"):
            facts["measured"] = variants.measured(ROWS)
            say(rank, f"learnt {facts['learnt']}, by time per row {facts['measured']}")
            variants.add(IDEAL, facts["measured"])
        with phases("compare"):
            facts["seconds"] = in_turns([ROWS, LEARNT, IDEAL], size.rounds, variants.seconds)
            ms = {name: round(1e3 * median(times), 2) for name, times in facts["seconds"].items()}
            say(rank, f"milliseconds {ms}")
    if size.slow != SHARED:
        with phases("forget", 90):
            facts["forgotten"] = variants.until(LEARNT, lambda: not balancer.speeds)
    variants.close()
    return facts


def straggler(report: Report, size: Size, *, cuda: bool, end: float | None) -> None:
    facts = on_ranks(size.ranks, straggler_on_rank, size, cuda, end)
    seconds: dict[str, list[float]] = facts["seconds"]
    slowest_speed = {ROWS: 1000, LEARNT: min(facts["learnt"]), IDEAL: min(facts["measured"])}
    lines = [
        Line(
            {"ranks": size.ranks, "variant": name},
            {
                MS: 1e3 * median(times),
                OVER: median_ratio(times, seconds[IDEAL]),
                GAIN: median_ratio(seconds[ROWS], times),
                SPEED: slowest_speed[name],
            },
        )
        for name, times in seconds.items()
    ]
    model = f"{size.about}, {size.tokens} tokens, layers {size.layers}"
    report.add(f"EP{size.ranks}, the last rank is slow: {model}", lines)
    lines = [
        Line({"ranks": size.ranks, "speeds are": f"{name} after"}, {MICROBATCHES: facts[name]})
        for name in ("found", "forgotten")
        if name in facts
    ]
    report.add(f"EP{size.ranks}, learning", lines)


def median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    return median(time / other for time, other in zip(times, others, strict=True))


def equal_on_rank(rank: int, size: Size, cuda: bool, cores: set[int]) -> dict[str, Any]:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)  # ranks of fixed cores differ while other programs run
    variants = Variants(size, rank, device_of_rank(cuda=cuda))
    changes, seconds = 0, []
    last: tuple[int, ...] = ()
    with timed_hooks() as hooks:
        balancer = variants.add(LEARNT, "auto")
        for _ in range(size.quiet):
            begin = time.perf_counter()
            variants.step(LEARNT)
            seconds.append(time.perf_counter() - begin)
            changes += balancer.speeds != last
            last = balancer.speeds
    measured = balancer.measured_speeds or (1000,)
    variants.close()
    return {"changes": changes, "seconds": seconds, "hooks": hooks, "measured": min(measured)}


@contextmanager
def timed_hooks() -> Iterator[list[float]]:
    """Collect the CPU seconds of this thread in the methods of `Speeds` that a microbatch calls."""
    seconds: list[float] = []
    methods = {name: getattr(Speeds, name) for name in HOOKS}

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begin = time.thread_time()
            try:
                return method(*args)
            finally:
                seconds.append(time.thread_time() - begin)

        return call

    try:
        for name, method in methods.items():
            setattr(Speeds, name, timed(method))
        yield seconds
    finally:
        for name, method in methods.items():
            setattr(Speeds, name, method)


def equal(report: Report, size: Size, *, cuda: bool, end: float | None) -> None:
    del end
    sized = (
        size
        if cuda
        else replace(size, hidden=size.hidden // 8, ffn=size.ffn // 8, tokens=size.tokens // 2)
    )
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    facts = on_ranks(sized.ranks, equal_on_rank, sized, cuda, cores)
    p50, p99 = (1e3 * float(value) for value in np.percentile(facts["seconds"], (50, 99)))
    values = {
        MICROBATCHES: sized.quiet,
        MINUTES: sum(facts["seconds"]) / 60,
        MS: p50,
        P99: p99,
        CHANGES: facts["changes"],
        SPEED: facts["measured"],
    }
    title = f"EP{size.ranks}, equal ranks: {sized.about}"
    report.add(title, [Line({"variant": LEARNT}, values)])
    us = 1e6 * sum(facts["hooks"]) / sized.quiet
    report.add(f"{title}, cost", [Line({"variant": LEARNT}, {COST: us, SHARE: us / 1e3 / p50})])


def cost(report: Report, size: Size, *, cuda: bool, end: float | None) -> None:
    """Time learning in a layer of the size of `straggler`, and the hooks with larger plans."""
    del end
    short = replace(size, quiet=min(size.quiet, 10 * BLOCK))
    facts = on_ranks(short.ranks, equal_on_rank, short, cuda, set(range(os.cpu_count() or 1)))
    us, ms = 1e6 * sum(facts["hooks"]) / short.quiet, 1e3 * median(facts["seconds"])
    line = Line({"ranks": size.ranks, "experts": size.experts}, {COST: us, SHARE: us / 1e3 / ms})
    report.add(f"learning: {size.about}, {size.tokens} tokens; a step takes {ms:.1f} ms", [line])
    lines = []
    for ranks, experts in ((8, 64), (64, 256)):
        topology = ultraep.Topology(ranks=ranks, experts=experts)
        shape = replace(size, ranks=ranks, experts=experts, tokens=8 * experts, top_k=8)
        plan = ultraep.plan(HotRank(1.5).draw(shape), topology, BalanceConfig(objective="balance"))
        us = 1e6 * hooks_seconds(plan, 400 if size.quiet > 100 else 2)
        lines.append(Line({"ranks": ranks, "experts": experts}, {COST: us}))
    report.add("learning, with plans of larger groups", lines)


def hooks_seconds(plan: Plan, calls: int) -> float:
    costs: Any = CostModel.__new__(CostModel)
    costs.predicted_seconds = lambda _layer, rows_G: float(
        np.interp(rows_G, (1, 16, 64, 256, 1024), (1, 2, 3, 4, 5)).sum()
    )
    speeds, paces = Speeds(0, costs), np.full(plan.topology.ranks, 4 * 10**6)
    records = [PassRecord(Passes(0, step), "forward") for step in range(calls)]
    begin = time.thread_time()
    for record in records:
        if speeds.report(Passes(0, record.step)) is not None:
            speeds.gathered(paces)
        record.plan, record.seconds = plan, {"experts": 1e-3}
        speeds.add(record)
    return (time.thread_time() - begin) / calls


RUN = {"probe": probe, "straggler": straggler, "equal": equal, "cost": cost}


def main(argv: Sequence[str]) -> None:
    parser = options_parser(__doc__)
    only = comma_list(SECTIONS)
    text = f"sections to run: {', '.join(SECTIONS)} (default: {', '.join(USUAL)}; with --gpu " + (
        f"{', '.join(USUAL_GPU)})"
    )
    parser.add_argument("--only", type=only, metavar="A,B", help=text)
    parser.add_argument("--gpu", action="store_true", help="eight processes on one GPU")
    text = "how the last rank is slowed with --gpu: fewer multiprocessors, or another stream"
    parser.add_argument("--slow", choices=(SHARED, STREAM), default=SHARED, help=text)
    text = "multiprocessors of the last rank with --slow share, in per cent of all (default: 9)"
    parser.add_argument("--percentage", type=int, default=CARD.percentage, help=text)
    text = f"seconds of a run with --gpu (default: {LIMIT:.0f})"
    parser.add_argument("--limit", type=float, default=LIMIT, help=text)
    parser.add_argument("--ranks", type=int, help="only this number of ranks")
    options = parser.parse_args(argv[1:])
    cuda = options.gpu and not options.toy
    card = replace(CARD, percentage=options.percentage, slow=options.slow)
    every = [TOY] if options.toy else [card] if options.gpu else CPU_SIZES
    sizes = [size for size in every if options.ranks in (None, size.ranks)]
    names = options.only or (USUAL_GPU if options.gpu and not options.toy else USUAL)
    end = time.time() + options.limit if cuda else None
    if cuda:  # also if processes cannot be ended
        faulthandler.dump_traceback_later(options.limit + SPARE, exit=True)
    with report_of_ranks("speeds", argv, sizes[0].ranks, cuda=cuda) as report:
        for name in names:
            report.section = name
            for size in sizes[: None if name == "straggler" else 1]:
                RUN[name](report, size, cuda=cuda, end=end)
                sys.stdout.flush()
                report.write(options.json)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv)
