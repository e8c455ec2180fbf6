"""The recorded loads planned again, under all policies: numbers for a plot and a table.

Policies that place by the past see the last microbatches of their layer, as many as half of the
shortest domain has steps. Means are taken over all steps, and over a few of them right before and
right after every change of domain: the router learns, so loads drift inside of a domain, too.
"""

from __future__ import annotations

import math
from statistics import fmean

import numpy as np

from ultraep.arrays import IntArray
from ultraep.tools.demo.report.numbers import Points
from ultraep.tools.demo.report.sources import Sources
from ultraep.tools.report.numbers import FloatArray, Numbers, plain
from ultraep.trace.read import Trace
from ultraep.trace.replay import Case, cases, replayed

POLICIES = ("none", "eplb", "lplb", "echo", "quota", "ultraep")
AROUND = 5  # steps on either side of a change of domain, if a domain has twice as many
MOST_RECORDS = 3000  # that are planned again: fewer layers if there are more


def replay_numbers(sources: Sources) -> Numbers:
    """Lines by step, and a row of a table for every policy."""
    trace, window = fewer_layers(sources.trace), half_domain(sources)
    span = min(AROUND, window)
    before, after = around_shifts(sources, span)
    points = Points(sources)
    lines, rows = {}, []
    for case in all_cases(trace, window):
        name, found = case.config.policy, replayed(trace, case)
        lines[name] = points.means(trace.step, found.after)
        rows.append(
            {
                "policy": name,
                "window": case.history,
                "mean": round(float(found.after.mean()), 6),
                "before_shift": _mean(found.after, trace.step, before),
                "after_shift": _mean(found.after, trace.step, after),
                "worst": round(float(found.after.max()), 6),
                "copies": round(fmean(found.copies.tolist()), 6),
                "beyond": found.line.beyond,
            }
        )
    return points.described() | {
        "window": window,
        "span": span,
        "shifts": [domain.begin for domain in sources.domains[1:]],
        "layers": trace.layers.tolist(),
        "records": len(trace),
        "imbalance": lines,
        "table": rows,
    }


def all_cases(trace: Trace, window: int) -> list[Case]:
    """Every policy, with the ranks and slots of the trace."""
    topology = trace.topology
    return cases(
        trace,
        policies=POLICIES,
        slots=[topology.slots],
        ranks=[topology.ranks],
        history=[window],
    )


def fewer_layers(trace: Trace) -> Trace:
    """All layers, or some of them, evenly spread: policies with a memory need all steps."""
    layers, records = trace.layers, len(trace)
    keep = max(1, min(len(layers), math.floor(MOST_RECORDS * len(layers) / records)))
    if keep == len(layers):
        return trace
    chosen = layers[np.linspace(0, len(layers) - 1, keep).round().astype(int)]
    return trace.take(np.flatnonzero(np.isin(trace.layer, chosen)))


def half_domain(sources: Sources) -> int:
    """Half of the steps of the shortest domain."""
    return max(1, min(domain.end + 1 - domain.begin for domain in sources.domains) // 2)


def around_shifts(sources: Sources, span: int) -> tuple[list[int], list[int]]:
    """The last steps before, and the first steps after every change of domain."""
    shifts = [domain.begin for domain in sources.domains[1:]]
    before = [step for shift in shifts for step in range(shift - span, shift)]
    return before, [step for shift in shifts for step in range(shift, shift + span)]


def _mean(values: FloatArray, step: IntArray, wanted: list[int]) -> float | None:
    picked = values[np.isin(step, wanted)]
    return plain([picked.mean()])[0] if len(picked) else None
