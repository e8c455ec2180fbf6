"""What an inspection leaves behind: one `InspectionResult`, beside the trace that it is made of."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ultraep.arrays import IntArray
from ultraep.files.writing import write_text
from ultraep.tools.inspect.texts import Excerpt

RESULT_FILE = "result.json"
REPORT_FILE = "report.html"
PRESET_FILE = "model.toml"
TRACE = "trace"
FILES = (RESULT_FILE, REPORT_FILE, PRESET_FILE)


@dataclass(frozen=True)
class TextSpan:
    """Windows of one text, from `begin` to `end`, both included: steps of the trace."""

    name: str
    begin: int
    end: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """All records under one policy: means, and the worst of them."""

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
    beyond: int  # plans that need more slots than there are, or leave their domain


@dataclass(frozen=True, kw_only=True)
class InspectionResult:
    """Facts about the model and the run, and what the policies would do."""

    version: str
    model: str
    family: str
    random: bool
    parameters: int
    active: int
    blocks: int
    layers: list[int]  # those with experts that were looked at
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
        """Write it into the folder."""
        path = folder / RESULT_FILE
        write_text(path, json.dumps(asdict(self), indent=1) + "\n")
        return path


def spans(excerpts: list[Excerpt]) -> list[TextSpan]:
    """Where in the trace the windows of every text stand."""
    found: list[TextSpan] = []
    for one in excerpts:
        begin = found[-1].end + 1 if found else 0
        found.append(TextSpan(one.name, begin, begin + len(one.windows) - 1, one.tokens))
    return found


def text_of_step(texts: list[TextSpan], steps: IntArray) -> list[str]:
    """The text that each of these steps of the trace read."""
    names = [span.name for span in texts for _ in range(span.begin, span.end + 1)]
    return [names[step] for step in steps.tolist()]
