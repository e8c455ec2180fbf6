"""Why balancing pays or does not, in plain words, from the figures of a simulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ultraep.tools.sim.run import Result
from ultraep.tools.sim.scenario import Scenario
from ultraep.tools.sim.training import Training
from ultraep.trace.schema import FORWARD

PAYS, PAYS_A_LITTLE, DOES_NOT_PAY = "pays", "pays a little", "does not pay"
CLEAR_GAIN = 1.05  # at the low end of the range: it pays
SMALL_GAIN = 1.01  # overall: it pays a little
EVEN_ENOUGH = 0.97  # of ideal without balancing: there is little to gain
LEFT_OVER = 0.02  # imbalance beyond the tolerance that is worth a word
NOTHING_LEFT = 0.001  # of a microbatch

# Stages that are there because of balancing, and those that it shortens.
EXPOSED = {
    "loads": "counting rows and swapping the counts",
    "plan": "planning",
    "replicate": "weights of copies that dispatch does not hide",
    "reroute": "rerouting tokens",
    "reduce": "gradients of copies that the experts' backward does not hide",
}
SHORTENED = {
    "dispatch": "dispatch, which waits for the fullest rank",
    "experts": "experts, on the rank that takes longest",
    "combine": "combine, which waits for the fullest rank",
}
BACK = {
    "replicate": "weights again",
    "dispatch": "dispatch back",
    "experts": "experts back",
    "combine": "combine back",
}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What reasons are made of; `balanced` is `none` where nothing can be copied."""

    scenario: Scenario
    none: Result
    balanced: Result
    ideal: Result
    possible: bool  # some setting could be chosen
    slots_fit: int
    slots_wanted: int
    one_slot: float  # bytes of the fullest device with one slot
    tolerance: float
    verdict: str
    break_even: float | None  # tokens; None: not reached by the most that were tried
    most_tokens: int

    @property
    def once(self) -> str:
        """What passes through the layers once."""
        return "microbatch" if isinstance(self.scenario.job, Training) else "iteration"

    @property
    def often(self) -> str:
        """Several of them."""
        return "microbatches" if self.once == "microbatch" else "iterations"


def verdict_of(gain: float, low: float, *, avoids_out_of_memory: bool) -> str:
    """One of the three; what does not run without balancing pays."""
    if avoids_out_of_memory or low >= CLEAR_GAIN:
        return PAYS
    return PAYS_A_LITTLE if gain >= SMALL_GAIN else DOES_NOT_PAY


# -- seconds -------------------------------------------------------------------------------------


def seconds_by_stage(result: Result) -> dict[str, float]:
    """Seconds of a microbatch: forward, backward and what is computed again taken together."""
    stages = result.stages
    again = 2 if "recompute" in stages else 1
    return {
        name: (again if name in FORWARD else 1) * stages.get(name, 0.0)
        + stages.get(BACK.get(name, ""), 0.0)
        for name in (*EXPOSED, *SHORTENED)
    }


def exposed_seconds(result: Result) -> float:
    """Seconds that balancing adds to a microbatch."""
    found = seconds_by_stage(result)
    return sum(found[name] for name in EXPOSED)


def saved_seconds(none: Result, balanced: Result) -> float:
    """Seconds that balancing takes off a microbatch."""
    before, after = seconds_by_stage(none), seconds_by_stage(balanced)
    return sum(before[name] - after[name] for name in SHORTENED)


# -- words ---------------------------------------------------------------------------------------


def remainder_of(facts: Facts) -> str:
    """What takes most of the time that is left to ideal."""
    own, ideal = seconds_by_stage(facts.balanced), seconds_by_stage(facts.ideal)
    left = {name: own[name] - ideal[name] for name in own}
    total = sum(left.values())
    if total <= NOTHING_LEFT * facts.ideal.seconds:
        return "Nothing worth naming is left to ideal."
    most = max(left, key=lambda name: left[name])
    return (
        f"Of the {_ms(total)} per {facts.once} that are left to ideal, {_ms(left[most])} are "
        f"{(EXPOSED | SHORTENED)[most]}."
    )


