"""What planning takes a GPU, by objective and rates, on generated and on recorded loads.

    python benchmarks/bench_planner_gpu.py                   # needs a GPU; three minutes
    python benchmarks/bench_planner_gpu.py --routing FILE    # also recorded routing: arrays *_ids
    python benchmarks/bench_planner_gpu.py --toy             # tiny, for CI; also without a GPU

Every plan is compared with the plan of the CPU before it is timed. `plan` is captured once for each
size and objective, in a graph of 20 calls; other loads are put in the place of the first ones and
the graph is replayed. `kernels` times each launch of a plan alone. Times of Triton's interpreter,
which runs `--toy` without a GPU, say nothing about a device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from harness import QUEUED, Bench, Line, Metric, Mismatch, Samples, common_options, section_option
from load_cases import ORDERED, SHUFFLED, Kind, RecordedRouting
from timing import Gpu, Host, on_gpu, time_call

import ultraep
from ultraep import BalanceConfig, Rates, Topology
from ultraep.arrays import IntArray
from ultraep.runtime.control import ControlPlane

INNER = 20  # calls in one graph
RECORDED_EXPERTS = 32  # of a layer of gpt-oss-20b; several layers side by side have more
CONFIGS = {
    "balance": BalanceConfig(objective="balance"),
    "time, links": BalanceConfig(rates=Rates(row=5300, copy=4_100_000, layer=1_200_000)),
    "time, copies": BalanceConfig(rates=Rates(row=5300, each=1_000_000, layer=1_200_000)),
    "time, both": BalanceConfig(
        rates=Rates(row=100_000, copy=200_000_000, each=1_000_000, layer=5_000_000)
    ),
}
COUNT = Metric("loads", "loads", "n", ".0f", sum)
TYPICAL = Metric("plan_time_p50", "us", "us", ".2f", median)
SLOWEST = Metric("plan_time_max", "us", "slowest us", ".2f", max)
TWIN = Metric("cpu_plan_time_p20", "us", "CPU us", ".0f", median)
COPIES = Metric("copies_mean", "copies", "copies", ".1f")
AFTER = Metric("imbalance_mean", "max/mean", "after", ".3f")
LAUNCH = Metric("kernel_time_p50", "us", "us", ".2f", median)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is measured."""

    sizes: tuple[tuple[int, int], ...]  # ranks and experts
    ratios: tuple[float, ...]
    seeds: int
    windows: int  # recorded microbatches of each size
    tokens: int  # of a rank; of a recorded microbatch, of all of them
    rounds: int
    objectives: tuple[str, ...] = tuple(CONFIGS)
    routing: Path | None = None


FULL = Scale(
    sizes=((8, 32), (8, 128), (16, 32), (16, 128), (32, 32), (32, 256), (64, 64), (64, 256)),
    ratios=(1.2, 1.5, 2.0, 3.0),
    seeds=2,
    windows=12,
    tokens=8192,
    rounds=25,
)
QUICK = replace(FULL, sizes=((8, 32), (64, 256)), ratios=(1.5, 3.0), seeds=1, windows=4)
TOY = Scale(
    sizes=((4, 8),),
    ratios=(2.0,),
    seeds=1,
    windows=1,
    tokens=32,
    rounds=1,
    objectives=("balance", "time, both"),
)


