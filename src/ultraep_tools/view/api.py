"""Answers to the requests of the page: files, numbers as JSON, errors as one sentence.

The page can also be one HTML file with all answers inside, which needs no network and cannot load
anything. A long trace is sampled: some microbatches, evenly spaced, and the most imbalanced one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ultraep import __version__
from ultraep.errors import ConfigError, FileError, UltraEPError
from ultraep.files.writing import write_text
from ultraep.trace.schema import KEY
from ultraep_tools.demo.result import DemoResult, trace_folder
from ultraep_tools.report.numbers import MOST_NUMBERS, Numbers, plain, sample
from ultraep_tools.report.page import embedded, own_file, plotly_js
from ultraep_tools.view.catalogue import Catalogue, Item
from ultraep_tools.view.table import numbers_of, overview, stages_of
from ultraep_tools.view.traces import OpenTrace

VIEWER = "ultraep_tools.view"
LARGEST = 2**62
SHARED = ("page.css", "parts.js", "figures.js")  # with reports
OWN = ("view.css", "overview.js", "record.js", "compare.js", "view.js")
TYPES = {"css": "text/css", "js": "text/javascript"}
ANSWERS = ("state", "overview", "worst", "record")
HEADER_FACTS = ("ranks", "experts", "slots", "policy", "created", "note")
TRACE_FACTS = ("dropped", "left_out", "notes")
Query = Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    content: bytes
    content_type: str
    status: int = 200

    @classmethod
    def text(cls, text: str, status: int) -> Answer:
        return cls(f"{text}.\n".encode(), "text/plain; charset=utf-8", status)

    @classmethod
    def json(cls, numbers: Numbers, status: int = 200) -> Answer:
        text = json.dumps(numbers, separators=(",", ":"), allow_nan=False)
        return cls(text.encode(), "application/json", status)


class Api:
    """Answers requests about the traces of a catalogue."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue, self.files = catalogue, static_files()

    def answer(self, path: str, query: Query) -> Answer:
        name = path.removeprefix("/api/")
        try:
            if path in self.files:
                ending = path.rpartition(".")[2]
                content_type = f"{TYPES.get(ending, 'text/html')}; charset=utf-8"
                return Answer(self.files[path].encode(), content_type)
            if name != path and name in ANSWERS:
                return Answer.json(getattr(self, name)(query))
        except UltraEPError as error:
            return Answer.json({"error": " ".join(str(error).split())}, 400)
        return Answer.text("Page not found", 404)

    def state(self, _: Query) -> Numbers:
        """Return the open traces, with what running jobs have written by now."""
        self.catalogue.refresh()
        return {"version": __version__, "items": [facts(item) for item in self.catalogue.items]}

    def overview(self, query: Query) -> Numbers:
        """Return lines over time, means by layer, totals, stages, and the training if known."""
        trace = self._trace(query)
        table, stages = trace.table, trace.header.stages
        means = zip(stages, table.stages.tolist(), strict=True)
        return overview(table, *moments(query)) | {
            "stages": {stage: round(seconds, 9) for stage, seconds in means if seconds > 0},
            "rows_per_second": rows_per_second(trace),
            "training": training(trace.path.resolve()),
        }

    def worst(self, query: Query) -> Numbers:
        """Return the key of the most imbalanced record of a range."""
        table, (begin, end) = self._trace(query).table, moments(query)
        layer = integer(query, "layer") if "layer" in query else None
        return {"key": table.worst(table.within(begin, end, layer))}

    def record(self, query: Query) -> Numbers:
        """Return one microbatch of one layer, with the stages of all ranks."""
        trace = self._trace(query)
        step, layer, microbatch = (integer(query, name) for name in KEY)
        step_M, microbatch_M, _ = trace.table.moments
        earlier = (step_M < step) | ((step_M == step) & (microbatch_M < microbatch))
        around = {
            "layers": trace.table.layers[0].tolist(),
            "moment": int(earlier.sum()),
            "moments": len(step_M),
        }
        record = trace.record((step, layer, microbatch))
        return numbers_of(record) | {"around": around, "stages": stages_of(record)}

    def _trace(self, query: Query) -> OpenTrace:
        return self.catalogue.trace(query.get("trace", ""))


def facts(item: Item) -> Numbers:
    own: Numbers = {"name": item.name, "error": item.error}
    if item.trace is None:
        return own
    own |= {name: getattr(item.trace.header, name) for name in HEADER_FACTS}
    own |= {name: getattr(item.trace, name) for name in TRACE_FACTS}
    return own | {"records": len(item.trace.table)}