def reasons_of(facts: Facts) -> tuple[str, ...]:
    """All that speaks for or against balancing, the weightiest first."""
    if not facts.possible:
        return tuple(_why_impossible(facts))
    return (*_memory(facts), *_little_imbalance(facts), *_costs(facts), *_limits(facts))


def _why_impossible(facts: Facts) -> Iterator[str]:
    topology = facts.scenario.topology
    if topology.ranks == 1:
        yield "There is one rank: it has all the work, and nobody to share it with."
    elif topology.domain_size == 1:
        yield (
            f"Every fast-link domain of {facts.scenario.cluster.name} has one rank: "
            "copies have nowhere to go."
        )
    else:
        room = facts.scenario.cluster.memory
        yield (
            "Not one spare slot fits into memory: with it the fullest device would need "
            f"{_gb(facts.one_slot)} of its {_gb(room)}."
        )
    if facts.none.out_of_memory:
        yield (
            "Without balancing, too, the fullest device runs out of memory, in "
            f"{facts.none.out_of_memory:.0%} of the {facts.often}."
        )


def _memory(facts: Facts) -> Iterator[str]:
    none, balanced = facts.none.out_of_memory, facts.balanced.out_of_memory
    room = _gb(facts.scenario.cluster.memory)
    if none and not balanced:
        yield (
            f"Without balancing the fullest device runs out of its {room} in {none:.0%} of the "
            f"{facts.often}; with it, never."
        )
    elif balanced:
        yield (
            f"Even balanced the fullest device runs out of its {room} in {balanced:.0%} of the "
            f"{facts.often}: use fewer tokens per rank, or more devices."
        )


def _little_imbalance(facts: Facts) -> Iterator[str]:
    share = facts.none.throughput / facts.ideal.throughput
    imbalance = f"the fullest rank has {facts.none.imbalance:.2f} times the mean"
    if share >= EVEN_ENOUGH:
        yield (
            f"There is little to gain: {imbalance}, and without balancing the cluster already "
            f"reaches {share:.1%} of ideal."
        )
    elif facts.verdict != DOES_NOT_PAY:
        yield (
            f"There is something to gain: {imbalance}, and without balancing the cluster reaches "
            f"{share:.0%} of ideal."
        )


def _costs(facts: Facts) -> Iterator[str]:
    cost, saved = exposed_seconds(facts.balanced), saved_seconds(facts.none, facts.balanced)
    figures = (
        f"counting, planning and moving copies cost {_ms(cost)} per {facts.once}, "
        f"balance saves {_ms(max(saved, 0.0))}"
    )
    if cost >= saved:
        yield f"Balancing costs more than it saves: {figures}."
    elif cost > saved / 2:
        yield f"Its own costs eat most of what it saves: {figures}."
    else:
        yield f"It saves more than it costs: {figures}."
    tokens = facts.scenario.job.tokens
    if facts.break_even is None:
        yield f"No number of tokens per rank up to {facts.most_tokens:,} makes up for its costs."
    elif tokens < facts.break_even:
        yield (
            f"{tokens:,} tokens per rank and {facts.once} are too few: "
            f"it begins to pay at about {rounded(facts.break_even):,}."
        )


def _limits(facts: Facts) -> Iterator[str]:
    if facts.slots_fit < facts.slots_wanted:
        most = "one spare slot" if facts.slots_fit == 1 else f"{facts.slots_fit} spare slots"
        yield f"Memory has room for no more than {most}."
    topology, left = facts.scenario.topology, facts.balanced.imbalance
    if topology.num_domains > 1 and left > 1 + facts.tolerance + LEFT_OVER:
        yield (
            f"CopySets stay inside domains of {topology.domain_size} ranks: the fullest rank keeps "
            f"{left:.2f} times the mean."
        )


def rounded(tokens: float) -> int:
    """A break-even to two digits: it is no more certain than that."""
    return int(float(f"{tokens:.2g}"))


def _ms(seconds: float) -> str:
    """Milliseconds with three digits or so."""
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.{1 if value >= 10 else 2}f} ms"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"
