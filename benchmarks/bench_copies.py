"""Replicas of plans with a tolerance, compared with the minimum; and planning time on one core.

    python benchmarks/bench_copies.py                  # synthetic loads and a recorded training
    python benchmarks/bench_copies.py --routing FILE   # also recorded routing, as in bench_plan.py
    python benchmarks/bench_copies.py --only planning  # only the planning time
    python benchmarks/bench_copies.py --toy            # tiny, for CI

The number of replicas does not depend on the machine. Up to 8 ranks the minimum is exact if the
mixed-integer program finishes in time. Up to 16 ranks it is a lower bound (`optimum.py`). For more
ranks it is the smallest number of connections between ranks that a random search finds, ignoring
which experts can move.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from harness import Bench, Case, Extra, Metric, Samples, Values, main
from load_cases import ORDERED, SHUFFLED, Kind, RecordedRouting
from optimum import MOST_RANKS, Unproven, fewest_bound, fewest_copies, fewest_joins
from timing import one_core, time_call

import ultraep
from ultraep import BalanceConfig, Plan, Rates, Topology
from ultraep.arrays import IntArray
from ultraep.config import PARTS

TRAINING = Path(__file__).parent / "results/trace_train_ep8_h200_202611.npz"
SOLVED_RANKS = 8  # ranks up to which the program runs if the bound is not reached
TIME_LIMIT = 30.0  # seconds for the program

COUNT = Metric("loads", "loads", "n", ".0f", sum)
COPIES = Metric("copies_mean", "copies", "replicas", ".2f")
FEWEST = Metric("fewest_copies_mean", "copies", "fewest", ".2f")
OVER = Metric("copies_over_fewest", "percent", "over %", ".1f")
AT_FEWEST = Metric("plans_with_the_fewest", "share", "equal", ".2f")
FANOUT = Metric("fanout_mean", "copies", "fan", ".2f")
EGRESS = Metric("egress_mean", "experts", "out", ".2f")
IMBALANCE = Metric("imbalance_mean", "max/mean", "after", ".3f")
MICROSECONDS = Metric("plan_time_p20", "us", "us", ".0f")
CONFIGS = {
    "tolerance 0": BalanceConfig(),
    "tolerance 0.01": BalanceConfig(tolerance=0.01),
    "time, few links": BalanceConfig(rates=Rates(row=5300, copy=41_000_000, layer=1_200_000)),
    "time, few copies": BalanceConfig(rates=Rates(row=5300, each=1_000_000, layer=1_200_000)),
    "time, both": BalanceConfig(
        rates=Rates(row=100_000, copy=200_000_000, each=1_000_000, layer=5_000_000)
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """What one run measures."""

    ranks: tuple[int, ...] = (8, 16, 32, 64)
    experts: int = 256  # of synthetic loads
    tolerances: tuple[float, ...] = (0.005, 0.01, 0.02, 0.05)
    ratios: tuple[float, ...] = (1.5, 2.0, 3.0)
    seeds: int = 3
    microbatches: int = 16  # recorded microbatches at most
    window: int = 8192  # tokens of a recorded microbatch
    routing: Path | None = None


QUICK = Scale(ranks=(8, 16), tolerances=(0.01,), seeds=1, microbatches=4)
TOY = replace(QUICK, ranks=(4,), experts=16, ratios=(2.0,), microbatches=2, window=64)


def loads_of(ranks: int, scale: Scale) -> Iterator[tuple[str, IntArray]]:
    """Name and [R, E] loads; recorded loads with at most as many ranks as experts."""
    for family, ratio, seed in product((ORDERED, SHUFFLED), scale.ratios, range(scale.seeds)):
        yield family, Kind(family, ratio).draw(ranks, scale.experts, tokens=8192, seed=seed)
    with np.load(TRAINING) as trace:
        recorded = {"training": list(trace["loads"].sum(axis=1, dtype=np.int64))}
    if scale.routing is not None:
        routing = RecordedRouting(scale.routing, None, scale.window)
        recorded["routing"] = [loads.sum(axis=0) for loads, _ in routing.microbatches(1)]
    for name, microbatches in recorded.items():
        for tokens_E in microbatches[:: max(1, -(-len(microbatches) // scale.microbatches))]:
            if len(tokens_E) >= ranks:
                loads = np.zeros((ranks, len(tokens_E)), dtype=np.int64)
                loads[0] = tokens_E  # the number of replicas does not depend on the sources
                yield name, loads


def fewest(plan: Plan, threshold: int) -> int:
    """The minimum number of replicas, exact or as a bound."""
    tokens, ranks = plan.loads.sum(axis=0), plan.topology.ranks
    if ranks > MOST_RANKS:
        return min(plan.num_replicas, fewest_joins(plan.initial_rank_loads - threshold))
    least = fewest_bound(tokens, plan.topology, threshold)
    if least < plan.num_replicas and ranks <= SOLVED_RANKS:
        with suppress(Unproven):
            least = fewest_copies(tokens, plan.topology, threshold, least, TIME_LIMIT)
    return least


def measure(loads: IntArray, topology: Topology, tolerance: float) -> Values | None:
    """Measure one plan; None if the tolerance cannot be met or needs no replicas."""
    plan = ultraep.plan(loads, topology, BalanceConfig(tolerance=tolerance, objective="balance"))
    total, parts = plan.total, PARTS + plan.config.tolerance_parts
    threshold = max(-(-total // topology.ranks), total * parts // (topology.ranks * PARTS))
    if plan.rank_loads.max() > threshold or not plan.num_replicas:
        return None
    least = fewest(plan, threshold)
    return {
        COUNT: 1,
        COPIES: plan.num_replicas,
        FEWEST: least,
        OVER: 100 * (plan.num_replicas / least - 1),
        AT_FEWEST: float(plan.num_replicas == least),
        FANOUT: plan.max_fanout,
        EGRESS: plan.max_egress,
    }


def copies(bench: Bench) -> None:
    """Count the replicas of all loads and sizes; one table per number of ranks."""
    scale: Scale = bench.scale
    one_core()
    for ranks in scale.ranks:
        samples = Samples()
        for name, loads in list(loads_of(ranks, scale)):
            for slots, tolerance in product((1, 2), scale.tolerances):
                topology = Topology(ranks=ranks, experts=loads.shape[1], slots=slots)
                values = measure(loads, topology, tolerance)
                case: Case = {"ranks": ranks, "load": name, "slots": slots, "tolerance": tolerance}
                if values is not None:
                    samples.add(case, values)
        bench.table("replicas", samples.lines())
    bench.report.note(
        "fewest: exact or a bound up to 16 ranks; beyond, the fewest connections found, which\n"
        "ignore experts. Loads whose tolerance cannot be met with these slots are left\n"
        "out. training: the recorded run; routing: the file of --routing."
    )


def planning(bench: Bench) -> None:
    """Planning time of the largest size by objective; rates determine the number of attempts."""
    one_core()
    ranks, samples = bench.scale.ranks[-1], Samples()
    generated = replace(bench.scale, routing=None)
    for name, loads in list(loads_of(ranks, generated)):
        topology = Topology(ranks=ranks, experts=loads.shape[1])
        for objective, config in CONFIGS.items():
            call = partial(ultraep.plan, loads, topology, config)
            plan = call()
            values: Values = {
                COUNT: 1,
                IMBALANCE: plan.imbalance,
                COPIES: plan.num_replicas,
                EGRESS: plan.max_egress,
                MICROSECONDS: 1e6 * time_call(call, repeats=20, warmup=2).p20,
            }
            samples.add({"ranks": ranks, "load": name, "objective": objective}, values)
    bench.table("planning", samples.lines())
    bench.report.note(
        "From loads to placement and split, on one core. With rates, plans are made by time."
    )


OPTIONS: Extra = {"routing": (Path, "file with recorded routing, .npz")}


if __name__ == "__main__":
    scales = {"toy": TOY, "quick": QUICK, "full": Scale()}
    main("copies", __doc__, {"copies": copies, "planning": planning}, scales, extra=OPTIONS)
