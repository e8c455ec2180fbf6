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
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from bench_ranks_gpu import DEFAULT, MODELS, NONE, TOY, Size, Variants, stepper
from harness import Line, Metric, options_parser
from layers import on_ranks, slowest
from mps import device_of_rank, report_of_ranks
from timing import Call, in_turns

from ultraep import BalanceConfig

AGAIN = "none again"
NO_BALANCING = BalanceConfig(policy="none")
CONFIGS = {NONE: NO_BALANCING, DEFAULT: BalanceConfig(), AGAIN: NO_BALANCING}
PAIRS, ROW = 31, 8  # pairs of measurements, and the steps of one on a GPU
CORES = replace(
    TOY, model="two cores", hidden=512, ffn=1024, all_tokens=(2048, 256), experts=8, top_k=2
)
COST = Metric("idle_cost", "ratio", "cost", "+.4f")
LOWER = Metric("idle_cost_lower_quartile", "ratio", "lower quartile", "+.4f")
UPPER = Metric("idle_cost_upper_quartile", "ratio", "upper quartile", "+.4f")
STEP = Metric("step_time_p50", "ms", "none ms", ".3f")


def on_rank(rank: int, size: Size, cuda: bool, pairs: int) -> dict[str, Any]:
    """One process: the pairs of every mode."""
    device = device_of_rank(cuda=cuda)
    variants = Variants(size, rank, device, ratio=1.0, configs=CONFIGS)
    variants.route(None)
    for name in variants.layers:
        variants.step(name)  # takes memory, measures rates
    variants.check()
    measured: dict[str, Any] = {}
    for mode in size.modes if cuda else ("eager",):
        calls = {name: stepper(variants, name, mode) for name in variants.layers}
        measured[mode] = compare(calls, pairs, ROW if cuda else 1, device)
    variants.close()
    return measured


def compare(
    steps: dict[str, Call], pairs: int, row: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of a step, `row` steps in a row, one for every name and pair."""
    return in_turns(list(steps), pairs, lambda name: slowest(steps[name], row, device)[0])


def cost_lines(size: Size, measured: dict[str, Any]) -> list[Line]:
    lines = []
    for mode in measured:
        none = np.array(measured[mode][NONE])
        for name in (DEFAULT, AGAIN):
            costs = np.array(measured[mode][name]) / none - 1
            lower, middle, upper = np.percentile(costs, (25, 50, 75))
            values = {STEP: 1e3 * float(np.median(none)), COST: middle, LOWER: lower, UPPER: upper}
            lines.append(Line({"tokens": size.tokens, "mode": mode, "layer": name}, values))
    return lines


def main(argv: Sequence[str]) -> None:
    options = options_parser(__doc__).parse_args(argv[1:])
    cuda = torch.cuda.is_available() and not options.toy
    size = TOY if options.toy else MODELS["qwen"] if cuda else CORES
    pairs = 3 if options.toy else PAIRS // 3 if options.quick else PAIRS
    with report_of_ranks("idle", argv, size.ranks, cuda=cuda) as report:
        for tokens in size.all_tokens:
            case = replace(size, tokens=tokens)
            measured = on_ranks(size.ranks, on_rank, case, cuda, pairs)
            title = f"EP{size.ranks}, {size.model}: {size.about}"
            report.section = "cost"
            report.add(f"{title}, cost of balancing an even load", cost_lines(case, measured))
            report.write(options.json)


if __name__ == "__main__":
    main(sys.argv)
