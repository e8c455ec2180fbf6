"""All planners on the same loads: imbalance, replicas, time, and the gap to the optimum.

    python benchmarks/bench_plan.py                             # all sections but these three:
    python benchmarks/bench_plan.py --only trace --trace FILE   # recorded routing
    python benchmarks/bench_plan.py --only optimum              # exact optima
    python benchmarks/bench_plan.py --only speeds               # unequal ranks; also with --trace
    python benchmarks/bench_plan.py --toy                       # tiny, for CI

`benchmarks/README.md` explains the tables. Shapes: R ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
from harness import Bench, Extra, Line, Metric, Samples, Values, comma_list, main
from load_cases import ORDERED, Kind, RecordedRouting, zipf_kinds
from optimum import Unproven, optimal_peak, small_cases
from timing import one_core, time_call

import ultraep
from ultraep import BalanceConfig, Plan, Rates, Topology, workload
from ultraep.arrays import IntArray
from ultraep.policies import get_policy
from ultraep.workload import Load
from ultraep_tools.baselines import OWN

OBJECTIVES = {  # the rates decide how many attempts a plan by time makes
    "tolerance 0": BalanceConfig(),
    "tolerance 0.01": BalanceConfig(tolerance=0.01),
    "time, few links": BalanceConfig(rates=Rates(row=5300, copy=41_000_000, layer=1_200_000)),
    "time, few replicas": BalanceConfig(rates=Rates(row=5300, each=1_000_000, layer=1_200_000)),
    "time, both": BalanceConfig(
        rates=Rates(row=100_000, copy=200_000_000, each=1_000_000, layer=5_000_000)
    ),
}
PUBLISHED_FOR = (64, 256, 2)  # ranks, experts, slots; ordered Zipf, 1 % above the mean
PUBLISHED_COPIES = {1.5: 38, 2.0: 46, 3.0: 51}  # replicas of the paper's planner, by ratio
STOP_EARLY = ("ultraep", "quota")  # policies that use a tolerance
CHECKED_RANKS = 256  # larger plans are not checked, because the check is dense
TIME_LIMIT = 60.0  # seconds for one exact optimum
SIZES = (  # ranks and experts
    *((8, 32), (16, 64), (32, 128), (64, 64), (64, 128), (64, 256), (256, 1024), (1024, 4096)),
)

COUNT = Metric("loads", "loads", "n", ".0f", sum)
BEFORE = Metric("imbalance_before_mean", "max/mean", "before", ".3f")
MEAN = Metric("imbalance_mean", "max/mean", "mean")
WORST = Metric("imbalance_worst", "max/mean", "worst", combine=max)
BOUND = Metric("lower_bound_mean", "max/mean", "bound")
GAP = Metric("gap_to_bound_mean", "max/mean", "gap")
COPIES = Metric("copies_mean", "copies", "replicas", ".1f")
PUBLISHED = Metric("copies_published", "copies", "publ.", ".0f", max)
EGRESS = Metric("egress_max", "experts", "out", ".0f", max)
REMOTE = Metric("remote_share_mean", "share", "remote", ".3f")
TIME = Metric("plan_time_p50", "us", "us", ".0f", median)
FAST = Metric("plan_time_p20", "us", "p20", ".0f")
AT_BOUND = Metric("at_bound", "share", "at bound", ".3f")
OPTIMUM = Metric("optimum_mean", "max/mean", "optimum")
EXCESS = Metric("gap_to_optimum_mean", "share", "mean gap", ".5f")
WORST_EXCESS = Metric("gap_to_optimum_worst", "share", "worst gap", ".5f", max)
OPTIMAL = Metric("exactly_optimal", "share", "optimal", ".3f")
BY_ROWS = Metric("time_of_equal_rows_mean", "over ideal", "equal rows")
BY_SPEEDS = Metric("time_by_speeds_mean", "over ideal", "by speed")
WORST_BY_SPEEDS = Metric("time_by_speeds_worst", "over ideal", "worst", combine=max)
UNPROVEN = Metric("unproven", "loads", "unproven", ".0f", sum)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """What one run measures."""

    sizes: tuple[tuple[int, int], ...] = SIZES
    detail: tuple[int, int] = (64, 256)  # of other sections; in `quality`, with one line per load
    ratios: tuple[float, ...] = (1.5, 2.0, 3.0, 4.0)
    seeds: int = 20
    tokens: int = 8192
    trace_ranks: tuple[int, ...] = (8, 16)
    optima: int = 600
    named: tuple[int, int] = (8, 128)  # ranks and experts of `slots`
    policies: Sequence[str] = OWN
    trace: Path | None = None
    window: int = 4096  # tokens of a microbatch of the trace

    def seeds_at(self, ranks: int) -> int:
        """All seeds for sizes with one line per load, fewer for the others."""
        return self.seeds if ranks == self.detail[0] else max(1, min(5, self.seeds, 1024 // ranks))


QUICK = Scale(
    sizes=((8, 32), (64, 256), (256, 1024)), ratios=(2.0, 3.0), seeds=3, trace_ranks=(8,), optima=60
)
TOY = Scale(
    sizes=((4, 8), (8, 16)),
    detail=(8, 16),
    ratios=(2.0,),
    seeds=2,
    tokens=64,
    trace_ranks=(4,),
    optima=12,
    named=(8, 64),
)


def measure(
    loads: IntArray,
    topology: Topology,
    config: BalanceConfig,
    *,
    history: IntArray,
    repeats: int = 1,
) -> Values:
    """Plan once and check the plan, then time planning from loads to placement and split."""
    call = partial(ultraep.plan, loads, topology, config, history=history)
    plan = call()
    if topology.ranks <= CHECKED_RANKS:
        plan.check(loads)
    bound = plan.lower_bound if get_policy(config.policy).within_limits else None
    return {
        COUNT: 1,
        BEFORE: plan.initial_imbalance,
        MEAN: plan.imbalance,
        WORST: plan.imbalance,
        BOUND: bound,
        GAP: None if bound is None else plan.imbalance - bound,
        COPIES: plan.num_replicas,
        EGRESS: plan.max_egress,
        REMOTE: plan.remote_tokens / max(1, plan.total),
        TIME: 1e6 * time_call(call, repeats, warmup=1).p50,
    }


def quality(bench: Bench) -> None:
    """All policies on synthetic loads of all sizes, with one and two slots."""
    scale: Scale = bench.scale
    kinds = [*zipf_kinds(scale.ratios), Kind("lognormal"), Kind("uniform"), Kind("one_hot")]
    for ranks, experts in scale.sizes:
        tables = {slots: Samples() for slots in (1, 2)}
        repeats = 3 if ranks <= 64 else 1
        for kind in kinds:
            label = kind.name if ranks == scale.detail[0] else kind.family
            for seed in range(1 if kind.family == "one_hot" else scale.seeds_at(ranks)):
                loads = kind.draw(ranks, experts, tokens=scale.tokens, seed=seed)
                for (slots, samples), policy in product(tables.items(), scale.policies):
                    topology = Topology(ranks=ranks, experts=experts, slots=slots)
                    config = BalanceConfig(policy=policy)
                    values = measure(loads, topology, config, history=loads, repeats=repeats)
                    samples.add(_case(topology, load=label, policy=policy), values)
        for samples in tables.values():
            bench.table("quality", samples.lines())
    bench.report.note(
        "All policies plan the same n loads; eplb and lplb place by the very load they serve.\n"
        "These two move homes, ideal ignores slots: the bound does not apply to them."
    )


def tolerance(bench: Bench) -> None:
    """Replicas with a tolerance of 1 %."""
    scale: Scale = bench.scale
    ranks, experts = scale.detail
    kinds = zipf_kinds([ratio for ratio in scale.ratios if ratio in PUBLISHED_COPIES])
    for slots in (1, 2):
        topology, samples = Topology(ranks=ranks, experts=experts, slots=slots), Samples()
        for kind, seed in list(product(kinds, range(scale.seeds))):
            loads = kind.draw(ranks, experts, tokens=scale.tokens, seed=seed)
            same = kind.family == ORDERED and (*scale.detail, slots) == PUBLISHED_FOR
            published = PUBLISHED_COPIES[kind.ratio] if same and kind.ratio else None
            for policy in (policy for policy in scale.policies if policy in STOP_EARLY):
                allowed = 0.0 if policy == "quota" else 0.01  # quota has its own tolerance of 1 %
                config = BalanceConfig(policy=policy, tolerance=allowed)
                values = measure(loads, topology, config, history=loads)
                values = {m: v for m, v in values.items() if m not in (BOUND, GAP)}
                values |= {PUBLISHED: published}
                samples.add(_case(topology, load=kind.name, policy=policy), values)
        bench.table("tolerance 0.01", samples.lines())
    bench.report.note("publ.: replicas of the planner of the UltraEP paper, as published.")


def objectives(bench: Bench) -> None:
    """Planning time by objective and rates, on one core."""
    scale: Scale = bench.scale
    ranks, experts = scale.detail
    topology, samples = Topology(ranks=ranks, experts=experts), Samples()
    for kind, seed in list(product(zipf_kinds(scale.ratios), range(min(3, scale.seeds)))):
        loads = kind.draw(ranks, experts, tokens=scale.tokens, seed=seed)
        for objective, config in OBJECTIVES.items():
            call = partial(ultraep.plan, loads, topology, config)
            plan = call()
            values: Values = {
                COUNT: 1,
                MEAN: plan.imbalance,
                COPIES: plan.num_replicas,
                EGRESS: plan.max_egress,
                FAST: 1e6 * time_call(call, repeats=20, warmup=2).p20,
            }
            samples.add(_case(topology, load=kind.family, objective=objective), values)
    bench.table("objectives", samples.lines())


def trace(bench: Bench) -> None:
    """All policies on recorded routing; policies with history also by the previous window."""
    scale: Scale = bench.scale
    if scale.trace is None:
        raise SystemExit("the section trace needs --trace FILE")
    recorded = RecordedRouting(scale.trace, scale.window)
    for ranks in scale.trace_ranks:
        microbatches, samples = list(recorded.microbatches(ranks)), Samples()
        for slots, policy in list(product((1, 2), scale.policies)):
            config = BalanceConfig(policy=policy)
            stale = ("exact", "previous") if get_policy(policy).needs_history else ("-",)
            for history, (loads, before) in product(stale, microbatches):
                past = before if history == "previous" else loads
                if past is not None:
                    topology = Topology(ranks=ranks, experts=loads.shape[1], slots=slots)
                    values = measure(loads, topology, config, history=past)
                    samples.add(_case(topology, policy=policy, history=history), values)
        bench.table(f"trace {recorded.path.name}, window {recorded.window}", samples.lines())
    bench.report.note(
        "previous: placed by the previous window; the first window of a text has none."
    )


def optimum(bench: Bench) -> None:
    """The gap between our plans and the optimum of a mixed-integer program."""
    scale: Scale = bench.scale
    shapes, together = Samples(), Samples()
    for case in small_cases(scale.optima):
        loads = np.zeros((case.topology.ranks, case.topology.experts), dtype=np.int64)
        loads[0] = case.expert_loads  # the peak does not depend on the sources
        values = _gap(ultraep.plan(loads, case.topology))
        shapes.add({"slots": case.topology.slots, "load": case.shape}, values)
        together.add({"slots": case.topology.slots, "load": "all"}, values)
    lines = [*shapes.lines(), *together.lines()]
    bench.table(
        "optimum, small random loads", sorted(lines, key=lambda line: str(line.case["slots"]))
    )
    bench.report.note(
        "gap: imbalance over optimum, minus 1; at bound: plans that reach the lower bound."
        f"\nunproven within {TIME_LIMIT:g} s: counted, but not part of gap and optimum."
    )


def speeds(bench: Bench) -> None:
    """One slot, ranks at 80 to 100 % of the nominal speed: time over ideal, by rows and speeds."""
    scale: Scale = bench.scale
    samples = Samples()
    for ranks, experts in scale.sizes:
        if ranks > scale.detail[0]:
            continue
        for kind, seed in product(zipf_kinds(scale.ratios), range(scale.seeds_at(ranks))):
            loads = kind.draw(ranks, experts, tokens=scale.tokens, seed=seed)
            topology = Topology(ranks=ranks, experts=experts)
            samples.add(_case(topology, load=kind.name), _by_speeds(loads, topology, seed))
    if scale.trace is not None:
        recorded = RecordedRouting(scale.trace, scale.window)
        for ranks in scale.trace_ranks:
            for seed, (loads, _) in enumerate(recorded.microbatches(ranks)):
                topology = Topology(ranks=ranks, experts=loads.shape[1])
                samples.add(_case(topology, load="recorded"), _by_speeds(loads, topology, seed))
    bench.table("speeds", samples.lines())


def slots(bench: Bench) -> None:
    """What more slots give for named loads, at every imbalance."""
    ranks, experts = bench.scale.named
    lines = []
    loads = [Load("hot rank", 2.87), *workload.sweep(ranks, experts)]
    drawn = [(load, load.draw(ranks, experts, tokens=4096)) for load in loads]
    for (load, loads_RE), count in product(drawn, (1, 2, 3)):
        topology = Topology(ranks=ranks, experts=experts, slots=count)
        plan = ultraep.plan(loads_RE, topology)
        values = {BEFORE: plan.initial_imbalance, MEAN: plan.imbalance, COPIES: plan.num_replicas}
        case = _case(topology, kind=load.kind, imbalance=f"{load.imbalance or '-'}")
        lines.append(Line(case, values, plan.digest()))
    bench.table("slots", lines)


def _by_speeds(loads: IntArray, topology: Topology, seed: int) -> Values:
    ranks = topology.ranks
    drawn: IntArray = np.random.default_rng(seed).integers(800, 1001, ranks)
    config = BalanceConfig(objective="balance")
    by_rows = partial(ultraep.plan, loads, topology, config)
    by_speeds = partial(
        ultraep.plan, loads, topology, replace(config, speeds=tuple(map(int, drawn)))
    )
    plan = by_speeds()
    plan.check(loads)
    ideal = plan.total / drawn.sum()
    return {
        COUNT: 1,
        BY_ROWS: float((by_rows().rank_loads / drawn).max() / ideal),
        BY_SPEEDS: plan.imbalance,
        WORST_BY_SPEEDS: plan.imbalance,
        BOUND: plan.lower_bound,
        COPIES: plan.num_replicas,
        TIME: 1e6 * time_call(by_speeds, repeats=5, warmup=1).p20,
    }


def _gap(plan: Plan) -> Values:
    """Compare a plan with the optimum; if it is not proven in time, the gap is unknown."""
    best = gap = None
    with suppress(Unproven):
        peak = optimal_peak(plan.loads.sum(axis=0), plan.topology, TIME_LIMIT)
        best = peak * plan.topology.ranks / plan.total
        assert plan.lower_bound <= best <= plan.imbalance, (plan, best)
        gap = plan.imbalance / best - 1
    return {
        COUNT: 1,
        BEFORE: plan.initial_imbalance,
        MEAN: plan.imbalance,
        WORST: plan.imbalance,
        OPTIMUM: best,
        AT_BOUND: float(plan.imbalance == plan.lower_bound),
        OPTIMAL: None if gap is None else float(gap == 0),
        EXCESS: gap,
        WORST_EXCESS: gap,
        UNPROVEN: float(best is None),
    }


def _case(topology: Topology, **names: str) -> dict[str, str | int | float]:
    sizes = {"ranks": topology.ranks, "experts": topology.experts, "slots": topology.slots}
    return {**sizes, **names}


SECTIONS = {
    "quality": quality,
    "tolerance": tolerance,
    "objectives": objectives,
    "trace": trace,
    "optimum": optimum,
    "speeds": speeds,
    "slots": slots,
}
OPTIONS: Extra = {
    "policies": (comma_list(OWN), "plan with these policies (default: all)"),
    "trace": (Path, "file with recorded routing, .npz"),
    "window": (int, "tokens per microbatch of the trace (default 4096)"),
}


if __name__ == "__main__":
    one_core()
    scales, usual = {"toy": TOY, "quick": QUICK, "full": Scale()}, list(SECTIONS)[:3]
    main("plan", __doc__, SECTIONS, scales, usual=usual, extra=OPTIONS)
