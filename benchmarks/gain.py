"""What balancing gains in processes: one way to time steps of all ranks, and one table of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median

import torch
import torch.distributed as dist
from bench_layer import AFTER, BEFORE, GAIN, RATE, SHARE
from harness import Case, Line, Metric
from load_cases import Shape
from timing import Call

PLAIN, FORCED = "unmodified", "forced balance"
RATIO = 1.6  # fullest rank over mean rank
HOST_STEP = Metric("step_host_time", "ms", "host ms", ".2f")
BUSY = Metric("busiest_processor_time", "ms", "cpu ms", ".2f")
LESS = Metric("busiest_processor_gain_over_none", "ratio", "cpu gain", ".3f")

Spent = tuple[float, float]  # seconds, and of the processor in them
Facts = dict[str, float]  # "step", "busy": medians of these; imbalance "before" and "after"


def slowest(step: Call) -> Spent:
    """Seconds of a step from a common start, and of the processor in it; the most of all ranks."""
    dist.barrier()
    begin, used = time.perf_counter(), time.process_time()
    step()
    spent = torch.tensor([time.perf_counter() - begin, time.process_time() - used])
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    elapsed, busy = spent.tolist()
    return elapsed, busy


def medians(found: Sequence[Spent]) -> Facts:
    """Of all steps of one variant."""
    steps, busy = zip(*found, strict=True)
    return {"step": median(steps), "busy": median(busy)}


def gain_lines(shape: Shape, found: Mapping[str, Facts], more: Case | None = None) -> list[Line]:
    """One line for every variant, among which are "none" and forced balance."""
    case: dict[str, str | int | float] = {"ranks": shape.ranks, "tokens": shape.tokens}
    case |= more or {}
    case |= {"hidden": shape.hidden, "ffn": shape.ffn}
    case |= {"experts": shape.experts, "top_k": shape.top_k}
    lines = []
    for name, facts in found.items():
        values = {
            HOST_STEP: facts["step"] * 1e3,
            BUSY: facts["busy"] * 1e3,
            RATE: shape.ranks * shape.tokens / facts["step"],
            SHARE: found[FORCED]["step"] / facts["step"],
            GAIN: found["none"]["step"] / facts["step"],
            LESS: found["none"]["busy"] / facts["busy"],
            BEFORE: facts["before"],
            AFTER: facts["after"],
        }
        lines.append(Line(case | {"policy": name}, values))
    return lines
