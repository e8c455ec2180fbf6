"""Measurements of turns: percentiles of the time to first token (TTFT), throughput, gains; report.

A prompt without a first token counts as an infinite wait in every percentile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np

from ultraep_tools.report.numbers import Numbers, plain
from ultraep_tools.report.page import Page
from ultraep_tools.report.rows import MeasuredNumber, versions
from ultraep_tools.report.words import table as html_table
from ultraep_tools.serving.load import Prompt

PERCENTILES = (50, 90, 99)
FORCED = "even"  # the variant with forced even routing


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One variant at one rate in one round. Lists have one entry per prompt.

    waited: TTFT in seconds; None without a first token.
    first: the first token or its logits, where known.
    seconds: until the last first token.
    before, after: imbalance over all rows of the turn; None if unknown.
    sent: bytes of replicas, all ranks.
    experts: CPU seconds of the busiest rank's experts, summed over layers.
    disturbed: share of the time in which other programs used the core of a rank.
    """

    variant: str
    rate: float
    number: int  # of the round
    waited: list[float | None]
    tokens: list[int]
    seconds: float
    first: list[Any] = field(default_factory=list)
    errors: Mapping[str, int] = field(default_factory=dict)
    microbatches: int = 0
    before: float | None = None
    after: float | None = None
    worst_before: float | None = None
    worst_after: float | None = None
    copies: int = 0
    sent: int = 0
    experts: float | None = None
    disturbed: float | None = None

    @classmethod
    def of(cls, prompts: Sequence[Prompt], ends: Sequence[float | None], **more: Any) -> Turn:
        """Return the turn of these prompts. ends: second of each first token."""
        pairs = zip(prompts, ends, strict=True)
        waited = [None if end is None else end - prompt.arrival for prompt, end in pairs]
        return cls(waited=waited, tokens=[prompt.tokens for prompt in prompts], **more)


@dataclass(frozen=True)
class UnderLoad:
    """All turns of one variant at one rate."""

    variant: str
    rate: float
    turns: tuple[Turn, ...]

    @cached_property
    def waited(self) -> list[float]:
        """TTFT of every prompt of all turns; infinite without a first token."""
        return [math.inf if w is None else w for turn in self.turns for w in turn.waited]

    def percentile(self, share: int) -> float | None:
        """A percentile of TTFT, which is a measured value; None if it is infinite."""
        seconds = float(np.percentile(self.waited, share, method="inverted_cdf"))
        return seconds if math.isfinite(seconds) else None

    @property
    def unanswered(self) -> int:
        """Prompts without a first token."""
        return sum(math.isinf(waited) for waited in self.waited)

    @property
    def seconds(self) -> float:
        """Duration of all turns."""
        return sum(turn.seconds for turn in self.turns)

    @property
    def throughput(self) -> float:
        """Answered prompts per second."""
        return (len(self.waited) - self.unanswered) / self.seconds if self.seconds else 0.0

    @property
    def tokens(self) -> int:
        """Tokens of answered prompts."""
        pairs = (pair for turn in self.turns for pair in zip(turn.waited, turn.tokens, strict=True))
        return sum(tokens for waited, tokens in pairs if waited is not None)

    def within(self, objective: float) -> float:
        """Share of all prompts whose TTFT met the objective."""
        return float(np.mean([waited <= objective for waited in self.waited]))

    def mean(self, name: str) -> float | None:
        """Mean of an attribute of the turns, such as "before"; None if unknown."""
        values = [getattr(turn, name) for turn in self.turns]
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if known else None


def under_load(turns: Sequence[Turn]) -> list[UnderLoad]:
    """Group turns by rate and variant; variants in the order of their first turns."""
    variants = list(dict.fromkeys(turn.variant for turn in turns))
    groups: dict[tuple[float, int], list[Turn]] = {}
    for turn in turns:
        groups.setdefault((turn.rate, variants.index(turn.variant)), []).append(turn)
    return [
        UnderLoad(variants[place], rate, tuple(groups[rate, place]))
        for rate, place in sorted(groups)
    ]


