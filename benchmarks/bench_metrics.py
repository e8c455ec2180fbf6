"""What watching a run costs: metrics, and metrics with a recorded trace, beside nothing.

    python benchmarks/bench_metrics.py                   # EP2, a pinned core and a thread per rank
    python benchmarks/bench_metrics.py --device cuda     # one card: eager, and EP8 in graphs
    python benchmarks/bench_metrics.py --toy             # tiny, for CI

The same step in turns in one run: as it is, with metrics, and with metrics and a recorder; metrics
are read every ten steps, into a log, scalars and, where its client is installed, a page of
Prometheus. The cost is the median of the quotients of neighbours. On a card, `eager` is one rank on
the mapped data plane; `graph` is eight ranks, each on a part of the card and with a graph of its
step, which holds the counting and keeping of what its replays plan.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bench_layer import Size, one_step
from bench_trace import COST, ERROR, INSIDE, STEP, make_layer
from harness import Bench, Line, Metric, Report, Values, common_options
from load_cases import HotRank, Shape
from single_contenders import Contender, Inputs, name_of
from timing import Gpu, Host, device_us, free, on_gpu, standard_error, time_call
from world import Given, given_layer, on_ranks

import ultraep
from ultraep.metrics import Exporter, Log, Metrics, scalars
from ultraep.metrics.meter import Meter
from ultraep.microbatch import MicrobatchInfo
from ultraep.runtime.connect import connect
from ultraep.runtime.stats import Stats
from ultraep.tools.report.rows import cpu_device
from ultraep.trace.read import read_trace
from ultraep.trace.schema import BACKWARD, FORWARD

EVERY = 10
WATCHED = ("nothing", "metrics", "recorder and metrics")
STEPS_OF_A_ROUND = 5
MEAN_INSIDE = Metric("time_in_step_mean", "us", "mean us", ".1f")
Times = Mapping[str, Sequence[float]]


def watch(balancer: ultraep.Balancer) -> Metrics:
    """Metrics with all sinks that there are here."""
    logger = logging.getLogger("ultraep.benchmark")
    logger.propagate, logger.handlers = False, [logging.NullHandler()]
    logger.setLevel(logging.INFO)
    metrics = Metrics(balancer, every=EVERY).tell(Log(logger), scalars(_nowhere))
    if find_spec("prometheus_client") is not None:
        from prometheus_client import CollectorRegistry

        metrics.tell(Exporter(CollectorRegistry()))
    return metrics


def _nowhere(_values: dict[str, float], _step: int) -> None:
    """Takes scalars."""


def in_turns(kinds: Sequence[str], rounds: int, seconds_of: Callable[[str], float]) -> Times:
    """Seconds of every round of every kind; two rounds come before, and none is always first."""
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(rounds + 2):
        for kind in kinds if turn % 2 else reversed(kinds):
            seconds = seconds_of(kind)
            if turn >= 2:
                found[kind].append(seconds)
    return found


def lines_of(case: Mapping[str, Any], times: Times) -> list[Line]:
    """A line for every kind; the first one is what the others are compared with."""
    first, *_ = times
    lines = []
    for kind, seconds in times.items():
        quotients = np.array(seconds) / np.array(times[first]) - 1
        costs: Values = {COST: float(np.median(quotients)), ERROR: standard_error(quotients)}
        nothing: Values = dict.fromkeys(costs)
        values = {STEP: median(seconds) * 1e3, **(nothing if kind == first else costs)}
        lines.append(Line({**case, "watched": kind}, values))
    return lines


# -- CPU -----------------------------------------------------------------------------------------


def on_rank(rank: int, size: Size, folder: str) -> dict[str, list[float]]:
    """One process: seconds of every step of every kind, the slowest rank's."""
    with closing(connect(dist.group.WORLD, transport=size.transport)) as comm:
        layers, metrics = {}, {}
        for kind in WATCHED:
            record = f"{folder}/run" if "recorder" in kind else None
            layers[kind] = make_layer(rank, size, comm, record)
            if kind != "nothing":
                metrics[kind] = watch(layers[kind].balancer)
        generator = torch.Generator().manual_seed(rank)
        tokens = torch.randn(size.tokens, size.hidden, generator=generator)

        def seconds_of(kind: str) -> float:
            elapsed = one_step(layers[kind], tokens, "ultraep")
            if kind in metrics:
                elapsed += time_call(metrics[kind].step, 1, 0).p50
            return float(comm.all_gather(torch.tensor([elapsed])).max())

        found = in_turns(WATCHED, size.rounds, seconds_of)
        layers[WATCHED[-1]].balancer.close()
        return {kind: list(seconds) for kind, seconds in found.items()}


