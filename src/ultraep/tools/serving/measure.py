"""Waiting times -> percentiles, throughput, share within the objective; as a table and as rows.

A prompt that got no first token has waited for ever: it counts in every percentile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np

from ultraep.tools.report.rows import MeasuredNumber, cpu_device, versions
from ultraep.tools.serving.load import Prompt
from ultraep.tools.serving.variants import FORCED

PERCENTILES = (50, 90, 99)
QUIET = 0.03  # share of the time that others may have a core
SHOWN = "ultraep"  # the variant of the headline, if it was measured


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One variant at one rate in one round. Lists have an entry for every prompt.

    waited: seconds to the first token; None: there was none.
    first: that token or its logits, where known.
    arrived: the second of the last arrival.   seconds: until the last first token.
    """

    variant: str
    rate: float
    number: int  # of the round
    waited: list[float | None]
    tokens: list[int]
    arrived: float
    seconds: float
    first: list[Any] = field(default_factory=list)
    errors: Mapping[str, int] = field(default_factory=dict)
    microbatches: int = 0
    before: float | None = None  # imbalance, weighted by rows; None: not known
    after: float | None = None
    worst_before: float | None = None
    worst_after: float | None = None
    copies: int = 0
    sent: int = 0  # bytes of copies, all ranks
    experts: float | None = None  # seconds of the processor that worked longest, layer by layer
    disturbed: float | None = None  # share of the time in which others had the core of a rank


@dataclass(frozen=True)
class UnderLoad:
    """All turns of one variant at one rate."""

    variant: str
    rate: float
    turns: tuple[Turn, ...]

    @cached_property
    def waited(self) -> list[float]:
        """Seconds of every prompt of all turns; infinite without a first token."""
        return [math.inf if w is None else w for turn in self.turns for w in turn.waited]

    def percentile(self, share: int) -> float | None:
        """Seconds to the first token that so many of a hundred had; None: they had none.

        A time that was measured, not one between two of them.
        """
        seconds = float(np.percentile(self.waited, share, method="inverted_cdf"))
        return seconds if math.isfinite(seconds) else None

    @property
    def unanswered(self) -> int:
        """Prompts without a first token."""
        return sum(math.isinf(waited) for waited in self.waited)

    @property
    def throughput(self) -> float:
        """Answered prompts a second."""
        return (len(self.waited) - self.unanswered) / self.seconds if self.seconds else 0.0

    @property
    def seconds(self) -> float:
        """Of all turns."""
        return sum(turn.seconds for turn in self.turns)

    @property
    def tokens(self) -> int:
        """Tokens of answered prompts."""
        pairs = (pair for turn in self.turns for pair in zip(turn.waited, turn.tokens, strict=True))
        return sum(tokens for waited, tokens in pairs if waited is not None)

    def within(self, objective: float) -> float:
        """The share of all prompts whose first token came in time."""
        return float(np.mean([waited <= objective for waited in self.waited]))

    def mean(self, name: str) -> float | None:
        """The mean of a number of the turns, such as "before"; None: not known."""
        return _mean(getattr(turn, name) for turn in self.turns)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def waits(prompts: Sequence[Prompt], ends: Sequence[float | None]) -> list[float | None]:
    """Seconds from every arrival to its end; None: there was none."""
    pairs = zip(prompts, ends, strict=True)
    return [None if end is None else end - prompt.arrival for prompt, end in pairs]


def under_load(turns: Sequence[Turn]) -> list[UnderLoad]:
    """Turns by rate and variant; variants in the order of their first turns."""
    variants = list(dict.fromkeys(turn.variant for turn in turns))
    groups: dict[tuple[float, int], list[Turn]] = {}
    for turn in turns:
        groups.setdefault((turn.rate, variants.index(turn.variant)), []).append(turn)
    return [
        UnderLoad(variants[place], rate, tuple(groups[rate, place]))
        for rate, place in sorted(groups)
    ]


def gains(loads: Sequence[UnderLoad]) -> list[float | None]:
    """How many times sooner than the first variant at the same rate; None: one had no token."""
    first = {load.rate: load.percentile(50) for load in reversed(loads)}
    pairs = [(first[load.rate], load.percentile(50)) for load in loads]
    return [base / own if base and own else None for base, own in pairs]


def experts_per_token(turns: Sequence[Turn], variant: str) -> float | None:
    """Processor time for a served token in the experts of the busiest rank, in seconds."""
    own = tuple(turn for turn in turns if turn.variant == variant and turn.experts is not None)
    tokens = UnderLoad(variant, 0.0, own).tokens
    return sum(turn.experts or 0.0 for turn in own) / tokens if tokens else None


def agreement(turns: Sequence[Turn], variant: str) -> float | None:
    """The share of first tokens that are those of the first variant in the same round."""
    base = {(t.rate, t.number): t.first for t in turns if t.variant == turns[0].variant}
    pairs = [
        (own, other)
        for turn in turns
        if turn.variant == variant
        for own, other in zip(turn.first, base.get((turn.rate, turn.number), ()), strict=False)
        if own is not None and other is not None
    ]
    return sum(own == other for own, other in pairs) / len(pairs) if pairs else None