def gains(loads: Sequence[UnderLoad]) -> list[float | None]:
    """Median TTFT of the first variant at the same rate over the median TTFT of each variant."""
    first = {load.rate: load.percentile(50) for load in reversed(loads)}
    pairs = [(first[load.rate], load.percentile(50)) for load in loads]
    return [base / own if base and own else None for base, own in pairs]


def experts_per_token(turns: Sequence[Turn], variant: str) -> float | None:
    """CPU seconds per served token in the experts of the busiest rank."""
    own = tuple(turn for turn in turns if turn.variant == variant and turn.experts is not None)
    tokens = UnderLoad(variant, 0.0, own).tokens
    return sum(turn.experts or 0.0 for turn in own) / tokens if tokens else None


def agreement(turns: Sequence[Turn], variant: str) -> float | None:
    """Share of first tokens equal to the first tokens of the first variant in the same round."""
    base = {(t.rate, t.number): t.first for t in turns if t.variant == turns[0].variant}
    pairs = [
        (own, other)
        for turn in turns
        if turn.variant == variant
        for own, other in zip(turn.first, base.get((turn.rate, turn.number), ()), strict=False)
        if own is not None and other is not None
    ]
    return sum(own == other for own, other in pairs) / len(pairs) if pairs else None


# -- report --------------------------------------------------------------------------------------

QUIET = 0.03  # share of the time that other programs may use a core without a note
SHOWN = "ultraep"  # the variant of the headline, if it was measured
LEGEND = (
    "Times to first token are in seconds. sooner: median of the first policy over the median of "
    "this policy; served: first tokens per second; lost: prompts without a first token."
)


def headline(loads: Sequence[UnderLoad]) -> str:
    """One sentence: the median TTFT of `SHOWN` and of the first policy at the highest rate."""
    at_highest = [load for load in loads if load.rate == loads[-1].rate]
    policies = [load for load in at_highest if load.variant != FORCED] or at_highest
    first = at_highest[0]
    load = next((load for load in policies if load.variant == SHOWN), policies[-1])
    gain = gains(loads)[loads.index(load)]
    answer = f"First token after {_seconds(load.percentile(50))} s with {load.variant}"
    if load is not first and gain is not None:
        answer += f", {_seconds(first.percentile(50))} s with {first.variant} ({gain:.2f}x)"
    return f"{answer} at {load.rate:g} prompts/s"


def table(loads: Sequence[UnderLoad], objective: float) -> tuple[list[str], list[list[str]]]:
    """Head, and a row per variant and rate; times in seconds."""
    head = ["rate", "policy", *(f"p{share}" for share in PERCENTILES), "sooner", "served"]
    rows = []
    for load, gain in zip(loads, gains(loads), strict=True):
        before, after = load.mean("before"), load.mean("after")
        known = before is not None and after is not None
        rows.append(
            [
                f"{load.rate:g}/s",
                load.variant,
                *(_seconds(load.percentile(share)) for share in PERCENTILES),
                "-" if gain is None else f"{gain:.2f}x",
                f"{load.throughput:.2f}",
                f"{load.within(objective):.0%}",
                f"{before:.2f}->{after:.2f}" if known else "-",
                str(load.unanswered),
            ]
        )
    return [*head, f"in {objective:g} s", "imbalance", "lost"], rows


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def notes(turns: Sequence[Turn]) -> list[str]:
    """Errors, agreement of first tokens, CPU time of experts, and disturbed cores."""
    loads, base = under_load(turns), turns[0].variant
    lines = []
    for load in loads:
        errors = sum((Counter(turn.errors) for turn in load.turns), Counter[str]())
        if errors:
            counts = ", ".join(f"{count} {error}" for error, count in sorted(errors.items()))
            lines.append(f"{load.variant} at {load.rate:g}/s: {counts}")
    variants = dict.fromkeys(turn.variant for turn in turns)
    equal = {name: agreement(turns, name) for name in variants if name not in (base, FORCED)}
    if any(equal.values()):
        shares = ", ".join(f"{name} {share:.1%}" for name, share in equal.items() if share)
        lines.append(f"first tokens equal to {base}: {shares}")
    cpu_time = {name: experts_per_token(turns, name) for name in variants}
    if any(cpu_time.values()):
        times = ", ".join(f"{name} {1e3 * own:.3f} ms" for name, own in cpu_time.items() if own)
        lines.append(f"CPU time per token in the experts of the busiest rank: {times}")
    disturbed = max((load.mean("disturbed") or 0.0 for load in loads), default=0.0)
    if disturbed > QUIET:
        lines.append(
            f"other programs used the core of a rank up to {disturbed:.0%} of the time; measure "
            "again on idle cores"
        )
    return lines


