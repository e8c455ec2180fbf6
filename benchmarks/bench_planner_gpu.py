"""Planning time on a GPU, by objective, tolerance and rates, on synthetic loads.

    python benchmarks/bench_planner_gpu.py          # needs a GPU; three minutes
    python benchmarks/bench_planner_gpu.py --toy    # tiny, for CI; also without a GPU

Every plan is compared with the plan of the CPU before it is timed. `plan` is captured once per size
and objective, in a graph of 20 calls, and replayed with other loads. Times of Triton's interpreter,
which runs `--toy` without a GPU, say nothing about a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import numpy as np
import torch
from harness import KERNELS, Bench, Metric, Mismatch, Samples, main
from timing import time_call

import ultraep
from ultraep import BalanceConfig, Rates, Topology, workload
from ultraep.arrays import IntArray
from ultraep.runtime.device_planner import DevicePlanner

INNER = 20  # calls per graph
CONFIGS = {
    "balance": BalanceConfig(objective="balance"),
    "balance, 1 %": BalanceConfig(objective="balance", tolerance=0.01),
    "time, links": BalanceConfig(rates=Rates(row=5300, copy=4_100_000, layer=1_200_000)),
    "time, copies": BalanceConfig(rates=Rates(row=5300, each=1_000_000, layer=1_200_000)),
    "time, both": BalanceConfig(
        rates=Rates(row=100_000, copy=200_000_000, each=1_000_000, layer=5_000_000)
    ),
}
SPEEDS = ", speeds"  # as the end of an objective: ranks differ in speed
KINDS = ("zipf ordered", "zipf shuffled")
COUNT = Metric("loads", "loads", "n", ".0f", sum)
TYPICAL = Metric("plan_time_p50", "us", "us", ".2f", median)
SLOWEST = Metric("plan_time_max", "us", "slowest us", ".2f", max)
TWIN = Metric("cpu_plan_time_p20", "us", "CPU us", ".0f", median)
COPIES = Metric("copies_mean", "copies", "replicas", ".1f")
AFTER = Metric("imbalance_mean", "max/mean", "after", ".3f")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """What one run measures."""

    sizes: tuple[tuple[int, int], ...]  # ranks and experts
    imbalances: tuple[float, ...]
    seeds: int
    tokens: int  # per rank
    rounds: int
    objectives: tuple[str, ...] = (*CONFIGS, f"balance{SPEEDS}", f"time, links{SPEEDS}")


FULL = Scale(
    sizes=((8, 32), (8, 128), (16, 32), (16, 128), (32, 32), (32, 256), (64, 64), (64, 256)),
    imbalances=(1.2, 1.5, 2.0, 3.0),
    seeds=2,
    tokens=8192,
    rounds=25,
)
QUICK = replace(FULL, sizes=((8, 32), (64, 256)), imbalances=(1.5, 3.0), seeds=1)
TOY = Scale(
    sizes=((2, 4),),
    imbalances=(1.5,),
    seeds=1,
    tokens=16,
    rounds=1,
    objectives=("balance", "balance, 1 %", f"time, both{SPEEDS}"),
)


def loads_of(ranks: int, experts: int, scale: Scale) -> list[tuple[str, IntArray]]:
    """Name of the family and [R, E] loads of every microbatch."""
    top_k = min(8, max(1, experts // 8))
    return [
        (load.kind, load.draw(ranks, experts, top_k=top_k, tokens=scale.tokens, seed=seed))
        for load in workload.sweep(
            ranks, experts, top_k=top_k, kinds=KINDS, imbalances=scale.imbalances
        )
        for seed in range(scale.seeds)
    ]


def check_plan(control: DevicePlanner, loads_RE: torch.Tensor, wanted: ultraep.Plan) -> None:
    """Raise unless the device makes the plan of the CPU."""
    plan = control.plan(loads_RE).to_host()
    control.check()
    same_loads = np.array_equal(plan.rank_loads, wanted.rank_loads)
    if plan.digest() != wanted.digest() or not same_loads:
        raise Mismatch(f"the plan for {wanted.topology}, {wanted.config}")


def config_of(objective: str, ranks: int) -> BalanceConfig:
    """Return the config of an objective, if it says so with speeds between 80 and 100 %."""
    config = CONFIGS[objective.removesuffix(SPEEDS)]
    if not objective.endswith(SPEEDS):
        return config
    return replace(config, speeds=np.random.default_rng(0).integers(800, 1001, ranks).tolist())


def plans(bench: Bench) -> None:
    """Measure all sizes, objectives and loads."""
    for ranks, experts in bench.scale.sizes:
        topology, samples = Topology(ranks=ranks, experts=experts), Samples()
        microbatches = loads_of(ranks, experts, bench.scale)
        for objective in bench.scale.objectives:
            config = config_of(objective, ranks)
            control = DevicePlanner(topology, config, rows=1)
            loads_RE = torch.from_numpy(microbatches[0][1]).to(control.device, torch.int32)
            watch = bench.clock.stopwatch(partial(control.plan, loads_RE), INNER)
            for kind, loads in microbatches:
                twin = partial(ultraep.plan, loads, topology, config, backend="cpu")
                plan = twin()
                loads_RE.copy_(torch.from_numpy(loads))
                check_plan(control, loads_RE, plan)
                us = watch()
                case = {"ranks": ranks, "experts": experts, "objective": objective, "load": kind}
                values = {COUNT: 1, TYPICAL: us, SLOWEST: us, COPIES: plan.num_replicas}
                values[TWIN] = 1e6 * time_call(twin, repeats=5, warmup=1).p20
                samples.add(case, values | {AFTER: plan.imbalance})
        bench.table("plans", samples.lines())


if __name__ == "__main__":
    scales = {"toy": TOY, "quick": QUICK, "full": FULL}
    main("planner", __doc__, {"plans": plans}, scales, needs=KERNELS)
