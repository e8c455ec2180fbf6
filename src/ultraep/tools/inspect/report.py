"""The report of an inspection: one HTML file with interactive plots of the findings.

Shapes: N records, H layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ultraep.files.writing import write_text
from ultraep.tools.inspect.findings import (
    BEYOND,
    LEGEND,
    REPORT_FILE,
    Findings,
    InspectionResult,
    Mask,
    label,
)
from ultraep.tools.report.numbers import Numbers, grouped, microbatches
from ultraep.tools.report.page import Page, plotly_js
from ultraep.tools.report.words import counted, table
from ultraep.trace.read import Trace
from ultraep.trace.replay import Case, plans

ALL = "all texts"


def write_report(out: Path, result: InspectionResult, findings: Findings) -> Path:
    """Write OUT/report.html."""
    library = plotly_js()
    path = out / REPORT_FILE
    write_text(path, page(result, findings).html(library))
    return path


def page(result: InspectionResult, findings: Findings) -> Page:
    """The page with all plots."""
    beyond = f"\n<p>* {BEYOND}.</p>" if findings.beyond else ""
    return Page(
        report="inspect",
        title=f"{result.model}: {findings.headline}",
        facts=_facts(result, findings.sizes),
        notes=result.notes,
        tables={
            "result": f"<p>{LEGEND}.</p>\n{table(*findings.table(), 'result')}{beyond}",
            "history": table(*findings.past_table(), "past-table"),
        },
        numbers=all_numbers(findings),
    )


def _facts(result: InspectionResult, sizes: list[int]) -> list[tuple[str, str]]:
    layers = f"{len(result.layers)} of {counted(result.blocks, 'layer')}"
    texts = ", ".join(f"{text.name} ({text.tokens:,} tokens)" for text in result.texts)
    ranks = ", ".join(f"EP{size}" for size in sizes)
    return [
        ("Model", f"{result.model}, {result.family}, {result.parameters / 1e6:,.1f} million "
                  "parameters"),
        ("Layers", f"{layers}, {result.experts} experts per layer, {result.top_k} per token"),
        ("Texts", f"{texts}; windows of {result.window:,} tokens, sequences of {result.sequence}"),
        ("Ranks", f"{ranks}; the tokens of a window are divided evenly over the ranks"),
        ("Machine", f"{result.device}, {result.dtype}, ultraep {result.version}; "
                    f"{result.wall_seconds:.0f} s"),
    ]  # fmt: skip


def all_numbers(findings: Findings) -> dict[str, Numbers]:
    """The numbers of every plot."""
    trace = findings.trace
    every, layers = np.ones(len(trace), dtype=bool), trace.layers.tolist()
    texts = {span.name: findings.text == span.name for span in findings.texts}
    plan_of = list(plans([trace], findings.shown.case)).__getitem__
    numbers = {
        "sizes": by_group(findings, {ALL: every}),
        "layers": by_group(findings, {layer: trace.layer == layer for layer in layers}),
        "texts": by_group(findings, texts),
        "experts": expert_loads(trace, {ALL: every} | texts),
        "microbatches": microbatches(trace, plan_of, findings.names, noun="Window"),
    }
    if any(outcome.case.history for outcome in findings.outcomes):
        numbers["history"] = by_past(findings)
    return numbers


def by_group(findings: Findings, groups: dict[Any, Mask], cases: Sequence[Case] = ()) -> Numbers:
    """Imbalance and replicas of groups of records, by number of ranks, case and group.

    cases: the cases to draw at every number of ranks; all by default.
    """
    masks = list(groups.values())
    cases = cases or [outcome.case for outcome in findings.of_size(findings.sizes[0])]
    return {
        "sizes": findings.sizes,
        "cases": [
            {"label": label(case), "policy": case.config.policy, "slots": case.topology.slots}
            for case in cases
        ],
        "names": list(groups),
        "values": [
            {
                label(outcome.case): {
                    "mean": grouped(outcome.after, masks),
                    "worst": grouped(outcome.after, masks, np.max),
                    "copies": grouped(outcome.copies, masks),
                }
                for outcome in findings.of_size(size)
            }
            for size in findings.sizes
        ],
    }


def by_past(findings: Findings) -> Numbers:
    """Policies that place by past windows, beside the shown policy with the same slots."""
    shown = findings.shown.case
    cases = [
        outcome.case
        for outcome in findings.of_size(findings.sizes[0])
        if (outcome.case.history or outcome.case.config.policy == shown.config.policy)
        and outcome.case.topology.slots == shown.topology.slots
    ]
    history = next(outcome.case.history for outcome in findings.outcomes if outcome.case.history)
    same, changed = findings.by_past(history)
    return by_group(findings, {"same": same, "changed": changed}, cases)


def expert_loads(trace: Trace, groups: dict[str, Mask]) -> Numbers:
    """Load of every expert over the mean of its layer, by group of records and layer."""
    loads_NE = trace.loads.sum(axis=1, dtype=np.int64)

    def over_mean(mask: Mask) -> list[list[float]]:
        own = [loads_NE[mask & (trace.layer == layer)].sum(axis=0) for layer in trace.layers]
        loads_HE = np.stack(own)
        means_H1 = np.maximum(loads_HE.mean(axis=1, keepdims=True), 1e-9)
        rounded: list[list[float]] = (loads_HE / means_H1).round(3).tolist()
        return rounded

    return {
        "layers": trace.layers.tolist(),
        "texts": list(groups),
        "load": [over_mean(mask) for mask in groups.values()],
    }