def loads_of(ranks: int, experts: int, scale: Scale) -> list[tuple[str, IntArray]]:
    """Kind and [R, E] loads of every microbatch."""
    found = [
        (family, Kind(family, ratio).draw(ranks, experts, tokens=scale.tokens, seed=seed))
        for family in (ORDERED, SHUFFLED)
        for ratio in scale.ratios
        for seed in range(scale.seeds)
    ]
    if scale.routing is not None:
        layers = max(1, experts // RECORDED_EXPERTS)
        routing = RecordedRouting(scale.routing, experts // layers, scale.tokens)
        every = [loads for loads, _ in routing.microbatches(ranks)]
        groups = [every[begin : begin + layers] for begin in range(0, len(every), layers)]
        whole = [np.concatenate(group, axis=1) for group in groups if len(group) == layers]
        step = max(1, len(whole) // scale.windows)
        found += [("recorded", loads) for loads in whole[::step][: scale.windows]]
    return found


class Planned:
    """Plans of one size and config on the device, for whatever loads are put there."""

    def __init__(self, topology: Topology, config: BalanceConfig, loads: IntArray) -> None:
        self.topology, self.config = topology, config
        self.control = ControlPlane(topology, config, rows=1)
        self.loads = torch.from_numpy(loads).to(self.control.device, torch.int32)

    def put(self, loads: IntArray) -> ultraep.Plan:
        """Plan other loads on both sides; the plan, which must be the same."""
        self.loads.copy_(torch.from_numpy(loads))
        wanted = ultraep.plan(loads, self.topology, self.config, backend="cpu")
        found = self.call().to_host()
        self.control.check()
        same_loads = np.array_equal(found.rank_loads, wanted.rank_loads)
        if found.digest() != wanted.digest() or not same_loads:
            raise Mismatch(f"the plan for {self.topology}, {self.config}")
        return wanted

    def call(self) -> Any:
        return self.control.plan(self.loads)

    @property
    def launches(self) -> dict[str, Callable[[], None]]:
        """Every launch of a plan, by the name of its kernel."""
        planner = self.control._planner
        found: dict[str, Callable[[], None]] = {"sum_loads": partial(planner.sum, self.loads)}
        found["try_rungs" if planner.timed else "search"] = planner.place
        return found | {"split": partial(planner.lay_out, self.loads)}


def plans(bench: Bench) -> None:
    """All sizes, objectives and loads."""
    for ranks, experts in bench.scale.sizes:
        topology, samples = Topology(ranks=ranks, experts=experts), Samples()
        microbatches = loads_of(ranks, experts, bench.scale)
        for objective in bench.scale.objectives:
            config = CONFIGS[objective]
            planned = Planned(topology, config, microbatches[0][1])
            planned.put(microbatches[0][1])
            watch = bench.clock.stopwatch(planned.call, INNER)
            for kind, loads in microbatches:
                plan = planned.put(loads)
                us = watch()
                twin = partial(ultraep.plan, loads, topology, config, backend="cpu")
                case = {"ranks": ranks, "experts": experts, "objective": objective, "load": kind}
                values = {COUNT: 1, TYPICAL: us, SLOWEST: us, COPIES: plan.num_replicas}
                values[TWIN] = 1e6 * time_call(twin, repeats=5, warmup=1).p20
                samples.add(case, values | {AFTER: plan.imbalance})
        bench.table("plans", samples.lines())


def kernels(bench: Bench) -> None:
    """Each launch of a plan alone, with the usual loads."""
    for ranks, experts in bench.scale.sizes:
        lines = []
        loads = Kind(SHUFFLED, bench.scale.ratios[-1]).draw(
            ranks, experts, tokens=bench.scale.tokens, seed=0
        )
        for objective in bench.scale.objectives:
            topology = Topology(ranks=ranks, experts=experts)
            planned = Planned(topology, CONFIGS[objective], loads)
            planned.put(loads)
            for kernel, launch in planned.launches.items():
                case = {"ranks": ranks, "experts": experts, "objective": objective}
                us = bench.clock.stopwatch(launch, INNER)()
                lines.append(Line(case | {"kernel": kernel}, {LAUNCH: us}))
        bench.table("kernels", lines)


SECTIONS = {"plans": plans, "kernels": kernels}


def main(argv: Sequence[str]) -> None:
    """Print the tables, and write their rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    common_options(parser)
    section_option(parser, SECTIONS)
    parser.add_argument("--routing", type=Path, metavar="FILE", help="recorded routing, .npz")
    options = parser.parse_args(argv[1:])
    gpu = on_gpu(toy=options.toy)
    scale = TOY if options.toy else QUICK if options.quick else FULL
    scale = replace(scale, routing=options.routing)
    clock = Gpu(scale.rounds, QUEUED) if gpu else Host(1, 0)
    bench = Bench.of("planner", argv, scale, clock, options.json)
    bench.run(SECTIONS, options.only)


if __name__ == "__main__":
    main(sys.argv)