def report_cpu(report: Report, size: Size) -> None:
    with tempfile.TemporaryDirectory() as folder:
        times: Times = on_ranks(size.ranks, on_rank, size, folder)
    case = {"ranks": size.ranks, "tokens": size.tokens, "hidden": size.hidden, "ffn": size.ffn}
    case |= {"experts": size.experts, "top_k": size.top_k, "slots": size.slots}
    report.section = "cpu"
    report.add("a layer, forward and backward", lines_of(case, times))
    report.note("Cost: median of the quotients of neighbouring steps, less one; +-: its standard")
    report.note("error, by the 20th and the 80th percentile.")


def report_alone(report: Report, shapes: Sequence[tuple[int, int]], count: int) -> None:
    """Microseconds of the host that metrics add to a layer, forward and backward."""
    lines = []
    for ranks, experts in shapes:
        topology = ultraep.Topology(ranks=ranks, experts=experts)
        loads = ultraep.workload.zipf(ranks, experts, ratio=1.5, top_k=2, shuffled=True)
        plan = ultraep.plan(loads, topology)
        balancer = ultraep.Balancer("alone", experts=experts)
        metrics, meter, times = watch(balancer), Meter(topology), Stats()
        took = []
        for step in range(count):
            microbatch = MicrobatchInfo(0, step + 1, again=False)
            begin = time.perf_counter()
            meter.planned(microbatch, plan)
            times.planned(microbatch, plan)
            for stage in (*FORWARD, *BACKWARD):
                meter.begin(stage, microbatch)
                meter.end(stage, microbatch)
                times.took(microbatch, stage, 0.0)
            meter.sent(microbatch, "weights", 1, 1)
            meter.sent(microbatch, "gradients", 1, 1)
            metrics.step()
            took.append(time.perf_counter() - begin)
        values = {INSIDE: median(took) * 1e6, MEAN_INSIDE: fmean(took) * 1e6}
        lines.append(Line({"ranks": ranks, "experts": experts}, values))
    report.section = "alone"
    report.add("what metrics do for one layer, forward and backward, without the layer", lines)
    report.note(f"The mean has the readings in it, one in {EVERY} steps.")


# -- a card --------------------------------------------------------------------------------------


