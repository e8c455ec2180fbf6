"""What recording a trace costs: a layer in real processes with and without, and a record alone.

    python benchmarks/bench_trace.py           # EP2, one pinned core and one thread per rank
    python benchmarks/bench_trace.py --toy     # tiny, for CI

`layer`: forward and backward of the same microbatch, recorded and not, in turns in one process
group; the cost is the median of the quotients of neighbours. `record`: what the step itself pays
for a record of rank 0, what the writing thread pays for it later, and its bytes on the disk.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import closing
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bench_layer import Size, one_step
from harness import Line, Metric, Report, common_options
from load_cases import skewed_ids
from timing import standard_error
from world import Given, on_ranks

import ultraep
from ultraep import workload
from ultraep.microbatch import MicrobatchInfo
from ultraep.reroute import rows_received
from ultraep.runtime.clocks import HostClock
from ultraep.runtime.connect import connect
from ultraep.runtime.recording import Recording
from ultraep.tools.report.rows import cpu_device
from ultraep.trace.files import write_arrays
from ultraep.trace.schema import BACKWARD, FORWARD, fields_of_plan
from ultraep.trace.writer import Entry, piece

PLANS = 32  # different ones, in a piece
STEP = Metric("step_time_p50", "ms", "ms", ".3f")
COST = Metric("cost_of_recording", "share", "cost", ".4f")
ERROR = Metric("error_of_cost", "share", "+-", ".4f")
RECORDS = Metric("records", "records", "records", ".0f")
DROPPED = Metric("dropped", "records", "dropped", ".0f")
INSIDE = Metric("time_in_step_p50", "us", "in the step us", ".1f")
WRITE = Metric("cpu_time_written", "us", "written us", ".1f")
DISK = Metric("bytes_on_disk", "bytes", "bytes", ".0f")
RECORDED = {False: "off", True: "on"}
Shape = tuple[int, int]  # ranks, experts


def on_rank(rank: int, size: Size, folder: str) -> dict[str, list[float]]:
    """One process: time both variants in turns."""
    with closing(connect(dist.group.WORLD, transport=size.transport)) as comm:
        return measure(rank, size, comm, folder)


def measure(rank: int, size: Size, comm: Any, folder: str) -> dict[str, list[float]]:
    """Seconds of every step of both variants, the slowest rank's."""
    layers = {on: make_layer(rank, size, comm, f"{folder}/run" if on else None) for on in RECORDED}
    tokens = torch.randn(size.tokens, size.hidden, generator=torch.Generator().manual_seed(rank))
    steps: dict[bool, list[float]] = {on: [] for on in RECORDED}
    for turn in range(size.rounds + 2):  # two to warm up
        for on in sorted(RECORDED, reverse=bool(turn % 2)):  # neither is always the first
            elapsed = one_step(layers[on], tokens, "ultraep")
            slowest = comm.all_gather(torch.tensor([elapsed])).max().item()
            if turn >= 2:
                steps[on].append(slowest)
    recorder: Any = layers[True].balancer.recorder
    recorder.close()
    return {RECORDED[on]: seconds for on, seconds in steps.items()} | {
        "dropped": [float(recorder.dropped)]
    }


def make_layer(rank: int, size: Size, comm: Any, folder: str | None) -> ultraep.BalancedMoE:
    """A layer whose router is given, on a balancer of its own."""
    balancer = ultraep.Balancer(
        experts=size.experts,
        slots=size.slots,
        communicator=comm,
        config=ultraep.BalanceConfig(objective="balance"),
        record=folder,
    )
    moe = ultraep.BalancedMoE.swiglu(
        size.hidden, size.ffn, size.experts, size.top_k, balancer=balancer
    )
    ids = skewed_ids(size, size.ratio)[rank]
    moe.router = Given(ids, torch.full(ids.shape, 1 / size.top_k, requires_grad=True))
    return moe


def report_layer(report: Report, size: Size) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, list[float]] = on_ranks(size.ranks, on_rank, size, folder)
        trace = ultraep.read_trace(f"{folder}/run")
        disk = sum(path.stat().st_size for path in Path(folder, "run").rglob("*.npz"))
    quotients = np.array(found["on"]) / np.array(found["off"]) - 1
    case = {"ranks": size.ranks, "tokens": size.tokens, "hidden": size.hidden, "ffn": size.ffn}
    case |= {"experts": size.experts, "top_k": size.top_k, "slots": size.slots}
    off = {STEP: median(found["off"]) * 1e3, COST: None, ERROR: None}
    on = {
        STEP: median(found["on"]) * 1e3,
        COST: float(np.median(quotients)),
        ERROR: standard_error(quotients),
    }
    facts = {RECORDS: float(len(trace)), DROPPED: found["dropped"][0], DISK: disk / len(trace)}
    nothing = dict.fromkeys(facts)
    report.section = "layer"
    report.add(
        "a layer, forward and backward",
        [
            Line(case | {"recording": "off"}, off | nothing),
            Line(case | {"recording": "on"}, on | facts),
        ],
    )
    report.note("Cost: median of the quotients of neighbouring steps, less one; +-: its standard")
    report.note("error, by the 20th and the 80th percentile. Bytes: of a record, all ranks.")


