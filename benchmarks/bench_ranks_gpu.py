"""A MoE layer in eight processes on one GPU, without balancing and with default settings.

    python benchmarks/bench_ranks_gpu.py                     # needs a GPU and CUDA MPS
    python benchmarks/bench_ranks_gpu.py --quick             # two models, one in graphs
    python benchmarks/bench_ranks_gpu.py --models qwen --tokens 512,8192 --imbalance 1.5,3
    python benchmarks/bench_ranks_gpu.py --only graphs       # replayed CUDA graphs
    python benchmarks/bench_ranks_gpu.py --forward           # forward only, as in a prefill
    python benchmarks/bench_ranks_gpu.py --quantised fp8     # forward, experts in FP8
    python benchmarks/bench_ranks_gpu.py --toy               # two CPU processes, tiny, for CI

Every process is a rank with a share of the multiprocessors of the GPU (`mps.py`) and launches its
own kernels. `eager` and `graphs` sweep the imbalance of the load "zipf ordered". `slots` takes the
load "hot rank", which one slot cannot balance, and balances it with one, two and three slots.

The unbalanced layer, the balanced ones and random even routing alternate; every turn begins with an
untimed step, because the clock of a GPU depends on the load before. The slowest rank counts. Times
are medians over rounds; so are gains and shares, of the ratios within each round. The ranks
measure the rates, as in any training. Outputs and gradients of every variant are compared with the
unbalanced layer before the timing, outputs also after it. If a case fails, the others still run.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import Line, Metric, comma_list, options_parser
from layers import (
    AFTER,
    BEFORE,
    COPIES,
    Variants,
    check_close,
    median_ratio,
    results_of_cases,
    slowest,
    step_values,
)
from load_cases import Shape, draw, hot
from mps import device_of_rank, phase, report_of_ranks
from timing import free, in_turns, on_gpu, print_progress

import ultraep
from ultraep import BalanceConfig
from ultraep.workload import Load

EVEN, NONE, DEFAULT = "random even routing", "none", "default"
EAGER, GRAPHS, SLOTS = "eager", "graphs", "slots"  # sections
OF_EVEN = Metric("share_of_random_even_routing", "share", "of even", ".3f")
ROUNDS, FEWEST, MOST_STEPS = 11, 3, 4  # rounds of a case; steps that are timed together
LONG_STEP = 0.05  # seconds: longer steps are timed one by one
LIMIT = 150.0  # seconds of one case; the first one compiles kernels
NONE_CONFIG = BalanceConfig(policy="none")
Step = Callable[[], torch.Tensor]
Facts = dict[str, dict[str, Any]]  # per variant


@dataclass(frozen=True, kw_only=True)
class Case:
    """One load of one layer.

    slots: of the balanced variants.   seconds: of the rounds, at least `FEWEST` of them.
    """

    model: str
    shape: Shape
    load: Load
    mode: str = EAGER
    slots: tuple[int, ...] = (1,)
    forward: bool = False
    quantised: str | None = None
    seconds: float = 20.0


LARGE: dict[str, Any] = {"experts": 128, "top_k": 8, "tokens": 0, "ranks": 8}
MODELS = {
    "qwen": ("Qwen3-235B", Shape(hidden=4096, ffn=1536, **LARGE)),
    "deepseek": ("DeepSeek-V3, half of its experts", Shape(hidden=7168, ffn=2048, **LARGE)),
    "gpt-oss": ("gpt-oss-120b", Shape(hidden=2880, ffn=2880, **LARGE | {"top_k": 4})),
}
QUICK = ("qwen", "gpt-oss")
TOY = "toy", Shape(hidden=32, ffn=16, experts=8, top_k=2, ranks=2, tokens=0)
IMBALANCES = (1.0, 1.5, 2.0, 3.0, 7.0)
SPREAD = Load("hot rank", 2.87)


def name_of(slots: int) -> str:
    return DEFAULT if slots == 1 else f"{slots} slots"


class Ranks:
    """The variants of one rank; balanced layers stay for all loads of a shape."""

    def __init__(self, case: Case, rank: int, device: torch.device) -> None:
        self.case = case
        self.variants = Variants(
            case.shape, rank, device, forward=case.forward, quantised=case.quantised
        )
        self.pool: Any = None

    def fits(self, case: Case) -> bool:
        """Whether a case has the same layers; graphs are captured from new ones."""
        return case.mode == EAGER and case == replace(self.case, load=case.load, slots=case.slots)

    def add(self, case: Case) -> list[str]:
        """Make the layers of a case; return their names.

        The unbalanced one is new for every load, because its memory grows with the busiest rank
        and is kept. It has memory for all its rows from the first step.
        """
        balancer = partial(
            ultraep.Balancer, dist.group.WORLD, experts=case.shape.experts, timeout=120.0
        )
        ratio = case.load.imbalance or 1.0
        rows: Any = int(1.1 * ratio * case.shape.rows) if ratio > 1 else "auto"
        self.variants.remove(NONE)
        free()
        self.variants.add(NONE, balancer(config=NONE_CONFIG, capacity=rows))
        names = [NONE]
        for slots in case.slots:
            names.append(name_of(slots))
            if names[-1] not in self.variants.layers:
                self.variants.add(names[-1], balancer(slots=slots))
        return names

    def measure(self, case: Case) -> Facts:
        """Seconds per step of every variant and of even routing, in turn."""
        variants, names = self.variants, self.add(case)
        variants.route(draw(case.load, case.shape))
        for name in names:
            variants.step(name)  # allocates memory, measures rates
        variants.check([NONE, *names])
        plans = {name: variants.plan(name) for name in names}
        # All graphs of a case share one pool, because they run one at a time.
        self.pool = torch.cuda.graph_pool_handle() if case.mode == GRAPHS else None
        steps = {name: self.stepper(name, case.mode) for name in names}
        routed = variants.router.ids, variants.router.gates
        variants.route(draw(Load("random even"), case.shape))
        even = variants.router.ids, variants.router.gates
        steps[EVEN] = self.stepper(NONE, case.mode)

        def seconds(name: str, count: int) -> float:
            variants.router.ids, variants.router.gates = even if name == EVEN else routed
            steps[name]()
            return slowest(steps[name], count, variants.device)[0]

        once = {name: seconds(name, 1) for name in steps}  # the same on all ranks
        count = 1 if max(once.values()) > LONG_STEP else MOST_STEPS
        rounds = int(case.seconds / (1 + count) / sum(once.values()))
        rounds = min(ROUNDS, max(FEWEST, rounds))
        seconds_of = in_turns(list(steps), rounds, partial(seconds, count=count), warmup=1)
        variants.router.ids, variants.router.gates = routed
        wanted = steps[NONE]().clone()
        for name in names:
            check_close(f"outputs of {name} after the timing", steps[name](), wanted)
        facts: Facts = {
            name: {
                "step": median(times),
                "gain": median_ratio(seconds_of[NONE], times),
                "of_even": median_ratio(seconds_of[EVEN], times),
            }
            for name, times in seconds_of.items()
        }
        for name, plan in plans.items():
            facts[name] |= {
                "before": plan.initial_imbalance,
                "after": plan.imbalance,
                "copies": float(plan.num_replicas),
                "routes": plan.digest(),
            }
        return facts

    def stepper(self, name: str, mode: str) -> Step:
        """Return a function that runs one step of a variant, eagerly or as a graph."""
        if mode != GRAPHS:
            return partial(self.variants.step, name)
        graph = torch.cuda.CUDAGraph()
        self.variants.step(name)
        self.variants.forget()
        free()
        dist.barrier()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="relaxed"):
            y = self.variants.step(name)

        def replay() -> torch.Tensor:
            graph.replay()
            return y

        return replay


def on_rank(rank: int, cases: Sequence[Case], cuda: bool) -> Iterator[Facts]:
    """Measure all cases in one process."""
    device, ranks = device_of_rank(cuda=cuda), None
    for case in cases:
        with phase("", LIMIT, time.time() + LIMIT):
            if ranks is None or not ranks.fits(case):
                if ranks is not None:
                    ranks.variants.close()
                ranks = None  # frees its memory
                free()
                ranks = Ranks(case, rank, device)
            facts = ranks.measure(case)
        if rank == 0:
            about = f"{case.model}, {case.shape.tokens} tokens, {case.load.name}, {case.mode}"
            print_progress(f"{about}: {1e3 * facts[DEFAULT]['step']:.1f} ms")
        yield facts
    if ranks is not None:
        ranks.variants.close()


def lines_of(case: Case, facts: Facts) -> list[Line]:
    about: dict[str, str | int | float] = {"model": case.model, "tokens": case.shape.tokens}
    about |= {"mode": case.mode, "load": case.load.name}
    if case.forward:
        about["pass"] = "forward"
    if case.quantised is not None:
        about["experts"] = case.quantised
    return [
        Line(about | {"variant": name}, values_of(case.shape, variant), variant.get("routes", ""))
        for name, variant in facts.items()
    ]


def values_of(shape: Shape, variant: Mapping[str, Any]) -> dict[Metric, float | None]:
    ms = 1e3 * variant["step"]
    return {
        **step_values(shape, ms, variant["gain"] * ms),
        OF_EVEN: variant["of_even"],
        BEFORE: variant.get("before"),
        AFTER: variant.get("after"),
        COPIES: variant.get("copies"),
    }


def cases_of(options: Any) -> list[Case]:
    """The cases that these options select; the longest ones last."""
    names = options.models or (QUICK if options.quick else MODELS)
    models = [TOY] if options.toy else [MODELS[name] for name in names]
    every = options.tokens or ((64,) if options.toy else (512, 8192))
    tiny = (1.0, 1.3) if options.toy else IMBALANCES
    loads = [hot(imbalance) for imbalance in options.imbalance or tiny]
    common: dict[str, Any] = {
        "forward": options.forward or options.quantised is not None,
        "quantised": options.quantised,
        "seconds": options.seconds or (0.0 if options.toy else 1.0 if options.quick else 20.0),
    }
    spread: dict[str, Any] = {
        "load": Load("hot rank", 1.5) if options.toy else SPREAD,
        "slots": (1, 2, 3),
    }
    cases, limit = [], 3 if options.quick else inf
    for model, shape in models:
        for tokens in every:
            sized = {"model": model, "shape": replace(shape, tokens=tokens), **common}
            cases += [Case(**sized, load=load) for load in loads if EAGER in options.only]
            first = model == models[0][0] or not options.quick
            if SLOTS in options.only and first and tokens == every[-1]:
                cases.append(Case(**sized, **spread))
            few = options.quick and tokens != every[-1]
            if GRAPHS in options.only and first and not few and not options.toy:
                captured = [load for load in loads if (load.imbalance or 1) <= limit]
                cases += [Case(**sized, load=load, mode=GRAPHS) for load in captured]
    return cases


def main(argv: Sequence[str]) -> None:
    parser = options_parser(__doc__)
    text = f"models to measure: {', '.join(MODELS)} (default: all)"
    models = comma_list(MODELS)
    parser.add_argument("--models", type=models, metavar="A,B", help=text)
    sections = (EAGER, GRAPHS, SLOTS)
    text = f"run only these sections: {', '.join(sections)}"
    only = comma_list(sections)
    parser.add_argument("--only", type=only, default=[*sections], metavar="A,B", help=text)
    text = "tokens of a rank (default: 512,8192)"
    parser.add_argument("--tokens", type=numbers_of(int), metavar="N,M", help=text)
    text = "imbalance of the loads, such as 1.5,3 (default: 1,1.5,2,3,7)"
    parser.add_argument("--imbalance", type=numbers_of(float), metavar="X,Y", help=text)
    text = "time the rounds of a case for this long (default: 20, with --quick 1)"
    parser.add_argument("--seconds", type=float, metavar="S", help=text)
    text = "time forward only"
    parser.add_argument("--forward", action="store_true", help=text)
    text = "time forward only, with frozen experts in this format: fp8"
    parser.add_argument("--quantised", choices=["fp8"], metavar="FORMAT", help=text)
    options = parser.parse_args(argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # ends the ranks
    cuda = on_gpu(toy=options.toy) and not options.toy
    cases, failed = cases_of(options), []
    ranks = cases[0].shape.ranks
    with report_of_ranks("ranks_gpu", argv, ranks, cuda=cuda) as report:
        for case, facts in results_of_cases(ranks, on_rank, cases, cuda):
            if facts is None:
                failed.append(f"{case.model}, {case.shape.tokens} tokens, {case.load.name}")
                report.note(f"failed: {failed[-1]}, {case.mode}")
                continue
            report.section = SLOTS if len(case.slots) > 1 else case.mode
            report.add(f"EP{ranks}: {case.shape.about}", lines_of(case, facts))
            report.write(options.json)
    if failed:
        raise SystemExit(f"{len(failed)} cases failed")


def numbers_of(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return the type of an option with comma-separated numbers."""
    return lambda text: tuple(kind(number) for number in text.split(","))


if __name__ == "__main__":
    main(sys.argv)
