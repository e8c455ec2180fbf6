"""The report of a demo: one HTML file with interactive plots of its result and a trace.

The plots show the training under `ultraep`, or under the last policy if `ultraep` did not run. The
report also replays its loads under other policies. Policies that plan from past loads use half the
steps of the shortest domain as history.

Shapes: N records.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ultraep.errors import FileError
from ultraep.files.writing import write_text
from ultraep.tools.demo.result import REPORT_FILE, DemoResult, trace_folder
from ultraep.tools.report.numbers import Numbers, grouped, microbatches, plain
from ultraep.tools.report.page import Page, plotly_js
from ultraep.tools.report.words import counted, table
from ultraep.tools.view.table import overview, records_to_replan
from ultraep.tools.view.traces import WholeTrace
from ultraep.trace.read import Trace, read_trace
from ultraep.trace.replay import cases, replayed

SHOWN = "ultraep"  # the policy that the plots show, if it ran
POLICIES = ("none", "eplb", "lplb", "echo", "quota", "ultraep")  # of the replay
BEYOND = "<p>* exceeds the spare slots or moves experts, so it is compared here but cannot run.</p>"
AROUND = 5  # most steps before and after a change of domain


def write_report(out: str | Path, result: DemoResult) -> Path:
    """Write OUT/report.html from the result and the traces in OUT."""
    library = plotly_js()
    names = [row.policy for row in result.policies]
    folder = trace_folder(out, SHOWN if SHOWN in names else names[-1])
    trace = read_trace(folder)
    training = np.flatnonzero(trace.step < result.steps)
    if not len(training):
        raise FileError(f"{folder}: the trace has no record of the training")
    path = Path(out) / REPORT_FILE
    write_text(path, page(result, trace.take(training)).html(library))
    return path


def page(result: DemoResult, trace: Trace) -> Page:
    """Return the contents of the page. trace: the training that the plots show."""
    numbers = all_numbers(result, trace)
    beyond = any(row["beyond"] for row in numbers["replay"]["table"])
    return Page(
        report="demo",
        kind="ultraep demo",
        title=result.headline,
        facts=_facts(result, trace),
        notes=_notes(result, trace, numbers),
        tables={
            "result": table(*result.table(), "result"),
            "replay": _replay_table(numbers["replay"]) + (BEYOND if beyond else ""),
        },
        numbers=numbers,
    )


# -- text and tables -----------------------------------------------------------------------------


def _facts(result: DemoResult, trace: Trace) -> list[tuple[str, str]]:
    sizes = result.sizes
    model = f"{result.parameters / 1e6:.1f} million parameters, {sizes.layers} MoE layers, "
    subjects = ", ".join(span["name"] for span in domains(result))
    return [
        ("Model", f"{model}{sizes.experts} experts per layer, {sizes.top_k} per token"),
        ("Ranks", f"{sizes.ranks}, {counted(sizes.slots, 'spare slot')} each"),
        ("Training", f"{result.steps} steps of {sizes.tokens * sizes.ranks:,} tokens: {subjects}"),
        ("Requests", f"{result.requests}, {result.request_tokens:,} tokens in total"),
        ("Plots", f"show the training under {trace.header.policy}"),
        ("Machine", f"{result.machine}, {result.device}, Python {result.python}"),
        ("Version", f"ultraep {result.version}, seed {result.seed}"),
        ("Recorded", f"{trace.header.created}, in {result.wall_seconds:.0f} s"),
    ]


def _notes(result: DemoResult, trace: Trace, numbers: dict[str, Numbers]) -> list[str]:
    """Return the notes of the run, and what the report leaves out."""
    notes = list(result.notes)
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


def all_numbers(result: DemoResult, trace: Trace) -> dict[str, Numbers]:
    """Return the numbers of every plot."""
    rows, shown = result.policies, overview(WholeTrace(Path(), trace).table, most=result.steps)
    axis = {"step": list(range(result.steps)), "steps_per_point": 1, "domains": domains(result)}
    lines = axis | {"step": shown["step"]} | shown["lines"]
    tokens = result.sizes.tokens * result.sizes.ranks
    speeds = {row.policy: plain(tokens / np.maximum(row.seconds, 1e-9)) for row in rows}
    per_policy = ("first_token_median", "first_token_p90", "layer_tokens_per_second")
    return {
        "imbalance": lines,
        "layers": shown["layers"],
        "microbatches": microbatches(trace, trace.plan, result.domains, noun="Step"),
        "copies": lines,
        "replay": axis | replay(result, trace),
        "loss": axis | {"losses": {row.policy: plain(row.losses) for row in rows}},
        "speed": axis | {"tokens_per_second": speeds},
        "requests": {
            "policy": [row.policy for row in rows],
            "forced_tokens_per_second": plain([result.forced_tokens_per_second])[0],
        }
        | {name: plain([getattr(row, name) for row in rows]) for name in per_policy},
    }


def domains(result: DemoResult) -> list[Numbers]:
    """Return the kinds of text in the order of the training: name, first and last step."""
    spans: list[Numbers] = []
    for step, name in enumerate(result.domains):
        if not spans or spans[-1]["name"] != name:
            spans.append({"name": name, "begin": step})
        spans[-1]["end"] = step
    return spans


def replay(result: DemoResult, trace: Trace) -> Numbers:
    """Plan the recorded loads under all policies: a line by step, and a table row for each.

    Besides the mean of all steps, a row has the means of a few steps right before and right after
    every change of domain. The router learns, so loads drift inside a domain as well.
    """
    trace, spans = trace.take(records_to_replan(trace.layer)), domains(result)
    history = max(1, min(span["end"] + 1 - span["begin"] for span in spans) // 2)
    around = min(AROUND, history)
    after = [span["begin"] + step for span in spans[1:] for step in range(around)]
    before = [step - around for step in after]
    near_shifts = [np.isin(trace.step, steps) for steps in (before, after)]
    every_step = [trace.step == step for step in range(result.steps)]
    topology, lines, rows = trace.topology, {}, []
    for case in cases(
        trace,
        policies=POLICIES,
        slots=[topology.slots],
        ranks=[topology.ranks],
        history=[history],
    ):
        outcome, policy = replayed(trace, case), case.config.policy
        lines[policy] = grouped(outcome.after, every_step)
        before_shift, after_shift = grouped(outcome.after, near_shifts)
        means = outcome.means()
        rows.append(
            {
                "policy": policy,
                "window": case.history,
                "mean": means["after"],
                "before_shift": before_shift,
                "after_shift": after_shift,
                "worst": means["worst"],
                "copies": means["copies"],
                "beyond": bool(means["beyond"]),
            }
        )
    layers = trace.layers.tolist()
    return {"span": around, "layers": layers, "imbalance": lines, "table": rows}
