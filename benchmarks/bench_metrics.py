"""The cost of metrics, of a recorded trace, and of the flight recorder.

    python benchmarks/bench_metrics.py                # one core
    python benchmarks/bench_metrics.py --only eager   # a GPU
    python benchmarks/bench_metrics.py --toy          # tiny, for CI

`alone` measures the code of metrics and flight recorder without the layer. Metrics are read every
ten steps into a log, scalars and, if its client is installed, a Prometheus page. `record` measures
a record of rank 0: its cost in the step, in the writing thread, and its bytes on disk. On a GPU,
`eager` runs one rank on the mapped data plane: plain, with metrics, and with both, in turns.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from harness import KERNELS, Bench, Line, Metric, Values, main
from load_cases import Shape
from single_contenders import Contender, Inputs, name_of, on_balancer
from timing import free, in_a_row_ms, in_turns, nothing, standard_error

import ultraep
from ultraep import workload
from ultraep.metrics import Exporter, Log, Metrics, scalars
from ultraep.passes import Passes, PassLog
from ultraep.runtime.flight import Flight
from ultraep.runtime.recording import Recording
from ultraep.runtime.stats import Stats
from ultraep.trace.schema import BACKWARD, FORWARD

EVERY = 10
NOTHING, METRICS, RECORDER, BOTH = "nothing", "metrics", "recorder", "recorder and metrics"
ON_CARD = (NOTHING, METRICS, BOTH)
STEPS_OF_A_ROUND = 5
PLANS = 32  # different ones
STEP = Metric("step_time_p50", "ms", "ms", ".3f")
COST = Metric("cost_of_recording", "share", "cost", ".4f")
ERROR = Metric("error_of_cost", "share", "+-", ".4f")
INSIDE = Metric("time_in_step_p50", "us", "in the step us", ".1f")
MEAN_INSIDE = Metric("time_in_step_mean", "us", "mean us", ".1f")
FLOWN = Metric("time_of_flight_recorder_p50", "us", "flight recorder us", ".1f")
WRITE = Metric("cpu_time_written", "us", "written us", ".1f")
DISK = Metric("bytes_on_disk", "bytes", "bytes", ".0f")
Times = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Scale:
    """What one run measures."""

    groups: tuple[tuple[int, int], ...]  # ranks and experts
    count: int  # records
    shape: Shape  # of a layer on a GPU
    rounds: int  # on a GPU


def watch(balancer: ultraep.Balancer) -> Metrics:
    """Attach metrics with all installed sinks."""
    logger = logging.getLogger("ultraep.benchmark")
    logger.propagate, logger.handlers = False, [logging.NullHandler()]
    logger.setLevel(logging.INFO)
    metrics = Metrics(balancer, every=EVERY).tell(Log(logger), scalars(lambda *_: None))
    if find_spec("prometheus_client") is not None:
        from prometheus_client import CollectorRegistry

        metrics.tell(Exporter(CollectorRegistry()))
    return metrics


def lines_of(case: Mapping[str, Any], times: Times) -> list[Line]:
    """One line per kind; all kinds are compared with the first."""
    first, *_ = times
    lines = []
    for kind, seconds in times.items():
        quotients = np.array(seconds) / np.array(times[first]) - 1
        costs: Values = {COST: float(np.median(quotients)), ERROR: standard_error(quotients)}
        values = {STEP: median(seconds) * 1e3, **(dict.fromkeys(costs) if kind == first else costs)}
        lines.append(Line({**case, "watched": kind}, values))
    return lines


def alone(bench: Bench) -> None:
    """Measure the host time that metrics add to a layer, forward and backward."""
    lines = []
    for ranks, experts in bench.scale.groups:
        topology = ultraep.Topology(ranks=ranks, experts=experts)
        loads = workload.zipf(ranks, experts, ratio=1.5, top_k=2, shuffled=True)
        plan = ultraep.plan(loads, topology)
        balancer = ultraep.Balancer("alone", experts=experts)
        metrics = watch(balancer)
        flight, took, flown = Flight("benchmark", 0, ranks), list[float](), list[float]()
        plain, counted, flying = PassLog(0), PassLog(0), PassLog(0, flight)
        counted.subscribe(Stats().add)
        for step in range(bench.scale.count):
            seconds = []
            for log in (plain, counted, flying):
                begin = time.perf_counter()
                pass_by(log, step + 1, plan)
                if log is counted:
                    metrics.step()
                seconds.append(time.perf_counter() - begin)
            took.append(seconds[1] - seconds[0])
            flown.append(seconds[2] - seconds[0])
        flight.close()
        values = {INSIDE: median(took) * 1e6, MEAN_INSIDE: fmean(took) * 1e6}
        values[FLOWN] = median(flown) * 1e6
        lines.append(Line({"ranks": ranks, "experts": experts}, values))
    bench.table("metrics code of one layer, forward and backward, without the layer", lines)
    bench.report.note(f"The mean includes the readings, one every {EVERY} steps.")


def record(bench: Bench) -> None:
    """Measure the cost of a record of rank 0, in the step and in the writing thread."""
    lines = []
    for ranks, experts in bench.scale.groups:
        topology = ultraep.Topology(ranks=ranks, experts=experts)
        draw = partial(workload.zipf, ratio=1.5, top_k=2, tokens=2048, shuffled=True)
        plans = [ultraep.plan(draw(ranks, experts, seed=seed), topology) for seed in range(PLANS)]
        values = cost_of_record(plans, bench.scale.count)
        lines.append(Line({"ranks": ranks, "experts": experts}, values))
    bench.table("one microbatch of one layer, on rank 0", lines)
    bench.report.note(
        "In the step: all that recording adds to forward and backward there. Written: by another\n"
        "thread, mostly without Python's lock."
    )


def cost_of_record(plans: list[ultraep.Plan], count: int) -> dict[Metric, float]:
    """Time in the step, and in the thread that writes at the same time or later."""
    with tempfile.TemporaryDirectory() as folder:
        took = []
        process, thread = time.process_time(), time.thread_time()
        with ultraep.Recorder(f"{folder}/run", plans[0].topology, memory=1 << 30) as recorder:
            log = PassLog(rank=0)
            log.subscribe(Recording(recorder, rank=0).add)
            for step in range(count):
                begin = time.perf_counter()
                pass_by(log, step + 1, plans[step % PLANS])
                took.append(time.perf_counter() - begin)
        written = time.process_time() - process - (time.thread_time() - thread)
        disk = sum(path.stat().st_size for path in Path(folder).rglob("*.npz"))
    return {INSIDE: median(took) * 1e6, WRITE: written / count * 1e6, DISK: disk / count}


def pass_by(log: PassLog, step: int, plan: ultraep.Plan) -> None:
    """Record one microbatch, forward and backward, without running it."""
    passes = Passes(0, step, log)
    passes.plan = passes.record.plan = plan
    for stages, what in ((FORWARD, "weights"), (BACKWARD, "gradients")):
        if stages is BACKWARD:
            passes.begin_backward()
        for stage in stages:
            passes.record.at(stage)
        passes.record.sent.append((what, 1, 1))
        passes.record.end()


# -- a GPU ---------------------------------------------------------------------------------------


def eager(bench: Bench) -> None:
    """Measure one rank on mapped memory; host time shows where the device waits for it."""
    shape: Shape = bench.scale.shape
    inputs, steps, after = Inputs.of_tokens(shape, bench.clock), {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ON_CARD:
            balancer = ultraep.Balancer(
                "alone",
                experts=shape.experts,
                data_plane="mapped",
                record=f"{folder}/run" if RECORDER in kind else None,
            )
            after[kind] = watch(balancer).step if METRICS in kind else nothing
            steps[kind] = Contender(inputs, partial(on_balancer, balancer=balancer)).step

        def one(kind: str) -> None:
            steps[kind]()
            after[kind]()

        def seconds_of(kind: str) -> float:
            return in_a_row_ms(bench.clock, partial(one, kind), STEPS_OF_A_ROUND) / 1e3

        times = in_turns(ON_CARD, bench.scale.rounds, seconds_of)
        steps.clear()
        free()
    lines = lines_of({"shape": name_of(shape), "tokens": shape.tokens}, times)
    bench.table("EP1 on mapped memory, eager, forward and backward; shape D/F/experts/top-k", lines)


WIDE = Shape(hidden=2048, ffn=768, experts=128, top_k=8, tokens=8192)
GROUPS = ((2, 8), (8, 128), (64, 256), (256, 1024))
FULL = Scale(GROUPS, 500, WIDE, 31)
QUICK = replace(FULL, rounds=11)
TOY = Scale(
    GROUPS[:1],
    20,
    Shape(hidden=16, ffn=16, experts=4, top_k=2, tokens=8),
    1,
)
SECTIONS: dict[str, Callable[[Bench], None]] = {
    "alone": alone,
    "record": record,
    "eager": eager,
}


if __name__ == "__main__":
    scales = {"toy": TOY, "quick": QUICK, "full": FULL}
    usual = ("alone", "record")
    main("metrics", __doc__, SECTIONS, scales, needs={"eager": KERNELS}, usual=usual)