# -- for people ----------------------------------------------------------------------------------


def headline(loads: Sequence[UnderLoad]) -> str:
    """The answer in one line: the highest rate, `ultraep` or the last policy beside the first."""
    at_highest = [load for load in loads if load.rate == loads[-1].rate]
    policies = [load for load in at_highest if load.variant != FORCED] or at_highest
    first = at_highest[0]
    load = next((load for load in policies if load.variant == SHOWN), policies[-1])
    gain = gains(loads)[loads.index(load)]
    answer = f"First token after {_shown(load.percentile(50))} s with {load.variant}"
    if load is not first and gain is not None:
        answer += f", {_shown(first.percentile(50))} s with {first.variant} ({gain:.2f}x)"
    return f"{answer} at {load.rate:g} prompts/s"


def table(loads: Sequence[UnderLoad], objective: float) -> tuple[list[str], list[list[str]]]:
    """Head and a row for every variant and rate; waiting times in seconds."""
    head = ["rate", "policy", *(f"p{share}" for share in PERCENTILES), "sooner", "served"]
    rows = [
        [
            f"{load.rate:g}/s",
            load.variant,
            *(_shown(load.percentile(share)) for share in PERCENTILES),
            "-" if gain is None else f"{gain:.2f}x",
            f"{load.throughput:.2f}",
            f"{load.within(objective):.0%}",
            _imbalance(load),
            str(load.unanswered),
        ]
        for load, gain in zip(loads, gains(loads), strict=True)
    ]
    return [*head, f"in {objective:g} s", "imbalance", "lost"], rows


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _imbalance(load: UnderLoad) -> str:
    before, after = load.mean("before"), load.mean("after")
    return "-" if before is None or after is None else f"{before:.2f}->{after:.2f}"


def notes(turns: Sequence[Turn]) -> list[str]:
    """Limits of the figures: errors, other first tokens, cores that other programs had."""
    loads, base = under_load(turns), turns[0].variant
    lines = []
    for load in loads:
        errors = sum((Counter(turn.errors) for turn in load.turns), Counter[str]())
        if errors:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(errors.items()))
            lines.append(f"{load.variant} at {load.rate:g}/s: {kinds}")
    variants = dict.fromkeys(turn.variant for turn in turns)
    equal = {name: agreement(turns, name) for name in variants if name not in (base, FORCED)}
    if any(equal.values()):
        shares = ", ".join(f"{name} {share:.1%}" for name, share in equal.items() if share)
        lines.append(f"first tokens equal to {base}: {shares}")
    spent = {name: experts_per_token(turns, name) for name in variants}
    if any(spent.values()):
        times = ", ".join(f"{name} {1e3 * own:.3f} ms" for name, own in spent.items() if own)
        lines.append(f"processor time per token in experts: {times}")
    disturbed = max((load.mean("disturbed") or 0.0 for load in loads), default=0.0)
    if disturbed > QUIET:
        lines.append(
            f"other programs had a core of a rank up to {disturbed:.0%} of the time: measure on "
            "idle cores"
        )
    return lines


# -- for machines --------------------------------------------------------------------------------


def rows_of(loads: Sequence[UnderLoad], objective: float, command: str) -> list[MeasuredNumber]:
    """A row for every number that is known, like those of all benchmarks."""
    origin = cpu_device(), versions(), command, datetime.now(UTC).date().isoformat()
    rows = []
    for load, gain in zip(loads, gains(loads), strict=True):
        case: dict[str, str | int | float] = {
            "policy": load.variant,
            "rate": load.rate,
            "prompts": len(load.waited),
        }
        for metric, value, unit in _numbers(load, gain, objective):
            if value is not None:
                number = float(f"{value:.7g}")
                rows.append(MeasuredNumber("prefill", case, metric, number, unit, *origin))
    return rows


def _numbers(
    load: UnderLoad, gain: float | None, objective: float
) -> Iterator[tuple[str, float | None, str]]:
    """Metric, value and unit."""
    for share in PERCENTILES:
        yield f"first_token_p{share}", load.percentile(share), "s"
    yield "first_token_gain", gain, "ratio"
    yield "throughput", load.throughput, "prompts/s"
    yield "throughput_tokens", load.tokens / load.seconds if load.seconds else 0.0, "tokens/s"
    yield f"within_{objective:g}_s", load.within(objective), "ratio"
    yield "unanswered", load.unanswered, "prompts"
    yield "imbalance_before", load.mean("before"), "ratio"
    yield "imbalance_after", load.mean("after"), "ratio"
    yield "copies", sum(turn.copies for turn in load.turns), "copies"
    yield "weights_sent", sum(turn.sent for turn in load.turns), "bytes"
    spent = experts_per_token(load.turns, load.variant)
    yield "experts_processor_time", None if spent is None else 1e3 * spent, "ms/token"
    yield "cores_taken_by_others", load.mean("disturbed"), "ratio"