def rows_per_second(trace: OpenTrace) -> float | None:
    """Return the routed rows of all ranks per second of the recorded stages; None without times."""
    table = trace.table
    return float(table.rows.mean() / table.layer_seconds) if table.layer_seconds > 0 else None


def training(path: Path) -> Numbers:
    """Return loss and tokens/s of every step; empty unless the trace belongs to a demo."""
    out = path.parent.parent
    try:
        result = DemoResult.load(out)
    except FileError:
        return {}
    tokens = result.sizes.tokens * result.sizes.ranks
    for row in result.policies:
        if path == trace_folder(out, row.policy):
            speed = plain(tokens / np.maximum(row.seconds, 1e-9))
            return {"loss": plain(row.losses), "tokens_per_second": speed}
    return {}


def integer(query: Query, name: str, default: int = 0) -> int:
    """Return an integer of the query, or raise `ConfigError`."""
    text = query.get(name, str(default))
    if not text.isdecimal() or len(text) > 19 or int(text) > LARGEST:
        raise ConfigError(f"{name} must be an integer in 0..{LARGEST}, got {text[:40]!r}")
    return int(text)


def moments(query: Query) -> tuple[int, int]:
    """Return the first moment of a range, and its end."""
    return integer(query, "from"), integer(query, "to", LARGEST)


def static_files() -> dict[str, str]:
    """Return the files of the page, by address."""
    texts = {"/": own_file(VIEWER, "page/index.html"), "/static/plotly.js": plotly_js()}
    texts |= {f"/static/{name}": own_file("ultraep_tools.report", name) for name in SHARED}
    return texts | {f"/static/{name}": own_file(VIEWER, f"page/{name}") for name in OWN}


# -- export --------------------------------------------------------------------------------------

EXPORT_POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:\">"
)
FILE_TAGS = re.compile(r'<link rel="stylesheet" href="(.*?)">|<script src="(.*?)"></script>')


def write_page(catalogue: Catalogue, path: Path) -> int:
    """Write the traces of a catalogue as one file; return the number of their records."""
    api = Api(catalogue)
    traces = {item.name: item.trace for item in catalogue.items if item.trace is not None}
    for trace in traces.values():
        if not len(trace.table):
            raise ConfigError(f"{trace.path}: nothing to export, the trace has no records")
    answers: Numbers = {"state": api.state({}), "overview": {}, "records": {}, "notes": []}
    for name, trace in traces.items():
        records, note = _records(api, name, trace, MOST_NUMBERS // len(traces))
        answers["overview"][name] = api.overview({"trace": name})
        answers["records"][name] = records
        answers["notes"] += note
    write_text(path, _html(api, answers))
    return sum(len(trace.table) for trace in traces.values())


def _records(api: Api, name: str, trace: OpenTrace, most: int) -> tuple[Numbers, list[str]]:
    """Return the records of a selection of microbatches, by key, and a note if some are missing."""
    table, header = trace.table, trace.header
    step_M, _, moment_N = table.moments
    slots = int(header.topology.first_slot_of_rank[-1])
    size = len(table.layers[0]) * (
        header.experts + 2 * slots + 3 * header.ranks * len(header.stages)
    )
    kept = sample(len(step_M), size, int(moment_N[table.before.argmax()]), most)
    records = {}
    for key in map(table.key, np.flatnonzero(np.isin(moment_N, kept)).tolist()):
        query: dict[str, Any] = {"trace": name} | dict(zip(KEY, map(str, key), strict=True))
        records[",".join(map(str, key))] = api.record(query)
    if len(kept) == len(step_M):
        return records, []
    return records, [f"this file holds {len(kept):,} of {len(step_M):,} microbatches of {name}"]


def _html(api: Api, answers: Numbers) -> str:

    def inline(match: re.Match[str]) -> str:
        style, script = match.groups()
        text = api.files[style or script]
        if style:
            return f"<style>\n{text}</style>"
        return "<script>" + text.replace("</script", "<\\/script") + "</script>"

    page = api.files["/"].replace("<title>", f"{EXPORT_POLICY}\n<title>", 1)
    first, rest = page.split("<script", 1)
    return FILE_TAGS.sub(inline, f"{first}{embedded('baked', answers)}\n<script{rest}")
