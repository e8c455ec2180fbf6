"""Findings: the trace replayed at all EP sizes, under all policies and slots; result and report.

Shapes: N records, H layers, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep.files.writing import write_text
from ultraep.trace.read import Trace
from ultraep_tools.inspect.options import InspectOptions
from ultraep_tools.inspect.texts import TextSpan
from ultraep_tools.replay import Case, Replayed, cases, plans, replayed
from ultraep_tools.report.numbers import Numbers, grouped, microbatches
from ultraep_tools.report.page import REPORT_FILE, RESULT_FILE, Page
from ultraep_tools.report.words import counted, table

PRESET_FILE = "model.toml"
TRACE = "trace"
ALL = "all texts"
SHOWN = "ultraep"  # the policy to show in detail, if it is among the options
BEYOND = "moves homes or needs more slots than there are: compared here, cannot run"
LEGEND = (
    "before, after: imbalance without and with replicas, mean (worst); bound: the best imbalance "
    "with these slots; replicas: per layer; remote: rows served on another rank"
)
Progress = Callable[[int, int, str], None]  # steps done, all steps, description of the next step
Mask = NDArray[np.bool_]
Table = tuple[list[str], list[list[str]]]  # head and rows


@dataclass(frozen=True, kw_only=True)
class InspectionResult:
    """Facts about the model and the run, and a row per case; written to result.json."""

    version: str
    model: str
    family: str
    random: bool
    parameters: int
    active: int
    blocks: int
    layers: list[int]  # recorded layers
    experts: int
    top_k: int
    dtype: str
    device: str
    texts: list[TextSpan]
    window: int
    sequence: int
    wall_seconds: float
    notes: list[str]
    rows: list[dict[str, Any]]

    def save(self, folder: Path) -> Path:
        path = folder / RESULT_FILE
        write_text(path, json.dumps(asdict(self), indent=1) + "\n")
        return path


@dataclass(frozen=True, eq=False)
class Findings:
    """The records of a trace under every case, and their texts."""

    trace: Trace
    texts: list[TextSpan]
    outcomes: list[Replayed]

    @cached_property
    def names(self) -> list[str]:
        """The text of every step."""
        return [span.name for span in self.texts for _ in range(span.begin, span.end + 1)]

    @cached_property
    def text(self) -> NDArray[np.str_]:
        """[N] the text of every record."""
        return np.array(self.names)[self.trace.step]

    @property
    def sizes(self) -> list[int]:
        """Numbers of ranks, in the order of the options."""
        return list(dict.fromkeys(outcome.case.topology.ranks for outcome in self.outcomes))

    def of_size(self, ranks: int) -> list[Replayed]:
        return [outcome for outcome in self.outcomes if outcome.case.topology.ranks == ranks]

    def shown_of(self, ranks: int) -> Replayed:
        """The case to show in detail at this number of ranks: `SHOWN`, or the last policy."""
        own = self.of_size(ranks)
        return next((outcome for outcome in own if outcome.case.config.policy == SHOWN), own[-1])

    @property
    def shown(self) -> Replayed:
        return self.shown_of(self.sizes[0])

    @property
    def headline(self) -> str:
        shown = self.shown
        change = f"{shown.before.mean():.2f} -> {shown.after.mean():.2f}"
        return f"Imbalance {change} at EP{self.sizes[0]} under {label(shown.case)}"

    @property
    def beyond(self) -> bool:
        """Whether a case has plans that move homes or need more slots than there are."""
        return any(outcome.beyond.any() for outcome in self.outcomes)

    def table(self) -> Table:
        head = ["policy", "EP", "slots", "before", "after", "bound", "replicas", "remote"]
        return head, [_cells(outcome) for outcome in self.outcomes]

    def by_past(self, history: int) -> tuple[Mask, Mask]:
        """[N] whether the history of a record is all from its own text; whether a text begins."""
        step, begins = self.trace.step, {span.name: span.begin for span in self.texts}
        behind = step - np.array([begins[name] for name in self.text.tolist()])
        return behind >= history, (behind == 0) & (step > 0)

    def past_table(self) -> Table:
        """Policies that place by past windows, at the first number of ranks."""
        rows = []
        for outcome in self.of_size(self.sizes[0]):
            if outcome.case.history:
                masks = self.by_past(outcome.case.history)
                cells = [f"{outcome.after[m].mean():.3f}" if m.any() else "-" for m in masks]
                rows.append([label(outcome.case), counted(outcome.case.history, "window"), *cells])
        return ["policy", "history", "within a text", "after a change of text"], rows


def find(
    trace: Trace,
    texts: list[TextSpan],
    sizes: Sequence[int],
    options: InspectOptions,
    report: Progress,
) -> Findings:
    """Replay all records at every number of ranks, under every policy and number of slots."""
    combinations = []
    for size, policy in product(sizes, options.policies):
        slots = options.slot_counts[: 1 if policy == "none" else None]  # none has no replicas
        combinations += cases(
            trace, policies=[policy], slots=slots, ranks=[size], history=[options.history]
        )
    outcomes = []
    for number, case in enumerate(combinations):
        report(number, len(combinations), f"EP{case.topology.ranks} {label(case)}")
        outcomes.append(replayed(trace, case))
    return Findings(trace, texts, outcomes)


def label(case: Case) -> str:
    """Policy and slots of a case.

    >>> from ultraep import BalanceConfig, Topology
    >>> label(Case(BalanceConfig(policy="eplb"), Topology(ranks=8, experts=8), 1))
    'eplb with 1 slot'
    """
    policy = case.config.policy
    return policy if policy == "none" else f"{policy} with {counted(case.topology.slots, 'slot')}"


def row_of(outcome: Replayed) -> dict[str, Any]:
    """The settings of a case, with means and worst values over all records."""
    settings, means = outcome.case.settings(), outcome.means()
    row = {name: settings[name] for name in ("policy", "ranks", "slots", "history")}
    row |= {"before_worst": float(outcome.before.max()), "after_worst": means.pop("worst")}
    return row | means


def _cells(outcome: Replayed) -> list[str]:
    policy, topology, means = outcome.case.config.policy, outcome.case.topology, outcome.means()
    return [
        policy + "*" * bool(means["beyond"]),
        str(topology.ranks),
        "-" if policy == "none" else str(topology.slots),
        f"{means['before']:.3f} ({outcome.before.max():.2f})",
        f"{means['after']:.3f} ({means['worst']:.2f})",
        f"{means['bound']:.3f}",
        f"{means['copies']:.1f}",
        f"{means['remote']:.1%}",
    ]


# -- the page ------------------------------------------------------------------------------------


def write_report(out: Path, result: InspectionResult, findings: Findings) -> Path:
    path = out / REPORT_FILE
    write_text(path, page(result, findings).html())
    return path


def page(result: InspectionResult, findings: Findings) -> Page:
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
    trace = findings.trace
    every, layers = np.ones(len(trace), dtype=bool), trace.layers.tolist()
    texts = {span.name: findings.text == span.name for span in findings.texts}
    plan_of = list(plans(trace, findings.shown.case)).__getitem__
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
