"""advise: is balancing worth it on this cluster, and with how many slots and which tolerance?

All settings run on the same loads, beside no balancing and forced balance. The best settings run
again on loads drawn anew, which gives the range of the gain, and with few and many tokens per rank,
which gives the break-even. Plans by time find out themselves what pays and need no tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ultraep.tools.sim.gain import (
    DRAWS,
    IDEAL,
    NONE,
    PROBE_TOKENS,
    BreakEven,
    Curve,
    Gain,
    break_even,
    draw_again,
    gain_of,
    probe,
)
from ultraep.tools.sim.memory import memory_of, slot_bytes
from ultraep.tools.sim.run import Report, Result, simulate
from ultraep.tools.sim.scenario import Contender, Scenario
from ultraep.tools.sim.workload import Skew
from ultraep.trace.schema import FORWARD

MOST_SLOTS = 4
TOLERANCES = (0.0, 0.01, 0.02, 0.05)
NEAR = 0.005  # of the best throughput: what fewer slots may cost

PAYS, PAYS_A_LITTLE, DOES_NOT_PAY = "pays", "pays a little", "does not pay"
CLEAR_GAIN = 1.05  # at the low end of the range: it pays
SMALL_GAIN = 1.01  # overall: it pays a little
LEFT_OVER = 0.02  # imbalance beyond the tolerance that is worth a word

# Stages that balancing adds, and stages that it shortens, each with its counterpart in backward.
EXPOSED = ("loads", "plan", "replicate", "reroute", "reduce")
SHORTENED = ("dispatch", "experts", "combine")
BACK = {
    "replicate": "weights again",
    "dispatch": "dispatch back",
    "experts": "experts back",
    "combine": "combine back",
}


@dataclass(frozen=True)
class Option:
    """One choice of settings, and what it brought on the same loads as all others."""

    slots: int
    tolerance: float
    throughput: float
    share: float  # of ideal
    gain: float  # over none
    copies: float  # of a layer
    imbalance: float
    memory: float  # bytes of the fullest device
    out_of_memory: float  # share of the microbatches


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the fullest device."""

    device: float  # what it has
    slot: float  # of one spare slot; all layers share it
    slots: float  # of those that are looked at
    none: float  # needed without balancing
    balanced: float  # needed with it
    none_out_of_memory: float  # share of the microbatches
    balanced_out_of_memory: float
    avoids_out_of_memory: bool  # it runs with balancing only


@dataclass(frozen=True, kw_only=True)
class Advice:
    """All that is known about whether balancing pays, and why.

    slots, tolerance, objective: what to set; no slots if it does not pay.
    option: the settings that gain, break-even and memory are about; they may not pay. None if there
        is nowhere to put a copy.
    curve: gain by tokens per rank and microbatch.
    exposed, saved: seconds of a microbatch that balancing costs, and that it takes off.
    """

    cluster: str
    model: str
    job: str  # training, prefill
    devices: int
    ranks: int
    domain: int
    tokens: int
    verdict: str
    slots: int
    tolerance: float
    objective: str
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
    reasons: tuple[str, ...]


