"""Findings: the trace replayed at all EP sizes, under all policies and slots; and the result.

Shapes: N records.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ultraep.files.writing import write_text
from ultraep.tools.inspect.options import InspectOptions
from ultraep.tools.report.words import counted
from ultraep.trace.read import Trace
from ultraep.trace.replay import Case, Replayed, cases, replayed

RESULT_FILE = "result.json"
REPORT_FILE = "report.html"
PRESET_FILE = "model.toml"
TRACE = "trace"
SHOWN = "ultraep"  # the policy to show in detail, if it is among the options
BEYOND = "moves homes or needs more slots than there are: compared here, cannot run"
LEGEND = (
    "before, after: imbalance without and with replicas, mean (worst); bound: the best imbalance "
    "with these slots; replicas: per layer; remote: rows served on another rank"
)
Tell = Callable[[int, int, str], None]
Mask = NDArray[np.bool_]
Table = tuple[list[str], list[list[str]]]  # head and rows


@dataclass(frozen=True)
class TextSpan:
    """The windows of a text, `begin` to `end` inclusive, which are steps of the trace."""

    name: str
    begin: int
    end: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One policy, number of ranks and slots: means and worst values over all records.

    beyond: plans that need more slots than there are, or leave their domain.
    """

    policy: str
    ranks: int
    slots: int
    history: int | None
    before: float
    before_worst: float
    after: float
    after_worst: float
    bound: float
    copies: float
    remote: float
    beyond: int

    @classmethod
    def of(cls, outcome: Replayed) -> Row:
        means, case = outcome.means(), outcome.case
        return cls(
            policy=case.config.policy,
            ranks=case.topology.ranks,
            slots=case.topology.slots,
            history=case.history,
            before_worst=float(outcome.before.max()),
            after_worst=means.pop("worst"),
            **means,
        )

    def cells(self) -> list[str]:
        """The row of a table."""
        return [
            self.policy + "*" * bool(self.beyond),
            str(self.ranks),
            "-" if self.policy == "none" else str(self.slots),
            f"{self.before:.3f} ({self.before_worst:.2f})",
            f"{self.after:.3f} ({self.after_worst:.2f})",
            f"{self.bound:.3f}",
            f"{self.copies:.1f}",
            f"{self.remote:.1%}",
        ]


@dataclass(frozen=True, kw_only=True)
class InspectionResult:
    """Facts about the model and the run, and all rows; written to result.json."""

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
    rows: list[Row]

    def save(self, folder: Path) -> Path:
        """Write result.json into the folder."""
        path = folder / RESULT_FILE
        write_text(path, json.dumps(asdict(self), indent=1) + "\n")
        return path

    def table(self) -> Table:
        """Imbalance of every row, mean and worst."""
        head = ["policy", "EP", "slots", "before", "after", "bound", "replicas", "remote"]
        return head, [row.cells() for row in self.rows]


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
    def rows(self) -> list[Row]:
        """A row for every case."""
        return [Row.of(outcome) for outcome in self.outcomes]

    @property
    def sizes(self) -> list[int]:
        """Numbers of ranks, in the order of the options."""
        return list(dict.fromkeys(outcome.case.topology.ranks for outcome in self.outcomes))

    def of_size(self, ranks: int) -> list[Replayed]:
        """The cases with this number of ranks."""
        return [outcome for outcome in self.outcomes if outcome.case.topology.ranks == ranks]

    def shown_of(self, ranks: int) -> Replayed:
        """The case to show in detail at this number of ranks: `SHOWN`, or the last policy."""
        own = self.of_size(ranks)
        return next((outcome for outcome in own if outcome.case.config.policy == SHOWN), own[-1])

    @property
    def shown(self) -> Replayed:
        """The case to show in detail."""
        return self.shown_of(self.sizes[0])

    @property
    def headline(self) -> str:
        """The answer in one line."""
        shown = self.shown
        change = f"{shown.before.mean():.2f} -> {shown.after.mean():.2f}"
        return f"Imbalance {change} at EP{self.sizes[0]} under {label(shown.case)}"

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
    trace: Trace, texts: list[TextSpan], sizes: Sequence[int], options: InspectOptions, tell: Tell
) -> Findings:
    """Replay all records at every number of ranks, under every policy and number of slots.

    tell: called with cases done, all cases, and a description of the next case.
    """
    combinations = []
    for size, policy in product(sizes, options.policies):
        slots = options.slots[:1] if policy == "none" else options.slots  # none has no replicas
        combinations += cases(
            trace, policies=[policy], slots=slots, ranks=[size], history=[options.history]
        )
    outcomes = []
    for number, case in enumerate(combinations):
        tell(number, len(combinations), f"EP{case.topology.ranks} {label(case)}")
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
