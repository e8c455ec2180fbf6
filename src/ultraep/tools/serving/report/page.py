"""The page of a load test: its sections, its table, and the numbers that page.js draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ultraep.tools.report.numbers import Numbers
from ultraep.tools.report.page import Page, Section, own_file
from ultraep.tools.report.words import table
from ultraep.tools.serving.measure import PERCENTILES, Turn, UnderLoad, gains, under_load
from ultraep.tools.serving.words import name_of, notes, times, verdict

HEAD = (
    *("", "p50 (s)", "p90 (s)", "p99 (s)", "sooner", "served/s", "in time", "imbalance before"),
    *("after", "lost"),
)
DIGITS = 4


def page(turns: Sequence[Turn], objective: float, facts: Sequence[tuple[str, str]]) -> Page:
    """All that stands on it."""
    found = under_load(turns)
    numbers = {
        "waits": by_rate(found, {f"p{n}": _percentile(n) for n in PERCENTILES})
        | {"objective": objective},
        "served": by_rate(found, {"served": lambda one: one.throughput}),
        "intime": by_rate(found, {"share": lambda one: one.within(objective)}),
    }
    if any(one.after is not None for one in found):
        numbers["loads"] = by_rate(
            found, {"before": lambda one: one.before, "after": lambda one: one.after}
        )
    sections = (
        Section("waits", "Time to the first token", ("waits",)),
        Section("served", "What is served", ("served", "intime")),
        Section("loads", "Imbalance", ("loads",)),
    )
    return Page(
        title="Prefill under load",
        facts=facts,
        notes=notes(turns, found),
        result=f"<h2>Result</h2>\n{_table(found, objective)}",
        sections=[section for section in sections if section.plots[0] in numbers],
        told=_sentences(found, objective),
        numbers=numbers,
        script=own_file("ultraep.tools.serving.report", "page.js"),
    )


def _percentile(share: int) -> Callable[[UnderLoad], float | None]:
    return lambda one: one.percentile(share)


def by_rate(found: Sequence[UnderLoad], values: dict[str, Callable[[UnderLoad], Any]]) -> Numbers:
    """Values of every variant, rate by rate; None where there is none."""
    rates = sorted({one.rate for one in found})
    lines = []
    for variant in dict.fromkeys(one.variant for one in found):
        own = {one.rate: one for one in found if one.variant == variant}
        line: Numbers = {"variant": variant, "label": name_of(variant)}
        for name, value in values.items():
            line[name] = [_rounded(value(own[rate])) if rate in own else None for rate in rates]
        lines.append(line)
    return {"rates": rates, "lines": lines}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)


def _table(found: Sequence[UnderLoad], objective: float) -> str:
    rows = [
        [
            f"{one.rate:g}/s {name_of(one.variant)}",
            *(_shown(one.percentile(share)) for share in PERCENTILES),
            times(gain),
            f"{one.throughput:.2f}",
            f"{one.within(objective):.1%}",
            *(_shown(value) for value in (one.before, one.after)),
            str(one.unanswered),
        ]
        for one, gain in zip(found, gains(found), strict=True)
    ]
    return table(HEAD, rows, "result")


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _sentences(found: Sequence[UnderLoad], objective: float) -> dict[str, str]:
    return {
        "waits": " ".join(verdict(found))
        + " Solid lines are medians, dotted ones the 90th percentile; the dashed line is what is "
        "wanted.",
        "served": "First tokens a second. Where a line leaves the diagonal, more arrives than is "
        "served, and the queue grows as long as that lasts.",
        "intime": f"The share of prompts whose first token came within {objective:g} s.",
        "loads": "Rows of the fullest rank over those of the mean rank, all layers and microbatches"
        " together: dotted as routed, solid as served.",
    }
