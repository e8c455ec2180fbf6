"""advise: does balancing pay on this cluster, and with how many slots and which tolerance?

All settings run on the same loads, next to no balancing and forced balance. The best settings run
again with other seeds, which gives the range of the gain, and with few and many tokens per rank,
which gives the break-even. They also run on every data plane (gains.py). Plans by time need no
tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ultraep.trace.schema import FORWARD
from ultraep_tools.sim import gains
from ultraep_tools.sim.gains import UNBALANCED, BetweenDomains, BreakEven, Curve, Gain, PlaneTime
from ultraep_tools.sim.run import Report, Result, simulate
from ultraep_tools.sim.runtime import Contender
from ultraep_tools.sim.scenario import Scenario
from ultraep_tools.sim.workload import Skew

IDEAL = Contender("ideal", "ideal", slots=0)
MAX_SLOTS = 4
TOLERANCES = (0.0, 0.01, 0.02, 0.05)
NEAR = 0.005  # share of the best throughput that fewer slots may cost

PAYS, PAYS_A_LITTLE, DOES_NOT_PAY = "pays", "pays a little", "does not pay"
CLEAR_GAIN = 1.05  # at the low end of the range: balancing pays
SMALL_GAIN = 1.01  # overall: it pays a little
NOTABLE_IMBALANCE = 0.02  # beyond the tolerance

# Stages that balancing adds, stages that it shortens, and their backward stages.
EXPOSED = ("loads", "plan", "replicate", "reroute", "reduce")
SHORTENED = ("dispatch", "experts", "combine")
BACK = {"replicate": "weights again", **{stage: f"{stage} back" for stage in SHORTENED}}


@dataclass(frozen=True)
class Option:
    """One choice of settings and its result. All options run on the same loads."""

    slots: int
    tolerance: float
    throughput: float
    share: float  # of ideal
    gain: float  # over none
    copies: float  # replicas per layer
    imbalance: float
    memory: float  # bytes of the busiest device
    out_of_memory: float  # share of the microbatches


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the busiest device."""

    device: float  # capacity
    slot: float  # one spare slot, which all layers share
    slots: float  # the spare slots of the chosen option
    none: float  # needed without balancing
    balanced: float  # needed with balancing
    none_out_of_memory: float  # share of the microbatches
    balanced_out_of_memory: float
    avoids_out_of_memory: bool  # the job fits only with balancing


