"""Planning by time, compared with no replicas and with fixed tolerances: a layer in processes.

    python benchmarks/bench_cost.py           # EP2, one pinned core and one thread per rank
    python benchmarks/bench_cost.py --toy     # tiny, for CI

Forward and backward, from even routing to a rank with twice the mean load, for few and many tokens.
All variants alternate in one process group, with the same weights and tokens. The result is the
median over rounds of the time divided by the time of `none` in the same round. `none again` shows
how much of a difference is noise. The balancer measures its rates at the first microbatch.

Shapes: T tokens of a rank, K experts per token, R ranks, E experts, D model width.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import Bench, Line, Metric, main
from layers import BEFORE, COPIES, STEP, FixedRouter, layer_with_weights, on_ranks
from load_cases import Shape, draw, hot, ids_with
from timing import in_turns

import ultraep
from ultraep import BalanceConfig
from ultraep.comm import Communicator
from ultraep.experts import Experts
from ultraep.runtime.connect import connect

NONE, AGAIN, TIME = "none", "none again", "time"
OVER_NONE = Metric("time_over_none", "ratio", "over none", ".4f")
OVER_BEST = Metric("time_over_best_tolerance", "ratio", "over best tolerance", ".4f")
TOLERANCES = (0.0, 0.01, 0.02, 0.05, 0.1)
EVEN = 1.0


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """A layer and what is measured with it."""

    ranks: int = 2
    hidden: int = 512
    ffn: int = 1024
    experts: int = 8
    top_k: int = 2
    tokens: int = 0  # set from `all_tokens`
    all_tokens: tuple[int, ...] = (64, 256, 1024, 4096)
    ratios: tuple[float, ...] = (EVEN, 1.05, 1.1, 1.5, 2.0)
    rounds: int = 21


TOY = Size(hidden=16, ffn=32, all_tokens=(32,), ratios=(EVEN, 1.5), rounds=1)
QUICK = Size(all_tokens=(64, 1024), ratios=(EVEN, 1.1, 1.5), rounds=9)


def named(tolerance: float) -> str:
    return f"tolerance {tolerance:g}"


def configs() -> dict[str, BalanceConfig]:
    """The config of every variant."""
    none = BalanceConfig(policy="none")
    by_variant = {NONE: none}
    for tolerance in TOLERANCES:
        by_variant[named(tolerance)] = BalanceConfig(objective="balance", tolerance=tolerance)
    return {**by_variant, TIME: BalanceConfig(), AGAIN: none}


def on_rank(rank: int, size: Size) -> dict[str, Any]:
    """One process: seconds by case, variant and round, and the measured rates."""
    os.environ.pop("ULTRAEP_RATES", None)
    with closing(connect(dist.group.WORLD)) as comm:
        layers, cases = make_layers(size, comm), []
        for tokens, ratio in product(size.all_tokens, size.ratios):
            shape = replace(size, tokens=tokens)
            ids = ids_with(draw(hot(ratio), shape)[rank], shape, rank)
            facts = take_turns(layers, ids, shape, rank)
            cases.append({"tokens": tokens, "ratio": ratio, **facts})
        return {"cases": cases, "rates": str(layers[TIME].balancer.stats()["rates"][0])}


def make_layers(size: Size, comm: Communicator) -> dict[str, ultraep.BalancedMoE]:
    """One layer per variant, all with the same weights."""
    layers, weights = {}, None
    for name, config in configs().items():
        balancer = ultraep.Balancer(comm, experts=size.experts, config=config)
        if weights is None:
            home = balancer.topology.home_experts(balancer.rank).tolist()
            weights = Experts(size.hidden, size.ffn, home).bundle
        layers[name] = layer_with_weights(balancer, FixedRouter(), weights)
    return layers


def take_turns(
    layers: Mapping[str, ultraep.BalancedMoE], ids: torch.Tensor, size: Size, rank: int
) -> dict[str, Any]:
    """Seconds of the slowest rank by variant and round; replicas and imbalance."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(size.tokens, size.hidden, generator=generator)

    def seconds(name: str) -> float:
        moe = layers[name]
        moe.router.ids = ids
        moe.router.gates = torch.full(ids.shape, 1 / size.top_k, requires_grad=True)
        return one_step(moe, tokens)

    seconds_of = in_turns(list(layers), size.rounds, seconds)
    plans = {name: moe.last_plan.to_host() for name, moe in layers.items()}  # type: ignore[union-attr]
    return {
        "seconds": seconds_of,
        "copies": {name: plan.num_replicas for name, plan in plans.items()},
        "before": plans[NONE].initial_imbalance,
    }


def one_step(moe: ultraep.BalancedMoE, tokens: torch.Tensor) -> float:
    """Seconds of forward and backward from a common start, of the slowest rank."""
    x = tokens.clone().requires_grad_()
    moe.zero_grad(set_to_none=True)
    moe.balancer.comm.all_gather(torch.zeros(1))
    begin = time.perf_counter()
    moe(x).sum().backward()
    elapsed = torch.tensor([time.perf_counter() - begin])
    return float(moe.balancer.comm.all_gather(elapsed).max())


def over(seconds: Mapping[str, Sequence[float]], name: str, other: str) -> float:
    """Median over rounds of the time of one variant divided by the time of another."""
    return median(a / b for a, b in zip(seconds[name], seconds[other], strict=True))


def best_tolerance(seconds: Mapping[str, Sequence[float]]) -> str:
    return min(map(named, TOLERANCES), key=lambda name: median(seconds[name]))


def lines_of(case: Mapping[str, Any]) -> list[Line]:
    """One line per variant of a case."""
    seconds = case["seconds"]
    best = best_tolerance(seconds)
    about = {"tokens": case["tokens"], "ratio": case["ratio"]}
    return [
        Line(
            {**about, "variant": name},
            {
                STEP: median(seconds[name]) * 1e3,
                OVER_NONE: over(seconds, name, NONE),
                OVER_BEST: over(seconds, name, best),
                BEFORE: case["before"],
                COPIES: case["copies"][name],
            },
        )
        for name in seconds
    ]


def summary(bench: Bench, cases: Sequence[Mapping[str, Any]]) -> None:
    """Print the worst ratios of planning by time, and the noise."""
    times = [case["seconds"] for case in cases]
    over_none = max(over(seconds, TIME, NONE) for seconds in times)
    over_best = max(over(seconds, TIME, best_tolerance(seconds)) for seconds in times)
    noise = [over(seconds, AGAIN, NONE) for seconds in times]
    bench.report.note(
        f"Worst of {len(cases)} cases: {over_none:.4f} of the time of none, {over_best:.4f} of the "
        f"time of the best tolerance; none again: {min(noise):.4f} to {max(noise):.4f}."
    )


def cost(bench: Bench) -> None:
    """Measure all cases."""
    size: Size = bench.scale
    result = on_ranks(size.ranks, on_rank, size)
    title = f"a layer, forward and backward, EP{size.ranks}: D {size.hidden}, F {size.ffn}"
    for case in result["cases"]:
        bench.table(title, lines_of(case))
    bench.report.note(f"Rates in picoseconds: {result['rates']}")
    summary(bench, result["cases"])


if __name__ == "__main__":
    main("cost", __doc__, {"": cost}, {"toy": TOY, "quick": QUICK, "full": Size()})