def rows_of(
    loads: Sequence[UnderLoad], objective: float, command: str, device: str
) -> list[MeasuredNumber]:
    """A row per known number, in the format of all benchmarks."""
    origin = device, versions(), command, datetime.now(UTC).date().isoformat()
    rows = []
    for load, gain in zip(loads, gains(loads), strict=True):
        case: dict[str, str | int | float] = {
            "policy": load.variant,
            "rate": load.rate,
            "prompts": len(load.waited),
        }
        cpu_time = experts_per_token(load.turns, load.variant)
        numbers = [
            *((f"first_token_p{share}", load.percentile(share), "s") for share in PERCENTILES),
            ("first_token_gain", gain, "ratio"),
            ("throughput", load.throughput, "prompts/s"),
            ("throughput_tokens", load.tokens / load.seconds if load.seconds else 0.0, "tokens/s"),
            (f"within_{objective:g}_s", load.within(objective), "ratio"),
            ("unanswered", load.unanswered, "prompts"),
            ("imbalance_before", load.mean("before"), "ratio"),
            ("imbalance_after", load.mean("after"), "ratio"),
            ("copies", sum(turn.copies for turn in load.turns), "copies"),
            ("weights_sent", sum(turn.sent for turn in load.turns), "bytes"),
            ("experts_processor_time", None if cpu_time is None else 1e3 * cpu_time, "ms/token"),
            ("cores_taken_by_others", load.mean("disturbed"), "ratio"),
        ]
        for metric, value, unit in numbers:
            if value is not None:
                number = float(f"{value:.7g}")
                rows.append(MeasuredNumber("prefill", case, metric, number, unit, *origin))
    return rows


# -- page ----------------------------------------------------------------------------------------


def page(turns: Sequence[Turn], objective: float, facts: Sequence[tuple[str, str]]) -> Page:
    """Return the page with all plots. facts: names and values of what was measured."""
    loads = under_load(turns)
    head, rows = table(loads, objective)
    return Page(
        report="serving",
        title=headline(loads),
        facts=facts,
        notes=notes(turns),
        tables={"result": f"<p>{LEGEND}</p>\n{html_table(head, rows, 'result')}"},
        numbers=all_numbers(loads, objective),
    )


def all_numbers(loads: Sequence[UnderLoad], objective: float) -> dict[str, Numbers]:
    """Numbers by plot: the values of every variant, rate by rate."""
    rates = sorted({load.rate for load in loads})
    variants = list(dict.fromkeys(load.variant for load in loads))
    measured = {(load.variant, load.rate): load for load in loads}

    def lines(**values: Callable[[UnderLoad], float | None]) -> Numbers:
        drawn = []
        for variant in variants:
            own = [measured.get((variant, rate)) for rate in rates]
            series = {
                name: plain([None if load is None else value(load) for load in own])
                for name, value in values.items()
            }
            drawn.append({"variant": variant, "label": variant} | series)
        return {"rates": rates, "lines": drawn}

    numbers = {
        "waits": lines(**{f"p{n}": lambda load, n=n: load.percentile(n) for n in PERCENTILES})
        | {"objective": objective},
        "served": lines(served=lambda load: load.throughput),
        "intime": lines(share=lambda load: load.within(objective)),
    }
    if any(load.mean("after") is not None for load in loads):
        numbers["loads"] = lines(
            before=lambda load: load.mean("before"), after=lambda load: load.mean("after")
        )
    return numbers
