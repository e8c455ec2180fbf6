"""The report of a demo: one HTML file with interactive plots of its result and a trace.

The plots show the training under `ultraep`, or under the last policy if `ultraep` did not run. The
report also replays its loads under other policies. Policies that plan from past loads use half the
steps of the shortest domain as history.

Shapes: N records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ultraep.arrays import IntArray
from ultraep.errors import FileError
from ultraep.files.writing import write_text
from ultraep.tools.demo.result import REPORT_FILE, DemoResult, trace_folder
from ultraep.tools.report.numbers import FloatArray, Numbers, microbatches, plain
from ultraep.tools.report.page import BEYOND, PICKER, Page, Section, own_file, plotly_js
from ultraep.tools.report.words import counted, table
from ultraep.trace.read import Trace, read_trace
from ultraep.trace.replay import cases, replayed

SHOWN = "ultraep"  # the policy that the plots show, if it ran
POLICIES = ("none", "eplb", "lplb", "echo", "quota", "ultraep")  # of the replay
AROUND = 5  # most steps before and after a change of domain
MOST_RECORDS = 3000  # of a replay; fewer layers if there are more
SECTIONS = (
    Section("imbalance", "Imbalance during training", ("imbalance",)),
    Section("speed", "Speed", ("requests", "speed")),
    Section("loss", "Loss", ("loss",)),
    Section("layers", "Imbalance by layer", ("layers",)),
    Section("microbatches", "One microbatch, rank by rank", ("microbatches",)),
    Section("copies", "Replicas and their cost", ("copies",)),
    Section("replay", "The same loads under other policies", ("replay",)),
)
CAPTIONS = {
    "imbalance": "Mean of all layers in every step, without and with replicas. The band reaches "
    "from the best to the worst layer.",
    "requests": "Time to first token of a request, and speed of the MoE layers alone. The dashed "
    "line is forced balance: the same work with evenly assigned rows.",
    "speed": "Tokens per second of all ranks in every training step.",
    "loss": "Balancing changes only where a row is computed, so the lines coincide. The order of "
    "sums changes the last bits, and training amplifies that.",
    "layers": "Mean of all steps, without and with replicas.",
    "microbatches": "A bar is a rank and a block is an expert. The colour of a block is the home "
    "of its expert; hatched blocks are replicas. The plot starts with the most imbalanced "
    "microbatch.",
    "copies": "Replicas per layer, and bytes of weights and gradients that all ranks sent for "
    "them.",
    "replay": "eplb and lplb plan from past loads, so their imbalance rises when the text changes. "
    "ultraep plans from the loads of the step itself.",
}


@dataclass(frozen=True, eq=False)
class Demo:
    """A finished demo: its result, and the trace that the plots show."""

    result: DemoResult
    policy: str
    trace: Trace

    @property
    def domains(self) -> list[Numbers]:
        """Kinds of text in the order of the training: name, first and last step."""
        spans: list[Numbers] = []
        for step, name in enumerate(self.result.domains):
            if not spans or spans[-1]["name"] != name:
                spans.append({"name": name, "begin": step})
            spans[-1]["end"] = step
        return spans


def write_report(out: str | Path, result: DemoResult) -> Path:
    """Write OUT/report.html from the result and the traces in OUT."""
    library = plotly_js()
    names = [row.policy for row in result.policies]
    policy = SHOWN if SHOWN in names else names[-1]
    folder = trace_folder(out, policy)
    trace = read_trace(folder)
    training = np.flatnonzero(trace.step < result.steps)
    if not len(training):
        raise FileError(f"{folder}: the trace has no record of the training")
    demo = Demo(result, policy, trace.take(training))
    path = Path(out) / REPORT_FILE
    write_text(path, page(demo, all_numbers(demo)).html(library))
    return path


def page(demo: Demo, numbers: dict[str, Numbers]) -> Page:
    """Return the contents of the page."""
    beyond = any(row["beyond"] for row in numbers["replay"]["table"])
    return Page(
        kind="ultraep demo",
        title=demo.result.headline,
        facts=_facts(demo),
        notes=_notes(demo, numbers),
        result=f"<h2>Result</h2>\n{table(*demo.result.table(), 'result')}",
        sections=SECTIONS,
        captions=CAPTIONS,
        numbers=numbers,
        script=own_file("ultraep.tools.report", "demo.js"),
        controls={"microbatches": PICKER.format(noun="step")},
        tables={"replay": _replay_table(numbers["replay"]) + (BEYOND if beyond else "")},
    )


# -- text and tables -----------------------------------------------------------------------------


def _facts(demo: Demo) -> list[tuple[str, str]]:
    result, sizes = demo.result, demo.result.sizes
    model = f"{result.parameters / 1e6:.1f} million parameters, {sizes.layers} MoE layers, "
    subjects = ", ".join(span["name"] for span in demo.domains)
    return [
        ("Model", f"{model}{sizes.experts} experts per layer, {sizes.top_k} per token"),
        ("Ranks", f"{sizes.ranks}, {counted(sizes.slots, 'spare slot')} each"),
        ("Training", f"{result.steps} steps of {sizes.tokens * sizes.ranks:,} tokens: {subjects}"),
        ("Requests", f"{result.requests}, {result.request_tokens:,} tokens in total"),
        ("Plots", f"show the training under {demo.policy}"),
        ("Machine", f"{result.machine}, {result.device}, Python {result.python}"),
        ("Version", f"ultraep {result.version}, seed {result.seed}"),
        ("Recorded", f"{demo.trace.header.created}, in {result.wall_seconds:.0f} s"),
    ]


def _notes(demo: Demo, numbers: dict[str, Numbers]) -> list[str]:
    """Return what limits the numbers."""
    trace, notes = demo.trace, list(demo.result.notes)
    if trace.dropped or trace.left_out:
        notes.append(
            f"the trace is incomplete: {trace.dropped} records were dropped, {trace.left_out} were "
            "not recorded by all ranks"
        )
    shown, recorded = len(numbers["microbatches"]["moments"]), numbers["microbatches"]["recorded"]
    if shown < recorded:
        notes.append(f"{shown} of {recorded} microbatches can be selected")
    layers = len(numbers["replay"]["layers"])
    if layers < len(trace.layers):
        notes.append(f"{layers} of {len(trace.layers)} layers were replayed")
    return notes


def _replay_table(replay: Numbers) -> str:
    span = counted(replay["span"], "step")
    head = ["policy", "mean", f"{span} before a change", f"{span} after", "worst", "replicas/layer"]
    rows = []
    for row in replay["table"]:
        past = f", last {counted(row['window'], 'step')}" if row["window"] else ""
        ratios = [row[key] for key in ("mean", "before_shift", "after_shift", "worst")]
        cells = ["–" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
        rows.append([row["policy"] + past, *cells, f"{row['copies']:.2f}" + "*" * row["beyond"]])
    return table(head, rows, "replay-table")


# -- numbers -------------------------------------------------------------------------------------


def all_numbers(demo: Demo) -> dict[str, Numbers]:
    """Return the numbers of every plot."""
    trace, result, rows = demo.trace, demo.result, demo.result.policies
    steps = list(range(result.steps))
    axis = {"step": steps, "steps_per_point": 1, "domains": demo.domains}
    tokens = result.sizes.tokens * result.sizes.ranks
    return {
        "imbalance": axis
        | {
            "before": by_step(demo, trace.imbalance_before),
            "after": by_step(demo, trace.imbalance_after),
        },
        "layers": by_layer(trace),
        "microbatches": microbatches(trace, trace.plan, result.domains, noun="Step"),
        "copies": axis | copies_by_step(demo),
        "replay": axis | replay(demo),
        "loss": axis | {"losses": {row.policy: plain(row.losses) for row in rows}},
        "speed": axis
        | {
            "tokens_per_second": {
                row.policy: plain(tokens / np.maximum(row.seconds, 1e-9)) for row in rows
            }
        },
        "requests": {
            "policy": [row.policy for row in rows],
            "first_token_median": plain([row.first_token_median for row in rows]),
            "first_token_p90": plain([row.first_token_p90 for row in rows]),
            "layer_tokens_per_second": plain([row.layer_tokens_per_second for row in rows]),
            "forced_tokens_per_second": plain([result.forced_tokens_per_second])[0],
        },
    }


def by_step(demo: Demo, values: FloatArray, step: IntArray | None = None) -> Numbers:
    """Return mean, least and largest value of every step; None where nothing was recorded."""
    step = demo.trace.step if step is None else step
    steps = demo.result.steps
    low, high = np.full(steps, np.inf), np.full(steps, -np.inf)
    np.minimum.at(low, step, values)
    np.maximum.at(high, step, values)
    sums, counts = (np.bincount(step, weights, steps) for weights in (values, None))
    with np.errstate(invalid="ignore"):
        return {"mean": plain(sums / counts), "min": plain(low), "max": plain(high)}


def by_layer(trace: Trace) -> Numbers:
    """Return mean and worst imbalance of every layer."""
    numbers: Numbers = {"layer": trace.layers.tolist()}
    for name, values in (("before", trace.imbalance_before), ("after", trace.imbalance_after)):
        own = [values[trace.layer == layer] for layer in trace.layers]
        numbers[name] = plain([of_layer.mean() for of_layer in own])
        numbers[f"{name}_worst"] = plain([of_layer.max() for of_layer in own])
    return numbers


def copies_by_step(demo: Demo) -> Numbers:
    """Return replicas per layer, and the bytes of all ranks and layers, for every step."""
    trace = demo.trace
    step, place = np.unique(trace.step, return_inverse=True)
    moved = np.bincount(place, trace.bytes_moved.sum(axis=1)).astype(np.float64)
    return {
        "copies": by_step(demo, trace.num_copies.astype(np.float64)),
        "bytes": by_step(demo, moved, step)["mean"],
    }


def replay(demo: Demo) -> Numbers:
    """Plan the recorded loads under all policies: a line by step, and a table row for each.

    Besides the mean of all steps, a row has the means of a few steps right before and right after
    every change of domain. The router learns, so loads drift inside a domain as well.
    """
    trace, domains = fewer_layers(demo.trace), demo.domains
    window = max(1, min(span["end"] + 1 - span["begin"] for span in domains) // 2)
    span = min(AROUND, window)
    shifts = [domain["begin"] for domain in domains[1:]]
    before = [step for shift in shifts for step in range(shift - span, shift)]
    after = [step for shift in shifts for step in range(shift, shift + span)]
    lines, rows = {}, []
    for case in cases(
        trace,
        policies=POLICIES,
        slots=[trace.topology.slots],
        ranks=[trace.topology.ranks],
        history=[window],
    ):
        outcome = replayed(trace, case)
        lines[case.config.policy] = by_step(demo, outcome.after, trace.step)["mean"]
        rows.append(
            {
                "policy": case.config.policy,
                "window": case.history,
                "mean": _mean(outcome.after),
                "before_shift": _mean(outcome.after[np.isin(trace.step, before)]),
                "after_shift": _mean(outcome.after[np.isin(trace.step, after)]),
                "worst": round(float(outcome.after.max()), 6),
                "copies": _mean(outcome.copies),
                "beyond": bool(outcome.beyond.any()),
            }
        )
    return {
        "window": window,
        "span": span,
        "shifts": shifts,
        "layers": trace.layers.tolist(),
        "imbalance": lines,
        "table": rows,
    }


def fewer_layers(trace: Trace) -> Trace:
    """Return the trace with at most MOST_RECORDS records: evenly spread layers, all steps."""
    layers = trace.layers
    count = max(1, MOST_RECORDS * len(layers) // len(trace))
    if count >= len(layers):
        return trace
    chosen = layers[np.linspace(0, len(layers) - 1, count).round().astype(int)]
    return trace.take(np.flatnonzero(np.isin(trace.layer, chosen)))


def _mean(values: Sequence[Any] | FloatArray | IntArray) -> float | None:
    return plain([np.mean(values)])[0] if len(values) else None