@dataclass(frozen=True)
class SlowRank:
    """The slowest rank, and what unequal speeds cost: the share of the throughput that is lost."""

    rank: int
    speed: int  # in thousandths of the nominal speed
    by_rows: float  # lost with balanced rows
    by_speeds: float  # lost with rows balanced by speed


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Whether balancing pays, and why.

    slots, tolerance: the settings to use; no slots if balancing does not pay.
    option: the best settings, which gain, break-even and memory refer to, whether or not they pay.
        None if no rank can hold a replica.
    curve: gain by tokens per rank and microbatch.
    exposed, saved: seconds of a microbatch that balancing adds and saves.
    planes: the times of all data planes.   between: None in one fast-link domain.
    """

    verdict: str
    slots: int
    tolerance: float
    unit: str
    none: Option
    option: Option | None
    options: tuple[Option, ...]
    ideal_throughput: float
    gain: Gain
    break_even: BreakEven | None
    clear_gain: BreakEven | None
    curve: Curve
    memory: DeviceMemory
    exposed: float
    saved: float
    remainder: str
    slow_rank: SlowRank | None = None
    planes: tuple[PlaneTime, ...] = ()
    between: BetweenDomains | None = None
    reasons: tuple[str, ...] = ()


def advise(scenario: Scenario, *, processes: int = 1, report: Report | None = None) -> Advice:
    """Try all settings for a scenario. Its own slots and tolerance are ignored.

    report: called with the number of finished simulations and of all simulations.
    """
    tolerances = TOLERANCES if scenario.objective == "balance" else (0.0,)
    tried = [
        Contender("ultraep", f"ultraep, {slots} slots, tolerance {tolerance}", slots, tolerance)
        for slots in range(1, max_slots(scenario) + 1)
        for tolerance in tolerances
    ]
    seeds = gains.SEEDS - 1 if isinstance(scenario.workload, Skew) else 0
    done = len(tried) + 2
    total = done + 2 * seeds + len(gains.PROBE_TOKENS) + gains.num_compared(scenario)
    progress = report or (lambda *_: None)
    none, *balanced, ideal = simulate(
        scenario,
        [UNBALANCED, *tried, IDEAL],
        processes=processes,
        report=lambda layers, all_layers: progress(done * layers // all_layers, total),
    )
    options = tuple(
        _option(result, contender.tolerance or 0.0, none, ideal)
        for contender, result in zip(tried, balanced, strict=True)
    )
    best = choose(options, none.out_of_memory)
    contender = UNBALANCED if best is None else tried[options.index(best)]
    planes = []
    for plane in gains.compare_planes(scenario, contender, processes):
        planes.append(plane)
        progress(done + len(planes), total)
    across = tuple(planes), gains.imbalance_between(scenario, contender, processes)
    if best is None:
        return _advice(scenario, (none, none, ideal), options, None, (1.0,), (), across)
    done += len(planes)
    index = options.index(best)
    draws, curve = [best.gain], []
    for gain in gains.gains_of_seeds(scenario, tried[index], processes):
        draws.append(gain)
        progress(done + 2 * (len(draws) - 1), total)
    for point in gains.gains_by_tokens(scenario, tried[index]):
        curve.append(point)
        progress(done + 2 * seeds + len(curve), total)
    results = (none, balanced[index], ideal)
    slow_rank = _slow_rank(scenario, tried[index], balanced[index], processes)
    return _advice(scenario, results, options, best, tuple(draws), tuple(curve), across, slow_rank)


def _slow_rank(
    scenario: Scenario, contender: Contender, balanced: Result, processes: int
) -> SlowRank | None:
    """Return what a slow rank costs; None if all ranks have the same speed."""
    speeds = scenario.cluster.speeds_of(scenario.ranks)
    if len(set(speeds)) < 2:
        return None
    nominal = replace(scenario, cluster=replace(scenario.cluster, speeds=()))
    by_rows = replace(scenario, by_speeds=False)
    (fast,), (rows,) = (simulate(s, [contender], processes=processes) for s in (nominal, by_rows))
    slowest = min(speeds)
    return SlowRank(
        rank=speeds.index(slowest),
        speed=slowest,
        by_rows=1 - rows.throughput / fast.throughput,
        by_speeds=1 - balanced.throughput / fast.throughput,
    )


# -- settings ------------------------------------------------------------------------------------


def memory_by_slots(scenario: Scenario) -> list[float]:
    """Return the bytes of a device with 1, 2, ... spare slots if all ranks have the same load."""
    most = min(MAX_SLOTS, scenario.model.experts // scenario.ranks)
    rows = scenario.rows / scenario.ranks
    return [scenario.memory(slots, rows).total for slots in range(1, most + 1)]


def max_slots(scenario: Scenario) -> int:
    """Return the most slots worth trying: replicas need another rank, and memory must fit."""
    if scenario.topology.domain_size == 1:
        return 0
    return sum(needed <= scenario.cluster.memory for needed in memory_by_slots(scenario))


def _option(result: Result, tolerance: float, none: Result, ideal: Result) -> Option:
    return Option(
        slots=result.slots,
        tolerance=tolerance,
        throughput=result.throughput,
        share=result.throughput / ideal.throughput,
        gain=result.throughput / none.throughput,
        copies=result.copies,
        imbalance=result.imbalance,
        memory=result.memory.total,
        out_of_memory=result.out_of_memory,
    )


def choose(options: tuple[Option, ...], none_out_of_memory: float) -> Option | None:
    """Return the option with the fewest slots near the best, then the best tolerance.

    Options that run out of memory more often than no balancing are ignored. Ties go to the larger
    tolerance, which makes fewer replicas.
    """
    usable = [option for option in options if option.out_of_memory <= none_out_of_memory]
    if not usable:
        return None
    enough = (1 - NEAR) * max(option.throughput for option in usable)
    fewest = min(option.slots for option in usable if option.throughput >= enough)
    equal = [option for option in usable if option.slots == fewest]
    return max(equal, key=lambda option: (round(option.share, 6), option.tolerance))


# -- advice --------------------------------------------------------------------------------------


def _advice(
    scenario: Scenario,
    results: tuple[Result, Result, Result],
    options: tuple[Option, ...],
    best: Option | None,
    draws: tuple[float, ...],
    curve: Curve,
    across: tuple[tuple[PlaneTime, ...], BetweenDomains | None],
    slow_rank: SlowRank | None = None,
) -> Advice:
    """Return the advice. results: without balancing, with the best option, and ideal."""
    none, balanced, ideal = results
    slot = float(scenario.model.slot_bytes(training=scenario.job.trains))
    memory = DeviceMemory(
        device=scenario.cluster.memory,
        slot=slot,
        slots=best.slots * slot if best else 0.0,
        none=none.memory.total,
        balanced=balanced.memory.total,
        none_out_of_memory=none.out_of_memory,
        balanced_out_of_memory=balanced.out_of_memory,
        avoids_out_of_memory=none.out_of_memory > 0 and not balanced.out_of_memory,
    )
    gain = gains.gain_of(scenario, none, balanced, draws)
    verdict = verdict_of(gain.overall, gain.low, avoids_out_of_memory=memory.avoids_out_of_memory)
    advised = best if verdict != DOES_NOT_PAY else None
    before, after, least = (seconds_by_stage(result) for result in results)
    left = {name: after[name] - least[name] for name in after}
    most = max(left, key=lambda name: left[name])
    advice = Advice(
        verdict=verdict,
        slots=advised.slots if advised else 0,
        tolerance=advised.tolerance if advised else 0.0,
        unit=none.unit,
        none=_option(none, 0.0, none, ideal),
        option=best,
        options=options,
        ideal_throughput=ideal.throughput,
        gain=gain,
        break_even=gains.break_even(curve, 1.0) if best else None,
        clear_gain=gains.break_even(curve, CLEAR_GAIN) if best else None,
        curve=curve,
        memory=memory,
        slow_rank=slow_rank,
        planes=across[0],
        between=across[1],
        exposed=sum(after[name] for name in EXPOSED),
        saved=sum(before[name] - after[name] for name in SHORTENED),
        remainder=f"{_ms(sum(left.values()))} per {scenario.job.unit}, of which "
        f"{most} {_ms(left[most])}",
    )
    return replace(advice, reasons=tuple(_reasons(advice, scenario)))


def verdict_of(gain: float, low: float, *, avoids_out_of_memory: bool) -> str:
    """Return one of the three verdicts. Balancing pays if the job does not fit without it."""
    if avoids_out_of_memory or low >= CLEAR_GAIN:
        return PAYS
    return PAYS_A_LITTLE if gain >= SMALL_GAIN else DOES_NOT_PAY


def seconds_by_stage(result: Result) -> dict[str, float]:
    """Return the seconds of a microbatch, with forward, recompute and backward added up."""
    stages = result.stages
    passes = 2 if "recompute" in stages else 1
    return {
        name: (passes if name in FORWARD else 1) * stages.get(name, 0.0)
        + stages.get(BACK.get(name, ""), 0.0)
        for name in (*EXPOSED, *SHORTENED)
    }


def _reasons(advice: Advice, scenario: Scenario) -> Iterator[str]:
    """Yield the facts behind the verdict, the most important first."""
    job, topology, best, even = scenario.job, scenario.topology, advice.option, advice.break_even
    without, balanced = advice.memory.none_out_of_memory, advice.memory.balanced_out_of_memory
    if without:
        yield f"out of memory without balancing: {without:.0%} of the {job.units}"
    if balanced:
        yield f"out of memory with balancing: {balanced:.0%} of the {job.units}"
    if even is None or best is None:
        yield _why_no_slot(advice, scenario)
        return
    none = advice.none
    yield (
        f"imbalance without balancing: {none.imbalance:.2f}, at {none.share:.1%} of forced balance"
    )
    yield f"balancing costs {_ms(advice.exposed)} per {job.unit} and saves {_ms(advice.saved)}"
    slow = advice.slow_rank
    if slow:
        yield (
            f"rank {slow.rank} computes at {slow.speed / 10:g} % of the nominal speed, which costs "
            f"{slow.by_rows:.1%} of the throughput with equal rows and {slow.by_speeds:.1%} with "
            "speeds="
        )
    if even.tokens is None or job.tokens < even.tokens:
        yield f"too few tokens per rank and {job.unit}: {job.tokens:,}, see break-even"
    if max_slots(scenario) < len(memory_by_slots(scenario)):
        yield f"memory holds at most {max_slots(scenario)} spare slots"
    if topology.num_domains > 1 and best.imbalance > 1 + best.tolerance + NOTABLE_IMBALANCE:
        yield (
            f"replicas stay in domains of {topology.domain_size} ranks, "
            f"which leaves an imbalance of {best.imbalance:.2f}"
        )


def _why_no_slot(advice: Advice, scenario: Scenario) -> str:
    if scenario.topology.domain_size == 1:
        return "one rank per fast-link domain: replicas have nowhere to go"
    with_one = [option.memory for option in advice.options if option.slots == 1]
    needed = min(with_one, default=memory_by_slots(scenario)[0])
    return (
        f"no spare slot fits: the busiest device would need {needed / 1e9:,.1f} GB of "
        f"{scenario.cluster.memory_gb:,.1f} GB"
    )


def _ms(seconds: float) -> str:
    """Milliseconds with about three digits."""
    value = 1e3 * max(seconds, 0.0)
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.{1 if value >= 10 else 2}f} ms"