def report_record(report: Report, shapes: tuple[Shape, ...], count: int) -> None:
    lines = []
    for ranks, experts in shapes:
        topology = ultraep.Topology(ranks=ranks, experts=experts)
        plans = []
        for seed in range(PLANS):
            kind = {"ratio": 1.5, "top_k": 2, "tokens": 2048, "shuffled": True, "seed": seed}
            plans.append(ultraep.plan(workload.zipf(ranks, experts, **kind), topology))  # type: ignore[arg-type]
        lines.append(Line({"ranks": ranks, "experts": experts}, cost_of_record(plans, count)))
    report.section = "record"
    report.add("one microbatch of one layer, on rank 0", lines)
    report.note("In the step: all that recording adds to forward and backward there. Written:")
    report.note("by another thread, mostly without Python's lock.")


def cost_of_record(plans: list[ultraep.Plan], count: int) -> dict[Metric, float]:
    """What the step pays, and what the thread does for it later."""
    rows = [rows_received(plan, 0).sum(axis=0).tolist() for plan in plans]
    with tempfile.TemporaryDirectory() as folder:
        took = []
        with ultraep.Recorder(f"{folder}/run", plans[0].topology, memory=1 << 30) as recorder:
            clock = HostClock([Recording(recorder, rank=0)], rank=0)
            for step in range(count):
                microbatch, plan = MicrobatchInfo(0, step + 1, again=False), plans[step % PLANS]
                begin = time.perf_counter()
                pass_by(clock, microbatch, plan)
                took.append(time.perf_counter() - begin)
            header = recorder.header
        entries = [
            Entry((n, 0, 0), values_of(own, header.stages), shared_of(plan), nbytes=0)
            for n, (plan, own) in enumerate(zip(plans, rows, strict=True))
        ]
        path = Path(folder, "piece.npz")
        begin = time.thread_time()
        write_arrays(path, piece(entries, header, 0, dropped=0))
        written = time.thread_time() - begin
        return {
            INSIDE: median(took) * 1e6,
            WRITE: written / len(entries) * 1e6,
            DISK: path.stat().st_size / len(entries),
        }


def shared_of(plan: ultraep.Plan) -> tuple[Any, ...]:
    """What rank 0 tells of a plan, as the recorder hands it on."""
    return tuple(attrgetter(field.plan)(plan) for field in fields_of_plan())


def values_of(rows: list[int], stages: tuple[str, ...]) -> dict[str, Any]:
    """What it tells besides."""
    seconds = [0.0] * len(stages)
    return {"slot_rows": np.array(rows), "bytes_moved": 0, "began": 0.0, "seconds": seconds}


def pass_by(clock: HostClock, microbatch: MicrobatchInfo, plan: ultraep.Plan) -> None:
    """All that is recorded of a microbatch in forward and backward, without the work itself."""
    for stage in (*FORWARD, *BACKWARD):
        microbatch.back = stage in BACKWARD
        clock.begin(stage, microbatch)
        clock.end(stage, microbatch)
        if stage == "plan":
            clock.planned(microbatch, plan)
    clock.sent(microbatch, "gradients", 1, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    common_options(parser)
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a rank")
    parser.add_argument("--rounds", type=int, default=101, help="steps of each kind")
    parser.add_argument("--transport", default="auto", help="auto, shared or sockets")
    options = parser.parse_args()
    size = Size(
        ranks=options.ranks,
        tokens=options.tokens,
        experts=4 * options.ranks,
        rounds=31 if options.quick else options.rounds,
        transport=options.transport,
    )
    shapes: tuple[Shape, ...] = ((2, 8), (8, 128), (64, 256), (256, 1024))
    if options.toy:
        size = Size(ranks=2, tokens=64, hidden=16, ffn=32, rounds=3, transport=options.transport)
        shapes = shapes[:2]
    report = Report("trace", sys.argv, device=cpu_device())
    report.header()
    report_layer(report, size)
    report_record(report, shapes, 50 if options.toy else 500)
    report.write(options.json)


if __name__ == "__main__":
    main()
