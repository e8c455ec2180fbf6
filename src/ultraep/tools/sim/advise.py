"""advise: is balancing worth it on this cluster, and with how many slots and which tolerance?

Plans by time find out themselves what pays, so that they need no tolerance. All settings run on the
same loads, beside no balancing and forced balance. Those that are advised run again: on loads drawn
anew, for the range of the gain, and with few and many tokens per rank, for the number from which on
it pays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from ultraep.errors import ConfigError
from ultraep.tools.sim.gain import (
    DRAWS,
    IDEAL,
    NONE,
    PROBE_MICROBATCHES,
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
from ultraep.tools.sim.reasons import (
    CLEAR_GAIN,
    DOES_NOT_PAY,
    Facts,
    exposed_seconds,
    reasons_of,
    remainder_of,
    saved_seconds,
    verdict_of,
)
from ultraep.tools.sim.run import Report, Result, simulate
from ultraep.tools.sim.scenario import Contender, Scenario
from ultraep.tools.sim.training import Training
from ultraep.tools.sim.workload import Skew

Item = TypeVar("Item")

MOST_SLOTS = 4
TOLERANCES = (0.0, 0.01, 0.02, 0.05)
NEAR = 0.005  # of the best throughput: what fewer slots may cost


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
    """Look at all settings for a scenario; its slots do not matter, nor does its tolerance.

    report: is told the microbatches that are done, of every setting, and how many there are.
    """
    if processes < 1:
        raise ConfigError(f"processes must be at least 1, got {processes}")
    settings = _settings(scenario)
    tried = [NONE, *(_contender(*setting) for setting in settings), IDEAL]
    work = _Work(scenario, len(tried), report)
    none, *found, ideal = simulate(scenario, tried, processes=processes, report=work.searched)
    options = tuple(
        _option(result, tolerance, none, ideal)
        for result, (_, tolerance) in zip(found, settings, strict=True)
    )
    best = choose(options, none.out_of_memory)
    if best is None:
        return _put_together(scenario, _Found(none, none, ideal, options))
    contender = _contender(best.slots, best.tolerance)
    draws = work.count(draw_again(scenario, contender, processes), 2 * scenario.microbatches)
    curve = work.count(probe(scenario, contender), 2 * PROBE_MICROBATCHES)
    balanced = found[options.index(best)]
    return _put_together(
        scenario,
        _Found(none, balanced, ideal, options, best, (best.gain, *draws), tuple(curve)),
    )


# -- settings ------------------------------------------------------------------------------------


def most_slots(scenario: Scenario) -> int:
    """Slots that are worth trying: copies have somewhere to go, and memory holds them."""
    if scenario.topology.domain_size == 1:
        return 0
    fitting = [
        slots
        for slots in range(1, _slots_wanted(scenario) + 1)
        if _least_memory(scenario, slots) <= scenario.cluster.memory
    ]
    return len(fitting)


def _slots_wanted(scenario: Scenario) -> int:
    """Slots that would be tried if there were enough memory."""
    return min(MOST_SLOTS, scenario.model.experts // scenario.ranks)


def _least_memory(scenario: Scenario, slots: int) -> float:
    """Bytes of a device with so many slots, all ranks alike."""
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


# -- putting it together -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """What the simulations said; `balanced` is `none` where nothing can be copied."""

    none: Result
    balanced: Result
    ideal: Result
    options: tuple[Option, ...]
    best: Option | None = None
    draws: tuple[float, ...] = (1.0,)
    curve: Curve = ()


def _put_together(scenario: Scenario, found: _Found) -> Advice:
    best, memory = found.best, _memory(scenario, found)
    gain = gain_of(scenario, found.none, found.balanced, found.draws)
    even = break_even(found.curve, 1.0) if best else None
    verdict = verdict_of(gain.overall, gain.low, avoids_out_of_memory=memory.avoids_out_of_memory)
    advised = best if verdict != DOES_NOT_PAY else None
    facts = Facts(
        scenario=scenario,
        none=found.none,
        balanced=found.balanced,
        ideal=found.ideal,
        possible=best is not None,
        slots_fit=most_slots(scenario),
        slots_wanted=_slots_wanted(scenario),
        one_slot=_one_slot(scenario, found),
        tolerance=best.tolerance if best else 0.0,
        verdict=verdict,
        break_even=even.tokens if even else None,
        most_tokens=PROBE_TOKENS[-1],
    )
    return Advice(
        cluster=scenario.cluster.name,
        model=scenario.model.name,
        job="training" if isinstance(scenario.job, Training) else "prefill",
        devices=scenario.devices,
        ranks=scenario.ranks,
        domain=scenario.topology.domain_size,
        tokens=scenario.job.tokens,
        verdict=verdict,
        slots=advised.slots if advised else 0,
        tolerance=advised.tolerance if advised else 0.0,
        objective=scenario.objective,
        unit=found.none.unit,
        none=_option(found.none, 0.0, found.none, found.ideal),
        option=best,
        options=found.options,
        ideal_throughput=found.ideal.throughput,
        gain=gain,
        break_even=even,
        clear_gain=break_even(found.curve, CLEAR_GAIN) if best else None,
        curve=found.curve,
        memory=memory,
        exposed=exposed_seconds(found.balanced),
        saved=saved_seconds(found.none, found.balanced),
        remainder=remainder_of(facts),
        reasons=reasons_of(facts),
    )


def _memory(scenario: Scenario, found: _Found) -> DeviceMemory:
    slot = slot_bytes(scenario.model, training=isinstance(scenario.job, Training))
    slots = found.best.slots if found.best else 0
    none_short, own_short = found.none.out_of_memory, found.balanced.out_of_memory
    return DeviceMemory(
        device=scenario.cluster.memory,
        slot=float(slot),
        slots=float(slots * slot),
        none=found.none.memory.total,
        balanced=found.balanced.memory.total,
        none_out_of_memory=none_short,
        balanced_out_of_memory=own_short,
        avoids_out_of_memory=none_short > 0 and not own_short,
    )


def _one_slot(scenario: Scenario, found: _Found) -> float:
    """Bytes of the fullest device with one spare slot, used as well as can be."""
    tried = [option.memory for option in found.options if option.slots == 1]
    return min(tried, default=_least_memory(scenario, 1))


class _Work:
    """How much of the work is done: microbatches, times contenders."""

    def __init__(self, scenario: Scenario, contenders: int, report: Report | None) -> None:
        draws = DRAWS - 1 if isinstance(scenario.workload, Skew) else 0
        self.search = contenders * scenario.microbatches
        self.total = self.search + 2 * draws * scenario.microbatches
        self.total += 2 * len(PROBE_TOKENS) * PROBE_MICROBATCHES
        self.done = 0
        self.report = report

    def searched(self, layers: int, of: int) -> None:
        """So many layers of the search are done."""
        self._reach(self.search * layers // of)

    def count(self, found: Iterable[Item], work: int) -> list[Item]:
        """All items, of so much work each."""
        items = []
        for item in found:
            items.append(item)
            self._reach(self.done + work)
        return items

    def _reach(self, done: int) -> None:
        self.done = done
        if self.report:
            self.report(done, self.total)
