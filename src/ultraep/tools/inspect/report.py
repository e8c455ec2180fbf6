"""The report of an inspection: one HTML file with interactive plots, made of its findings.

Shapes: N records, H layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ultraep.files.writing import write_text
from ultraep.tools.inspect.findings import (
    BEYOND,
    REPORT_FILE,
    Findings,
    InspectionResult,
    Mask,
    label,
)
from ultraep.tools.report.numbers import Numbers, microbatches, plain
from ultraep.tools.report.page import PICKER, Page, Section, own_file, plotly_js
from ultraep.tools.report.words import counted, table
from ultraep.trace.replay import Replayed, plans

ALL = "all texts"
SECTIONS = (
    Section("sizes", "Imbalance by the size of the group", ("sizes",)),
    Section("layers", "Imbalance of every layer", ("layers",)),
    Section("texts", "Imbalance of every text", ("texts",)),
    Section("history", "Placing by past windows", ("history",)),
    Section("experts", "Popular experts", ("experts",)),
    Section("microbatches", "One window, rank by rank", ("microbatches",)),
)
CAPTIONS = {
    "sizes": "Mean of all layers and windows. More ranks have fewer experts each, so a busy expert "
    "weighs more.",
    "layers": "Mean of all windows.",
    "texts": "Mean of all layers and windows of a text.",
    "history": "Policies that place by past windows, where the past is of the same text and right "
    "after a change of text. ultraep plans by the loads of the window itself.",
    "experts": "Load of every expert over the mean expert of its layer: 1 is a fair share. Texts "
    "that differ here need different copies.",
    "microbatches": "One bar is one rank and one block is one expert. The colour of a block is the "
    "home of its expert; hatched blocks are copies. The first one shown is the worst of all.",
}
CHOICE = '<p class="picker"><label>{noun} <select id="choice-{plot}"></select></label></p>'


def write_report(out: Path, result: InspectionResult, findings: Findings) -> Path:
    """Write OUT/report.html."""
    library = plotly_js()
    path = out / REPORT_FILE
    write_text(path, page(result, findings).html(library))
    return path


def page(result: InspectionResult, findings: Findings) -> Page:
    """Everything on the page."""
    numbers = all_numbers(findings)
    head, rows = result.table()
    beyond = f"\n<p>* {BEYOND}.</p>" if any(row.beyond for row in result.rows) else ""
    past_head, past_rows = findings.past_table()
    return Page(
        title=f"{result.model}: {findings.headline}",
        facts=_facts(result),
        notes=result.notes,
        result=f"<h2>Result</h2>\n{table(head, rows, 'result')}{beyond}",
        sections=[section for section in SECTIONS if section.plots[0] in numbers],
        captions=CAPTIONS,
        numbers=numbers,
        script=own_file("ultraep.tools.report", "inspect.js"),
        controls={
            "layers": CHOICE.format(noun="ranks", plot="layers"),
            "texts": CHOICE.format(noun="ranks", plot="texts"),
            "experts": CHOICE.format(noun="text", plot="experts"),
            "microbatches": PICKER.format(noun="window"),
        },
        tables={"history": table(past_head, past_rows, "past-table")},
    )


def _facts(result: InspectionResult) -> list[tuple[str, str]]:
    layers = f"{len(result.layers)} of {counted(result.blocks, 'layer')}"
    texts = ", ".join(f"{text.name} ({text.tokens:,} tokens)" for text in result.texts)
    sizes = ", ".join(f"EP{size}" for size in dict.fromkeys(row.ranks for row in result.rows))
    return [
        ("Model", f"{result.model}, {result.family}, {result.parameters / 1e6:,.1f} million "
                  "parameters"),
        ("Layers", f"{layers}, {result.experts} experts per layer, {result.top_k} per token"),
        ("Texts", f"{texts}; windows of {result.window:,} tokens, sequences of {result.sequence}"),
        ("Groups", f"{sizes}: the tokens of a window are dealt out evenly to the ranks"),
        ("Machine", f"{result.device}, {result.dtype}, ultraep {result.version}; "
                    f"{result.wall_seconds:.0f} s"),
    ]  # fmt: skip


# -- numbers -------------------------------------------------------------------------------------


def all_numbers(findings: Findings) -> dict[str, Numbers]:
    """By plot; everything that the page draws."""
    trace, texts = findings.trace, [span.name for span in findings.texts]
    layers, shown = trace.layers.tolist(), findings.shown.case
    plan_of = list(plans(trace, shown)).__getitem__
    numbers = {
        "sizes": by_size(findings),
        "layers": by_group(findings, layers, [trace.layer == layer for layer in layers]),
        "texts": by_group(findings, texts, [findings.text == name for name in texts]),
        "experts": popularity(findings),
        "microbatches": microbatches(trace, plan_of, findings.names, noun="Window"),
    }
    if any(outcome.case.history for outcome in findings.outcomes):
        numbers["history"] = by_past(findings)
    return numbers


def by_size(findings: Findings) -> Numbers:
    """Means, worst values and copies of every case, by number of ranks."""
    outcomes = findings.outcomes
    return {
        "sizes": findings.sizes,
        "cases": cases(findings),
        "mean": _by_case(outcomes, lambda outcome: outcome.after.mean()),
        "worst": _by_case(outcomes, lambda outcome: outcome.after.max()),
        "copies": _by_case(outcomes, lambda outcome: outcome.copies.mean()),
    }


def cases(findings: Findings) -> list[Numbers]:
    """Policy and slots of all cases of one size."""
    first = [outcome.case for outcome in findings.of_size(findings.sizes[0])]
    return [
        {"label": label(case), "policy": case.config.policy, "slots": case.topology.slots}
        for case in first
    ]


def _by_case(
    outcomes: Sequence[Replayed], value: Callable[[Replayed], Any]
) -> dict[str, list[float | None]]:
    """By label, a value for every size."""
    values: dict[str, list[Any]] = {}
    for outcome in outcomes:
        values.setdefault(label(outcome.case), []).append(value(outcome))
    return {name: plain(of_case) for name, of_case in values.items()}


def by_group(findings: Findings, names: Sequence[Any], groups: Sequence[Mask]) -> Numbers:
    """Mean and worst imbalance of groups of records, for every size and case."""

    def of_sizes(fold: Callable[[Any], Any]) -> list[dict[str, list[float | None]]]:
        return [
            {
                label(outcome.case): plain([fold(outcome.after[mask]) for mask in groups])
                for outcome in findings.of_size(size)
            }
            for size in findings.sizes
        ]

    return {
        "names": list(names),
        "sizes": findings.sizes,
        "cases": cases(findings),
        "mean": of_sizes(np.mean),
        "worst": of_sizes(np.max),
    }


def by_past(findings: Findings) -> Numbers:
    """Policies that place by the past, where that is of the same text and where it is not."""
    shown = findings.shown.case
    compared = [
        outcome
        for outcome in findings.outcomes
        if (outcome.case.history or outcome.case.config.policy == shown.config.policy)
        and outcome.case.topology.slots == shown.topology.slots
    ]
    history = next(o.case.history for o in findings.outcomes if o.case.history)
    same, changed = findings.by_past(history)

    def means(mask: Mask) -> dict[str, list[float | None]]:
        return _by_case(compared, lambda o: o.after[mask].mean() if mask.any() else np.nan)

    labels = {label(outcome.case) for outcome in compared}
    return {
        "sizes": findings.sizes,
        "cases": [case for case in cases(findings) if case["label"] in labels],
        "window": history,
        "same": means(same),
        "changed": means(changed),
    }


def popularity(findings: Findings) -> Numbers:
    """Load of every expert over the mean, by text and layer."""
    trace, layers = findings.trace, findings.trace.layers
    masks = {ALL: np.ones(len(trace), dtype=bool)}
    masks |= {span.name: findings.text == span.name for span in findings.texts}
    loads_NE = trace.loads.sum(axis=1, dtype=np.int64)

    def shares(mask: Mask) -> list[list[float]]:
        loads_HE = np.stack([loads_NE[mask & (trace.layer == n)].sum(axis=0) for n in layers])
        means_H1 = np.maximum(loads_HE.mean(axis=1, keepdims=True), 1e-9)
        rounded: list[list[float]] = (loads_HE / means_H1).round(3).tolist()
        return rounded

    return {
        "layers": layers.tolist(),
        "texts": list(masks),
        "load": [shares(mask) for mask in masks.values()],
    }