def watched_layer(
    inputs: Inputs, weights: Mapping[str, Any], *, kind: str, folder: str, step: list[Any]
) -> Any:
    """Our layer on mapped memory; what is to be called after its step is left in `step`."""
    router = Given(inputs.ids)
    balancer = ultraep.Balancer(
        "alone",
        experts=inputs.shape.experts,
        data_plane="mapped",
        record=folder if "recorder" in kind else None,
    )
    step.append(watch(balancer).step if kind != "nothing" else lambda: None)
    moe = given_layer(balancer, router, weights)

    def layer(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        router.gates = gates
        y: torch.Tensor = moe(x)
        return y

    return layer


def eager(bench: Bench) -> None:
    """One rank, launched as it comes: what the host adds is seen where the device waits for it."""
    lines = []
    for shape in bench.scale.shapes:
        inputs, contenders, steps = Inputs.of_tokens(shape, bench.clock), {}, {}
        with tempfile.TemporaryDirectory() as folder:
            for kind in WATCHED:
                step: list[Any] = []
                make = partial(watched_layer, kind=kind, folder=f"{folder}/run", step=step)
                contenders[kind] = Contender(inputs, make)
                steps[kind] = step[0]

            def seconds_of(kind: str, contenders: Any = contenders, steps: Any = steps) -> float:
                def some() -> None:
                    for _ in range(STEPS_OF_A_ROUND):
                        contenders[kind].step()
                        steps[kind]()

                us = bench.clock.us(some) if isinstance(bench.clock, Host) else device_us(some, 1)
                return us / 1e6 / STEPS_OF_A_ROUND

            times = in_turns(WATCHED, bench.scale.rounds, seconds_of)
            lines += lines_of({"shape": name_of(shape), "tokens": shape.tokens}, times)
            del contenders, seconds_of
            free()
    bench.table("EP1 on mapped memory, eager, forward and backward; shape D/F/experts/top-k", lines)


def graph(bench: Bench) -> None:
    """Eight ranks of a card, one layer in a graph each; what counts and records is in the graph."""
    if isinstance(bench.clock, Host):
        bench.report.note("\ngraph: needs a GPU")
        return
    import bench_layer_gpu as card
    from layer_card import World

    size, load, rounds = card.SIZES[0], HotRank(2.0), 3 * bench.scale.rounds
    with tempfile.TemporaryDirectory() as folder:
        plain = Watched(World(size), load)
        recorded = Watched(World(size, parts=plain.world.parts), load, f"{folder}/run")
        plain.capture("nothing")
        plain.watch()
        plain.capture("metrics")
        recorded.watch()
        recorded.capture(WATCHED[-1])
        kinds = dict.fromkeys(WATCHED[:2], plain) | {WATCHED[-1]: recorded}
        times = in_turns(list(kinds), rounds, lambda kind: kinds[kind].seconds(kind))
        plain.check(rounds + 2)
        recorded.check(rounds + 2)
        kept = read_trace(f"{folder}/run")
    title = f"{size.model}: EP{size.ranks} on one card, a layer in graphs, forward and backward"
    bench.table(title, lines_of({"tokens": size.tokens, "load": load.name}, times))
    if len(kept) != rounds + 2 or kept.dropped:
        raise SystemExit(f"{len(kept)} of {rounds + 2} replays are recorded, {kept.dropped} lost")
    bench.report.note(f"Counted by the graphs: {dict(plain.counted)}")
    bench.report.note(
        f"Recorded from the graphs: {len(kept)} replays, imbalance "
        f"{kept.imbalance_before.mean():.3f} -> {kept.imbalance_after.mean():.3f}"
    )
    host = median(recorded.host) * 1e6
    bench.report.note(f"Of the host, for a step of eight ranks: {host:.0f} us of record_step")


class Watched:
    """Ranks of a card with one layer each, and graphs of their step by what watches them."""

    def __init__(self, world: Any, load: HotRank, folder: str | None = None) -> None:
        from bench_layer_gpu import plan_for
        from ceilings import capacity_of

        self.world, self.metrics, self.host = world, list[Metrics](), list[float]()
        for rank in world.ranks:
            rank.record = folder
        loads, plan = plan_for(world.size, load, "ultraep")
        world.regroup(plan, capacity_of(plan))
        world.route(loads)
        self._graphs: dict[str, list[Any]] = {}
        self._steps, self.counted = 0, dict[str, float]()

    def watch(self) -> None:
        self.metrics = [watch(rank.balancer) for rank in self.world.ranks]

    def capture(self, kind: str) -> None:
        self.world.capture()
        self._graphs[kind] = [rank.graph for rank in self.world.ranks]

    def seconds(self, kind: str) -> float:
        """Of one step, on the device; the host is ahead of it."""
        from layer_card import LAUNCHING

        for rank, own in zip(self.world.ranks, self._graphs[kind], strict=True):
            rank.graph = own
        wait = torch.cuda.synchronize
        us = device_us(partial(self._step, kind), 1, before=wait, cycles=LAUNCHING)
        for one in self.metrics if kind != "nothing" else ():
            one.step()
        return us / 1e6

    def _step(self, kind: str) -> None:
        if kind == WATCHED[-1]:
            begin, self._steps = time.perf_counter(), self._steps + 1
            for rank in self.world.ranks:
                with torch.cuda.stream(rank.stream):
                    rank.balancer.record_step(self._steps)
            self.host.append(time.perf_counter() - begin)
        self.world.replay()

    def check(self, replays: int) -> None:
        """All replays were counted; and the trace is written, if there is one."""
        self.world.check()
        found = self.metrics[0].read()
        if found.totals.microbatches != replays:
            raise SystemExit(f"{found.totals.microbatches} of {replays} replays were counted")
        self.counted = dict(found.values)
        for rank in self.world.ranks:
            rank.balancer.close()


class CardScale:
    """How much is measured on a card."""

    def __init__(self, *, toy: bool, quick: bool) -> None:
        shape = Shape(hidden=2048, ffn=768, experts=128, top_k=8, tokens=8192)
        tiny = Shape(hidden=16, ffn=16, experts=4, top_k=2, tokens=8)
        self.shapes = (tiny,) if toy else (shape,)
        self.rounds = 1 if toy else 11 if quick else 31


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    common_options(parser)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=101, help="steps of each kind, on CPUs")
    parser.add_argument("--transport", default="auto", help="auto, shared or sockets")
    options = parser.parse_args()
    if options.device == "cuda":
        gpu = on_gpu(toy=options.toy)
        scale = CardScale(toy=options.toy, quick=options.quick)
        clock = Gpu(1) if gpu else Host(1, 0)
        bench = Bench.of("metrics", sys.argv, scale, clock, options.json)
        bench.run({"eager": eager, "graph": graph}, ["eager", "graph"])
        return
    size = Size(
        ranks=2,
        tokens=512,
        experts=8,
        rounds=31 if options.quick else options.rounds,
        transport=options.transport,
    )
    if options.toy:
        size = Size(ranks=2, tokens=64, hidden=16, ffn=32, rounds=3, transport=options.transport)
    report = Report("metrics", sys.argv, device=cpu_device())
    report.header()
    report_cpu(report, size)
    report_alone(report, ((2, 8),) if options.toy else ((2, 8), (8, 128), (64, 256)), 200)
    report.write(options.json)


if __name__ == "__main__":
    main()
