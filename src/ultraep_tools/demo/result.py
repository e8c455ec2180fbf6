"""Events of a running demo, its result with headline and table, and its report.

The report is an HTML file. Its plots show the training under `ultraep`, or under the last policy if
`ultraep` did not run. It also replays the loads under other policies; policies that plan from past
loads use half the steps of the shortest domain as history.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ultraep.errors import FileError
from ultraep.files.reading import read_text
from ultraep.files.writing import write_text
from ultraep.trace.read import Trace, read_trace
from ultraep_tools.demo.sizes import Sizes
from ultraep_tools.replay import cases, records_to_replan, replayed
from ultraep_tools.report.numbers import Numbers, grouped, microbatches, plain
from ultraep_tools.report.page import REPORT_FILE, RESULT_FILE, Page
from ultraep_tools.report.words import counted, size, table
from ultraep_tools.view.table import overview
from ultraep_tools.view.traces import WholeTrace

TRACE = "trace"  # folder of a trace, inside the folder of its policy
SAME_LOSS = 1e-3  # largest relative difference that counts as rounding
TABLE = {
    "training: loss, last tenth": "{loss:.4f}",
    "  tokens/s, whole step": "{tokens_per_second:,.0f}",
    "  imbalance before (worst)": "{imbalance_before:.3f} ({imbalance_before_worst:.2f})",
    "  imbalance after (worst)": "{imbalance_after:.3f} ({imbalance_after_worst:.2f})",
    "  replicas per layer": "{replicas_per_layer:.2f}",
    "  sent for replicas": "{sent}",
    "MoE layers: tokens/s": "{layer_tokens_per_second:,.0f}",
    "  share of forced balance": "{layer_share:.1%}",
    "prefill: first token, median": "{first_token_median:.3f} s",
    "  first token, p90": "{first_token_p90:.3f} s",
}

SHOWN = "ultraep"  # the policy that the plots show, if it ran
POLICIES = ("none", "eplb", "lplb", "echo", "quota", "ultraep")  # of the replay
BEYOND = "<p>* exceeds the spare slots or moves experts, so it is compared here but cannot run.</p>"


@dataclass(frozen=True)
class Progress:
    """Progress of a phase."""

    done: int
    of: int
    text: str


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """Measurements of one policy; lists have an entry for every training step."""

    policy: str
    losses: list[float]
    loss: float  # mean of the last tenth of the steps
    seconds: list[float]
    tokens_per_second: float  # of the median training step, all ranks
    before: list[float]  # imbalance without replicas, mean of the layers
    after: list[float]  # imbalance with replicas
    imbalance_before: float  # mean of steps and layers
    imbalance_before_worst: float
    imbalance_after: float
    imbalance_after_worst: float
    replicas_per_layer: float
    bytes_sent: int  # weights and gradients, in training, by all ranks
    layer_tokens_per_second: float
    layer_share: float  # of the speed of forced balance
    first_token_median: float  # seconds
    first_token_p90: float


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """All measurements of one run."""

    version: str
    python: str
    machine: str
    seed: int
    sizes: Sizes
    parameters: int  # of the model with all experts
    steps: int  # of the training
    domains: list[str]  # subject of the text in every step
    forced_tokens_per_second: float  # of the layers under forced balance, the upper bound
    requests: int
    request_tokens: int
    loss_difference: float  # largest relative difference of any step to the first policy
    wall_seconds: float
    notes: list[str]
    policies: list[PolicyResult]

    @property
    def headline(self) -> str:
        """Compare the last policy with the first in one line."""
        first, last = self.policies[0], self.policies[-1]
        if first is last:
            change = f"{last.imbalance_before:.2f} -> {last.imbalance_after:.2f}"
            return f"Imbalance {change} with {last.policy}"
        gain = last.layer_tokens_per_second / first.layer_tokens_per_second
        apart = self.loss_difference
        loss = "same loss" if apart <= SAME_LOSS else f"losses up to {apart:.1%} apart"
        return f"MoE layers {gain:.2f}x as fast with {last.policy}, {loss}"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return head and rows with a column per policy; the last column is forced balance."""
        forced = {
            "MoE layers: tokens/s": f"{self.forced_tokens_per_second:,.0f}",
            "  share of forced balance": "100.0%",
        }
        rows = []
        for name, form in TABLE.items():
            cells = [form.format(**vars(row), sent=size(row.bytes_sent)) for row in self.policies]
            rows.append([name, *cells, forced.get(name, "")])
        return ["", *(row.policy for row in self.policies), "forced balance"], rows

    def save(self, folder: str | Path) -> Path:
        path = Path(folder) / RESULT_FILE
        write_text(path, json.dumps(asdict(self), indent=1) + "\n")
        return path

    @classmethod
    def load(cls, folder: str | Path) -> DemoResult:
        """Read a result that `save` wrote; raise `FileError` if it is damaged."""
        path = Path(folder) / RESULT_FILE
        text = read_text(path)
        try:
            content: dict[str, Any] = json.loads(text)
            sizes = Sizes(**content.pop("sizes"))
            policies = [PolicyResult(**row) for row in content.pop("policies")]
            return cls(**content, sizes=sizes, policies=policies)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise FileError(f"{path}: not the result of a demo: {error}") from None


