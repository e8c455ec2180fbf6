"""Planning by time, compared with no replicas and fixed tolerances: eight ranks on one GPU.

    python benchmarks/bench_cost_gpu.py           # a GPU with green contexts, and cuda-python
    python benchmarks/bench_cost_gpu.py --toy     # tiny; without a GPU, only plans

The GPU is split as in bench_layer_gpu.py. A layer, forward and backward, is captured once for each
number of tokens. Then the plans of all variants are adopted in turn and replayed; replicas are sent
in every step. Planning time is not included (bench_control.py measures it). The result is the
median over rounds of the time divided by the time of `none` in the same round.

The rates are fitted in advance for each number of tokens, from the times of `none` and of the
tolerances with all loads.

Shapes: T tokens of a rank, K experts per token, R ranks, E experts, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from bench_cost import EVEN, NONE, configs, lines_of, named, summary
from card import Partition, World, row_capacity, split
from card import Size as LayerSize
from harness import KERNELS, Bench, Case, Line, main
from layers import plan_values
from load_cases import HotRank, even
from timing import in_turns

import ultraep
from ultraep import BalanceConfig, Plan, Rates, Topology
from ultraep.arrays import IntArray


@dataclass(frozen=True, kw_only=True)
class Size(LayerSize):
    """A layer and what is measured with it."""

    all_tokens: tuple[int, ...] = (4096, 1024, 256, 64, 16384)
    ratios: tuple[float, ...] = (EVEN, 1.05, 1.1, 1.5, 3.0)
    largest: float = 1.5e6  # limit of the busiest rank's rows times the ranks, by memory
    rounds: int = 3


QWEN = Size(model="Qwen3-30B", hidden=2048, ffn=768, experts=128, tokens=0)
TOY = Size(
    model="toy",
    hidden=256,
    ffn=128,
    experts=16,
    top_k=2,
    ranks=2,
    tokens=0,
    all_tokens=(64,),
    ratios=(EVEN, 1.5),
    rounds=2,
)


def loads_of(size: Size, ratio: float) -> IntArray:
    return even(size) if ratio == EVEN else HotRank(ratio).draw(size)


def plans_of(size: Size, loads: IntArray, rates: Rates | None) -> dict[str, Plan]:
    """The plan of every variant; without rates, not by time."""
    homes = [expert * size.ranks // size.experts for expert in range(size.experts)]
    topology = Topology(ranks=size.ranks, experts=size.experts, slots=1, homes=homes)
    by_time = BalanceConfig(rates=rates) if rates is not None else None
    return {n: ultraep.plan(loads, topology, config) for n, config in configs(by_time).items()}


def fitted(plans: Sequence[Plan], seconds: Sequence[float]) -> Rates:
    """Fit non-negative rates to the times of these plans."""
    from scipy.optimize import nnls  # only needed on a GPU

    facts = np.array([_facts(plan) for plan in plans], dtype=np.float64)
    scale = facts.max(axis=0)
    scale[scale == 0] = 1
    fitted_rates, _ = nnls(facts / scale, np.array(seconds))
    _, row, copy, each, layer = (fitted_rates / scale).tolist()
    return Rates.from_seconds(row=row, copy=copy, each=each, layer=layer)


def _facts(plan: Plan) -> list[float]:
    """The terms of the time of a plan, each to be multiplied by a rate."""
    transfers = max(plan.max_ingress, plan.max_egress)
    copies = plan.num_replicas
    return [1, int(plan.rank_loads.max()), transfers, copies, int(copies > 0)]


def take_turns(world: World, plans: Mapping[str, Plan], rounds: int) -> dict[str, list[float]]:
    """Seconds by variant and round; replicas are sent in every step."""

    def seconds(name: str) -> float:
        world.adopt(plans[name])
        return world.time(1, warmup=1) / 1e3

    return in_turns(list(plans), rounds, seconds, warmup=0)


def run_tokens(bench: Bench, parts: Sequence[Partition], size: Size) -> list[dict[str, Any]]:
    """Run all loads with one number of tokens: first fit the rates, then compare."""
    ratios = [r for r in size.ratios if r * size.rows * size.ranks <= size.largest] or [EVEN]
    loads = {ratio: loads_of(size, ratio) for ratio in ratios}
    world = World(size, parts)
    first = plans_of(size, loads[ratios[0]], None)
    most = max(plans_of(size, drawn, None)[NONE].rank_loads.max() for drawn in loads.values())
    world.regroup(first[named(0.0)], row_capacity(int(most)))
    world.route(loads[ratios[0]])
    world.adopt(first[NONE])
    world.capture()
    known: list[tuple[Plan, float]] = []
    for drawn in loads.values():
        world.route(drawn)
        plans = plans_of(size, drawn, None)
        times_of = take_turns(world, plans, 1)
        known += [(plans[name], median(times)) for name, times in times_of.items()]
    world.check()
    rates = fitted(*zip(*known, strict=True))
    bench.report.note(f"... {size.tokens} tokens: {rates}")
    cases = []
    for ratio, drawn in loads.items():
        world.route(drawn)
        plans = plans_of(size, drawn, rates)
        seconds = take_turns(world, plans, size.rounds)
        copies = {name: plan.num_replicas for name, plan in plans.items()}
        before = plans[NONE].initial_imbalance
        about = {"tokens": size.tokens, "ratio": ratio, "before": before}
        cases.append({**about, "seconds": seconds, "copies": copies})
    world.check()
    world.leave()
    return cases


def only_plans(bench: Bench, size: Size) -> None:
    """Without a GPU: only plan the loads, with example rates."""
    bench.report.note("No GPU: plans only, with example rates; nothing is timed.")
    lines = []
    for tokens in size.all_tokens:
        sized = replace(size, tokens=tokens)
        for ratio in size.ratios:
            plans = plans_of(sized, loads_of(sized, ratio), Rates(row=300_000, copy=150_000_000))
            for name, plan in plans.items():
                case: Case = {"tokens": tokens, "ratio": ratio, "variant": name}
                lines.append(Line(case, plan_values(plan)))
    bench.table(size.model, lines, section="plans")


def cost(bench: Bench) -> None:
    """Measure all numbers of tokens on one GPU."""
    size: Size = bench.scale
    if not bench.on_gpu:
        only_plans(bench, size)
        return
    parts = split(size.ranks, size.sms)
    about = f"{size.model}: {size.about}"
    cases: list[dict[str, Any]] = []
    for tokens in size.all_tokens:
        measured = run_tokens(bench, parts, replace(size, tokens=tokens))
        for case in measured:
            bench.table(f"{about}, EP{size.ranks} on {size.sms} SMs each", lines_of(case))
        cases += measured
    summary(bench, cases)


QUICK = replace(QWEN, all_tokens=(256, 4096), ratios=(EVEN, 1.1, 1.5))


if __name__ == "__main__":
    scales = {"toy": TOY, "quick": QUICK, "full": QWEN}
    main("cost_gpu", __doc__, {"": cost}, scales, needs=KERNELS)
