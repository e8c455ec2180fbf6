"""What balancing costs where there is nothing to balance: random even routing, step by step.

    python benchmarks/bench_idle.py            # eight processes on one GPU, or two on two cores
    python benchmarks/bench_idle.py --toy      # two CPU processes, tiny

Every rank is a process, as in `bench_ranks_gpu.py`. Steps without balancing and with the default
settings alternate, each pair in another order, so that a drift of the machine hits both; on a GPU
one measurement is eight steps in a row. The cost is the median over pairs of their ratio; the
quartiles say how well it is known. `again` compares two layers without balancing in the same way:
the resolution of the method.

Shapes: T tokens of a rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from bench_ranks_gpu import DEFAULT, EAGER, GRAPHS, MODELS, NONE, Case, Ranks
from harness import Line, Metric, options_parser
from layers import results_of_cases, slowest
from load_cases import Shape, draw
from mps import device_of_rank, report_of_ranks
from timing import in_turns

from ultraep import BalanceConfig, Balancer
from ultraep.workload import Load

AGAIN = "none again"
NO_BALANCING = BalanceConfig(policy="none")
CONFIGS = {NONE: NO_BALANCING, DEFAULT: BalanceConfig(), AGAIN: NO_BALANCING}
PAIRS, ROW = 31, 8  # pairs of measurements, and the steps of one on a GPU
CORES = Shape(hidden=512, ffn=1024, experts=8, top_k=2, tokens=0, ranks=2)
TOY = replace(CORES, hidden=32, ffn=16)
COST = Metric("idle_cost", "ratio", "cost", "+.4f")
LOWER = Metric("idle_cost_lower_quartile", "ratio", "lower quartile", "+.4f")
UPPER = Metric("idle_cost_upper_quartile", "ratio", "upper quartile", "+.4f")
STEP = Metric("step_time_p50", "ms", "none ms", ".3f")


def on_rank(
    rank: int, cases: Sequence[Case], pairs: int, row: int, cuda: bool
) -> Iterator[dict[str, list[float]]]:
    """One process: the pairs of every case."""
    device = device_of_rank(cuda=cuda)
    for case in cases:
        ranks = Ranks(case, rank, device)
        variants, names = ranks.variants, list(CONFIGS)
        for name, config in CONFIGS.items():
            experts = case.shape.experts
            variants.add(name, Balancer(dist.group.WORLD, experts=experts, config=config))
        variants.route(draw(case.load, case.shape))
        for name in names:
            variants.step(name)  # takes memory, measures rates
        variants.check(names)
        calls = {name: ranks.stepper(name, case.mode) for name in names}
        yield in_turns(names, pairs, lambda name: slowest(calls[name], row, device)[0])  # noqa: B023
        variants.close()


def cost_lines(case: Case, measured: dict[str, list[float]]) -> list[Line]:
    none, lines = np.array(measured[NONE]), []
    for name in (DEFAULT, AGAIN):
        lower, middle, upper = np.percentile(np.array(measured[name]) / none - 1, (25, 50, 75))
        values = {STEP: 1e3 * float(np.median(none)), COST: middle, LOWER: lower, UPPER: upper}
        about: dict[str, str | int | float] = {
            "tokens": case.shape.tokens,
            "mode": case.mode,
            "load": case.load.name,
        }
        lines.append(Line(about | {"layer": name}, values))
    return lines


def main(argv: Sequence[str]) -> None:
    options = options_parser(__doc__).parse_args(argv[1:])
    cuda = torch.cuda.is_available() and not options.toy
    model, shape = MODELS["qwen"] if cuda else ("cores", TOY if options.toy else CORES)
    tokens = (64,) if options.toy else (4096, 512) if cuda else (2048, 256)
    pairs = 3 if options.toy else PAIRS // 3 if options.quick else PAIRS
    even = Load("random even")
    cases = [
        Case(model=model, shape=replace(shape, tokens=count), load=even, mode=mode)
        for count in tokens
        for mode in ((EAGER, GRAPHS) if cuda else (EAGER,))
    ]
    title = f"EP{shape.ranks}, {model}: {shape.about}, cost of balancing an even load"
    with report_of_ranks("idle", argv, shape.ranks, cuda=cuda) as report:
        report.section = "cost"
        results = results_of_cases(shape.ranks, on_rank, cases, pairs, ROW if cuda else 1, cuda)
        for case, measured in results:
            report.add(title, cost_lines(case, measured))
            report.write(options.json)


if __name__ == "__main__":
    main(sys.argv)