def trace_folder(out: str | Path, policy: str) -> Path:
    return Path(out) / policy / TRACE


# -- report --------------------------------------------------------------------------------------


def write_report(out: str | Path, result: DemoResult) -> Path:
    names = [row.policy for row in result.policies]
    folder = trace_folder(out, SHOWN if SHOWN in names else names[-1])
    trace = read_trace(folder)
    training = np.flatnonzero(trace.step < result.steps)
    if not len(training):
        raise FileError(f"{folder}: the trace has no record of the training")
    trace = trace.take(training)
    numbers = all_numbers(result, trace)
    page = Page(
        report="demo",
        kind="ultraep demo",
        title=result.headline,
        facts=_facts(result, trace),
        notes=result.notes,
        tables={
            "result": table(*result.table(), "result"),
            "replay": _replay_table(numbers["replay"]["table"]),
        },
        numbers=numbers,
    )
    path = Path(out) / REPORT_FILE
    write_text(path, page.html())
    return path


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
        ("Machine", f"{result.machine}, Python {result.python}"),
        ("Version", f"ultraep {result.version}, seed {result.seed}"),
        ("Recorded", f"{trace.header.created}, in {result.wall_seconds:.0f} s"),
    ]


def _replay_table(rows: list[Numbers]) -> str:
    cells = []
    for row in rows:
        past = f", last {counted(row['window'], 'step')}" if row["window"] else ""
        replicas = f"{row['copies']:.2f}" + "*" * row["beyond"]
        cells.append([row["policy"] + past, f"{row['mean']:.3f}", f"{row['worst']:.3f}", replicas])
    beyond = BEYOND if any(row["beyond"] for row in rows) else ""
    return table(["policy", "mean", "worst", "replicas/layer"], cells, "replay-table") + beyond


def all_numbers(result: DemoResult, trace: Trace) -> dict[str, Numbers]:
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
    """Plan the recorded loads under all policies: a line by step, and a table row for each."""
    trace, topology = trace.take(records_to_replan(trace.layer)), trace.topology
    history = max(1, min(span["end"] + 1 - span["begin"] for span in domains(result)) // 2)
    every_step = [trace.step == step for step in range(result.steps)]
    lines, rows = {}, []
    for case in cases(
        trace,
        policies=POLICIES,
        slots=[topology.slots],
        ranks=[topology.ranks],
        history=[history],
    ):
        outcome, policy = replayed(trace, case), case.config.policy
        lines[policy] = grouped(outcome.after, every_step)
        means = outcome.means()
        rows.append(
            {
                "policy": policy,
                "window": case.history,
                "mean": means["after"],
                "worst": means["worst"],
                "copies": means["copies"],
                "beyond": bool(means["beyond"]),
            }
        )
    return {"layers": trace.layers.tolist(), "imbalance": lines, "table": rows}
