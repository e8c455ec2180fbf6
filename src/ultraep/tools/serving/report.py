"""The report of a load test: time to the first token against the rate, a line for each variant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ultraep.files.writing import write_text
from ultraep.tools.report.numbers import Numbers, plain
from ultraep.tools.report.page import Page, Section, own_file, plotly_js
from ultraep.tools.report.words import table as html_table
from ultraep.tools.serving.measure import (
    PERCENTILES,
    Turn,
    UnderLoad,
    headline,
    notes,
    table,
    under_load,
)

SECTIONS = (
    Section("waits", "Time to the first token", ("waits",)),
    Section("served", "Throughput", ("served", "intime")),
    Section("loads", "Imbalance", ("loads",)),
)
CAPTIONS = {
    "waits": "Solid lines are medians, dotted lines the 90th percentile. The dashed line is the "
    "objective.",
    "served": "First tokens a second. Where a line leaves the diagonal, more prompts arrive than "
    "are served, and the queue grows.",
    "intime": "The share of prompts whose first token came within the objective.",
    "loads": "Rows of the busiest rank over the mean, of all layers and microbatches: dotted as "
    "routed, solid as served.",
}


def write_report(
    path: Path, turns: Sequence[Turn], objective: float, facts: Sequence[tuple[str, str]]
) -> None:
    """Write the page. facts: what was measured, by name."""
    library = plotly_js()
    write_text(path, page(turns, objective, facts).html(library))


def page(turns: Sequence[Turn], objective: float, facts: Sequence[tuple[str, str]]) -> Page:
    """Everything on the page."""
    loads = under_load(turns)
    head, rows = table(loads, objective)
    numbers = all_numbers(loads, objective)
    return Page(
        title=headline(loads),
        facts=facts,
        notes=notes(turns),
        result=f"<h2>Result</h2>\n{html_table(head, rows, 'result')}",
        sections=[section for section in SECTIONS if section.plots[0] in numbers],
        captions=CAPTIONS,
        numbers=numbers,
        script=own_file("ultraep.tools.report", "serving.js"),
    )


def all_numbers(loads: Sequence[UnderLoad], objective: float) -> dict[str, Numbers]:
    """By plot; values of every variant, rate by rate."""
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
