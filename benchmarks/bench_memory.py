"""Memory and traffic of the busiest rank, unbalanced and balanced, with default settings.

    python benchmarks/bench_memory.py            # needs a GPU and CUDA MPS
    python benchmarks/bench_memory.py --toy      # two CPU processes, tiny, for CI

Every process is a rank (`mps.py`). A training step runs several layers forward, then all of them
backward, so the tensors that backward needs exist once per layer. Prefill runs one layer forward.
The layers have the same weights, which do not count. Bytes of the rank that needs most:

    shared   memory that ranks map: rows, spare slots and their gradients; once for all layers
    step     the most that a step allocates; on a CPU, the tensors that autograd saves
    rows     of tokens that the rank receives from others in one dispatch, computed from the plan
    weights  of replicas that the rank receives for one forward pass, computed from the plan

16 layers do not fit on one GPU that eight ranks share. Their peak is computed from two measured
numbers of layers, between which it grows linearly. `fits` compares it with an eighth of the GPU.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import Line, Metric, options_parser
from layers import Variants, results_of_cases
from load_cases import Shape, draw, hot
from mps import device_of_rank, phase, report_of_ranks
from timing import free, on_gpu, print_progress

import ultraep
from ultraep import Plan

IMBALANCES: tuple[float, ...] = (1.0, 1.5, 2.0, 3.0, 7.0)
QUICK: tuple[float, ...] = (1.0, 3.0, 7.0)
POLICIES = ("none", "ultraep")
SHARED = Metric("shared_memory", "MB", "shared MB", ".1f")
STEP_MEMORY = Metric("peak_of_a_step", "MB", "step MB", ".1f")
PEAK = Metric("peak_but_weights", "MB", "all MB", ".1f")
OVER = Metric("share_of_none", "share", "of none", ".3f")
SHARE = Metric("share_of_an_eighth_of_the_gpu", "share", "of 1/8 GPU", ".2f")
ROWS = Metric("received_rows", "MB", "rows MB", ".1f")
WEIGHTS = Metric("received_weights", "MB", "weights MB", ".1f")
TRAINING, PREFILL = "training", "prefill"
MANY = 16  # layers, computed
LIMIT = 150.0  # seconds of one case; the first one compiles kernels

QWEN = Shape(hidden=4096, ffn=1536, experts=128, top_k=8, tokens=8192, ranks=8)
TOY = Shape(hidden=64, ffn=32, experts=16, top_k=2, tokens=64, ranks=2)


@dataclass(frozen=True)
class Case:
    """Some layers with one load."""

    shape: Shape
    imbalance: float
    policy: str
    layers: int
    what: str = TRAINING


def measure(case: Case, rank: int, device: torch.device) -> dict[str, Any]:
    """Bytes of the rank with most."""
    shape = case.shape
    balancer = ultraep.Balancer(
        dist.group.WORLD, experts=shape.experts, policy=case.policy, timeout=120.0
    )
    variants = Variants(shape, rank, device, forward=case.what == PREFILL)
    variants.add(case.policy, balancer, case.layers)
    loads = draw(hot(case.imbalance), shape)
    variants.route(loads)
    for _ in range(2):
        variants.step(case.policy)  # loads kernels, measures rates, allocates what steps share
    plan = variants.plan(case.policy)
    shared, step = balancer.plane(device).nbytes, step_bytes(variants, case.policy)
    everywhere: list[Any] = [None] * shape.ranks
    dist.all_gather_object(everywhere, (shared + step, shared, step))
    variants.close()
    peak, shared, step = max(everywhere)
    total = torch.cuda.mem_get_info()[1] / shape.ranks if device.type == "cuda" else 0
    item = variants.dtype.itemsize
    rows, replicas = received(plan)
    return {
        "routes": plan.digest(),
        "peak": peak,
        "shared": shared,
        "step": step,
        "share": total,
        "rows": rows * shape.hidden * item,
        "weights": replicas * 3 * shape.hidden * shape.ffn * item,
    }


def received(plan: Plan) -> tuple[int, int]:
    """Most rows that a rank receives from other ranks, and most replicas."""
    topology = plan.topology
    homes, ranks = topology.home_of_expert, np.arange(topology.ranks)
    own = np.where(homes == ranks[:, None], plan.loads, 0).sum(axis=1)  # rows that stay
    for (expert, host, _), split in zip(plan.replicas, plan.split, strict=True):
        own[homes[expert]] -= split[homes[expert]]
        own[host] += split[host]
    return int((plan.rank_loads - own).max()), plan.max_ingress


def step_bytes(variants: Variants, name: str) -> int:
    """The most bytes that a step allocates."""
    variants.forget()
    if variants.device.type == "cpu":
        return saved_bytes(variants, name)
    free()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    variants.step(name)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def saved_bytes(variants: Variants, name: str) -> int:
    """Bytes of the tensors that autograd saves, each memory once."""
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        variants.step(name)
    return sum(saved.values())


def on_rank(rank: int, cases: Sequence[Case], cuda: bool) -> Iterator[dict[str, Any]]:
    """Measure all cases in one process."""
    device = device_of_rank(cuda=cuda)
    for case in cases:
        with phase("", LIMIT, time.time() + LIMIT):
            facts = measure(case, rank, device)
            free()
        if rank == 0:
            about = f"{case.what}, imbalance {case.imbalance:g}, {case.policy}, {case.layers}"
            print_progress(f"{about}: {facts['peak'] / 1e6:.0f} MB")
        yield facts


def lines_of(measured: dict[Case, dict[str, Any]], many: int) -> list[Line]:
    """Lines of one imbalance: all policies, numbers of layers and passes."""
    peaks = {case: facts["peak"] for case, facts in measured.items()}
    for last in [case for case in measured if case.layers == many]:
        first = replace(last, layers=1)
        if first in peaks:  # otherwise it failed
            slope = (peaks[last] - peaks[first]) / (many - 1)
            peaks[replace(last, layers=MANY)] = peaks[last] + slope * (MANY - many)
    return [line_of(case, peaks, measured) for case in peaks]


def line_of(case: Case, peaks: dict[Case, float], measured: dict[Case, dict[str, Any]]) -> Line:
    facts, none = measured.get(case), peaks.get(replace(case, policy="none"))
    share = next(iter(measured.values()))["share"]
    values: dict[Metric, float | None] = {
        PEAK: peaks[case] / 1e6,
        OVER: None if none is None else peaks[case] / none,
        SHARE: peaks[case] / share if share else None,
    }
    values |= dict.fromkeys((SHARED, STEP_MEMORY, ROWS, WEIGHTS))
    if facts is not None:
        names = {SHARED: "shared", STEP_MEMORY: "step", ROWS: "rows", WEIGHTS: "weights"}
        values |= {metric: facts[name] / 1e6 for metric, name in names.items()}
    about: dict[str, Any] = {"pass": case.what, "imbalance": case.imbalance}
    about |= {"policy": case.policy, "layers": case.layers}
    return Line(about, values, "" if facts is None else facts["routes"])


def main(argv: Sequence[str]) -> None:
    options = options_parser(__doc__).parse_args(argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # ends the ranks
    cuda = on_gpu(toy=options.toy) and not options.toy
    size = TOY if options.toy else QWEN
    imbalances = (1.0, 1.2) if options.toy else QUICK if options.quick else IMBALANCES
    many = 2 if options.toy or options.quick else 8
    kinds = [(1, PREFILL), (1, TRAINING), (many, TRAINING)]
    cases = [Case(size, i, p, n, what) for i in imbalances for n, what in kinds for p in POLICIES]
    with report_of_ranks("memory", argv, size.ranks, cuda=cuda) as report:
        about = f"{size.about}, {size.tokens} tokens per rank, EP{size.ranks}; bytes of one rank"
        results = results_of_cases(size.ranks, on_rank, cases, cuda)
        for _, of_imbalance in groupby(results, lambda result: result[0].imbalance):
            done = dict(of_imbalance)
            measured = {case: facts for case, facts in done.items() if facts is not None}
            for case in done.keys() - measured.keys():
                report.note(f"failed: {case}")
            if measured:
                report.add(about, lines_of(measured, many))
            report.write(options.json)


if __name__ == "__main__":
    main(sys.argv)