def advise(scenario: Scenario, *, processes: int = 1, report: Report | None = None) -> Advice:
    """Try all settings for a scenario; its own slots and tolerance do not matter.

    report: called with the simulations that are done, and how many there are.
    """
    settings = _settings(scenario)
    tried = [NONE, *(_contender(*setting) for setting in settings), IDEAL]
    seeds = DRAWS - 1 if isinstance(scenario.workload, Skew) else 0
    done, total = len(tried), len(tried) + 2 * seeds + len(PROBE_TOKENS)
    tell = report or (lambda *_: None)
    none, *balanced, ideal = simulate(
        scenario,
        tried,
        processes=processes,
        report=lambda layers, of: tell(len(tried) * layers // of, total),
    )
    options = tuple(
        _option(result, tolerance, none, ideal)
        for result, (_, tolerance) in zip(balanced, settings, strict=True)
    )
    best = choose(options, none.out_of_memory)
    if best is None:
        return _advice(_Search(scenario, none, none, ideal, options))
    contender = _contender(best.slots, best.tolerance)
    draws, curve = [best.gain], []
    for gain in draw_again(scenario, contender, processes):
        draws.append(gain)
        done += 2
        tell(done, total)
    for point in probe(scenario, contender):
        curve.append(point)
        done += 1
        tell(done, total)
    own = balanced[options.index(best)]
    return _advice(_Search(scenario, none, own, ideal, options, best, tuple(draws), tuple(curve)))


# -- settings ------------------------------------------------------------------------------------


def most_slots(scenario: Scenario) -> int:
    """Slots that are worth trying: copies have somewhere to go, and memory holds them."""
    if scenario.topology.domain_size == 1:
        return 0
    every = range(1, _slots_wanted(scenario) + 1)
    return sum(_least_memory(scenario, slots) <= scenario.cluster.memory for slots in every)


def _slots_wanted(scenario: Scenario) -> int:
    """Slots that would be tried if there were enough memory."""
    return min(MOST_SLOTS, scenario.model.experts // scenario.ranks)


def _least_memory(scenario: Scenario, slots: int) -> float:
    """Return the bytes of a device with this many slots if all ranks have the same load."""
    rows = scenario.rows / scenario.ranks
    return memory_of(scenario.model, scenario.ranks, slots, scenario.job, rows).total


def _settings(scenario: Scenario) -> list[tuple[int, float]]:
    """Slots and tolerances that are tried."""
    every = range(1, most_slots(scenario) + 1)
    tolerances = TOLERANCES if scenario.objective == "balance" else (0.0,)
    return [(slots, tolerance) for slots in every for tolerance in tolerances]


def _contender(slots: int, tolerance: float) -> Contender:
    label = f"ultraep, {slots} slots, tolerance {tolerance}"
    return Contender("ultraep", label, slots=slots, tolerance=tolerance)


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
    """The fewest slots that are near the best; for these the best tolerance.

    Settings that run out of memory more often than no balancing does are left out. Of equals the
    larger tolerance is taken: it makes fewer copies.
    """
    usable = [option for option in options if option.out_of_memory <= none_out_of_memory]
    if not usable:
        return None
    enough = (1 - NEAR) * max(option.throughput for option in usable)
    fewest = min(option.slots for option in usable if option.throughput >= enough)
    equal = [option for option in usable if option.slots == fewest]
    return max(equal, key=lambda option: (round(option.share, 6), option.tolerance))


# -- advice --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Search:
    """What the simulations gave; `balanced` is `none` where nothing can be copied."""

    scenario: Scenario
    none: Result
    balanced: Result
    ideal: Result
    options: tuple[Option, ...]
    best: Option | None = None
    draws: tuple[float, ...] = (1.0,)
    curve: Curve = ()


def _advice(search: _Search) -> Advice:
    scenario, none, balanced, best = search.scenario, search.none, search.balanced, search.best
    memory = _memory(search)
    gain = gain_of(scenario, none, balanced, search.draws)
    even = break_even(search.curve, 1.0) if best else None
    verdict = verdict_of(gain.overall, gain.low, avoids_out_of_memory=memory.avoids_out_of_memory)
    advised = best if verdict != DOES_NOT_PAY else None
    exposed, saved = exposed_seconds(balanced), saved_seconds(none, balanced)
    return Advice(
        cluster=scenario.cluster.name,
        model=scenario.model.name,
        job=scenario.job.name,
        devices=scenario.devices,
        ranks=scenario.ranks,
        domain=scenario.topology.domain_size,
        tokens=scenario.job.tokens,
        verdict=verdict,
        slots=advised.slots if advised else 0,
        tolerance=advised.tolerance if advised else 0.0,
        objective=scenario.objective,
        unit=none.unit,
        none=_option(none, 0.0, none, search.ideal),
        option=best,
        options=search.options,
        ideal_throughput=search.ideal.throughput,
        gain=gain,
        break_even=even,
        clear_gain=break_even(search.curve, CLEAR_GAIN) if best else None,
        curve=search.curve,
        memory=memory,
        exposed=exposed,
        saved=saved,
        remainder=_remainder(search),
        reasons=tuple(_reasons(search, even, exposed, saved)),
    )


def verdict_of(gain: float, low: float, *, avoids_out_of_memory: bool) -> str:
    """Return one of the three verdicts; what runs with balancing only pays."""
    if avoids_out_of_memory or low >= CLEAR_GAIN:
        return PAYS
    return PAYS_A_LITTLE if gain >= SMALL_GAIN else DOES_NOT_PAY


def _memory(search: _Search) -> DeviceMemory:
    scenario, none, balanced = search.scenario, search.none, search.balanced
    slot = slot_bytes(scenario.model, training=scenario.job.trains)
    slots = search.best.slots if search.best else 0
    return DeviceMemory(
        device=scenario.cluster.memory,
        slot=float(slot),
        slots=float(slots * slot),
        none=none.memory.total,
        balanced=balanced.memory.total,
        none_out_of_memory=none.out_of_memory,
        balanced_out_of_memory=balanced.out_of_memory,
        avoids_out_of_memory=none.out_of_memory > 0 and not balanced.out_of_memory,
    )


def seconds_by_stage(result: Result) -> dict[str, float]:
    """Return the seconds of a microbatch, with forward, recompute and backward added up."""
    stages = result.stages
    again = 2 if "recompute" in stages else 1
    return {
        name: (again if name in FORWARD else 1) * stages.get(name, 0.0)
        + stages.get(BACK.get(name, ""), 0.0)
        for name in (*EXPOSED, *SHORTENED)
    }


def exposed_seconds(result: Result) -> float:
    """Return the seconds that balancing adds to a microbatch."""
    seconds = seconds_by_stage(result)
    return sum(seconds[name] for name in EXPOSED)


def saved_seconds(none: Result, balanced: Result) -> float:
    """Return the seconds that balancing takes off a microbatch."""
    before, after = seconds_by_stage(none), seconds_by_stage(balanced)
    return sum(before[name] - after[name] for name in SHORTENED)


def _remainder(search: _Search) -> str:
    """Name the stage that takes most of the time that is left to ideal."""
    own, ideal = seconds_by_stage(search.balanced), seconds_by_stage(search.ideal)
    left = {name: own[name] - ideal[name] for name in own}
    most = max(left, key=lambda name: left[name])
    total = _ms(max(sum(left.values()), 0.0))
    return f"{total} per {search.scenario.job.unit}, of which {most} {_ms(max(left[most], 0.0))}"


def _reasons(
    search: _Search, even: BreakEven | None, exposed: float, saved: float
) -> Iterator[str]:
    """Yield the facts behind the verdict, the weightiest first."""
    scenario, none, balanced = search.scenario, search.none, search.balanced
    topology, job = scenario.topology, scenario.job
    for result, how in ((none, "without balancing"), (balanced, "with balancing")):
        if result.out_of_memory:
            yield f"out of memory {how}: {result.out_of_memory:.0%} of the {job.units}"
    if even is None or search.best is None:
        yield _why_no_slot(search)
        return
    share = none.throughput / search.ideal.throughput
    yield f"imbalance without balancing: {none.imbalance:.2f}, at {share:.1%} of ideal"
    yield f"balancing costs {_ms(exposed)} per {job.unit} and saves {_ms(max(saved, 0.0))}"
    if even.tokens is None or job.tokens < even.tokens:
        yield f"too few tokens per rank and {job.unit}: {job.tokens:,}, see break-even"
    if most_slots(scenario) < _slots_wanted(scenario):
        yield f"memory holds at most {most_slots(scenario)} spare slots"
    if topology.num_domains > 1 and balanced.imbalance > 1 + search.best.tolerance + LEFT_OVER:
        yield (
            f"copies stay in domains of {topology.domain_size} ranks, "
            f"which leaves an imbalance of {balanced.imbalance:.2f}"
        )


def _why_no_slot(search: _Search) -> str:
    scenario = search.scenario
    if scenario.topology.domain_size == 1:
        return "one rank per fast-link domain: copies have nowhere to go"
    with_one = [option.memory for option in search.options if option.slots == 1]
    needed = min(with_one, default=_least_memory(scenario, 1))
    return (
        f"no spare slot fits: the fullest device would need {needed / 1e9:,.1f} GB of "
        f"{scenario.cluster.memory_gb:,.1f} GB"
    )


def _ms(seconds: float) -> str:
    """Milliseconds with three digits or so."""
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.{1 if value >= 10 else 2}f} ms"
