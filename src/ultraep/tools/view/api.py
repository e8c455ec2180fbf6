"""Answers to the requests of the page: files, and numbers as JSON. An error is one sentence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ultraep import __version__
from ultraep.errors import ConfigError, FileError, UltraEPError
from ultraep.files.reading import check_size, opened, reading
from ultraep.policies import get_policy, policy_names
from ultraep.tools.demo.result import DemoResult, trace_folder
from ultraep.tools.report.numbers import Numbers, plain
from ultraep.tools.report.page import own_file, plotly_js
from ultraep.tools.view.catalogue import GONE, Catalogue, Item
from ultraep.tools.view.record import numbers_of, stages_of
from ultraep.tools.view.replays import Replays
from ultraep.tools.view.table import VALUES, heat, overview
from ultraep.tools.view.traces import OpenTrace
from ultraep.trace.read import Trace
from ultraep.trace.replay import Case, cases
from ultraep.trace.schema import KEY, Header, Key

VIEWER = "ultraep.tools.view"
MOST_POINTS, MOST_COLUMNS = 2000, 400
LARGEST = 2**62
SHARED = ("page.css", "parts.js", "figures.js")  # with reports
OWN = ("view.css", "routes.js", "overview.js", "record.js", "compare.js", "view.js")
TYPES = {"css": "text/css", "js": "text/javascript"}
MOST_REPORT = 64 << 20  # bytes
REPORT_HEADERS = {
    "content-security-policy": "sandbox allow-scripts allow-downloads; default-src 'none'; "
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "frame-ancestors 'self'; base-uri 'none'; form-action 'none'",
    "x-frame-options": "SAMEORIGIN",
    "content-type": "text/html; charset=utf-8",
}
ANSWERS = ("state", "overview", "training", "heat", "worst", "record", "replay", "stop")
Query = Mapping[str, str]
HEADER_FACTS = (
    *("ranks", "experts", "slots", "domain", "policy", "tolerance", "objective"),
    *("created", "note"),
)
TRACE_FACTS = ("dropped", "left_out", "notes", "version", "done", "total", "finished")


@dataclass(frozen=True)
class Answer:
    """An answer to a request: content, status and its own headers."""

    content: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def text(cls, text: str, status: int) -> Answer:
        headers = {"content-type": "text/plain; charset=utf-8"}
        return cls(f"{text}.\n".encode(), status, headers)

    @classmethod
    def json(cls, numbers: Numbers, status: int = 200) -> Answer:
        text = json.dumps(numbers, separators=(",", ":"), allow_nan=False)
        return cls(text.encode(), status, {"content-type": "application/json"})


class Api:
    """The answers about the traces and reports of a catalogue."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue, self.replays = catalogue, Replays()
        self.files = static_files()

    def answer(self, path: str, query: Query) -> Answer:
        name = path.removeprefix("/api/") if path.startswith("/api/") else ""
        try:
            if path in self.files:
                return self.files[path]
            if path == "/report":
                return self._report(query)
            if name in ANSWERS:
                return Answer.json(getattr(self, name)(query))
        except UltraEPError as error:
            return Answer.json({"error": " ".join(str(error).split())}, 400)
        return Answer.text("This page does not exist", 404)

    def _report(self, query: Query) -> Answer:
        """Return a report, which may only draw itself."""
        path = self.catalogue.report(query.get("name", ""))
        with reading(path):
            check_size(path, MOST_REPORT)
            with opened(path) as file:
                return Answer(file.read(MOST_REPORT), headers=REPORT_HEADERS)

    def state(self, _: Query) -> Numbers:
        """Return the open traces and reports, and how much of each is read."""
        return {
            "version": __version__,
            "live": self.catalogue.live,
            "waiting_for": [str(path) for path in self.catalogue.paths],
            "policies": sorted(policy_names()),
            "items": [item_facts(item) for item in list(self.catalogue.items)],
        }

    def overview(self, query: Query) -> Numbers:
        """Return lines over time, means by layer, totals."""
        trace = self._trace(query)
        most = integer(query, "points", 600, low=2, high=MOST_POINTS)
        means = zip(trace.header.stages, trace.table.stages.tolist(), strict=True)
        return overview(trace.table, *moments(query), most=most) | {
            "stages": {stage: round(seconds, 9) for stage, seconds in means if seconds > 0},
        }

    def training(self, query: Query) -> Numbers:
        """Return loss and tokens/s of every step; empty unless the trace belongs to a demo."""
        path = self._trace(query).path.resolve()
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

    def heat(self, query: Query) -> Numbers:
        """Return the map of layers over time."""
        value = query.get("value", "before")
        if value not in VALUES:
            raise ConfigError(f"value must be one of {', '.join(VALUES)}, got {value[:40]!r}")
        most = integer(query, "columns", 240, low=2, high=MOST_COLUMNS)
        return heat(self._trace(query).table, value, *moments(query), most=most)

    def worst(self, query: Query) -> Numbers:
        """Return the key of the most imbalanced record of a range."""
        table, (begin, end) = self._trace(query).table, moments(query)
        layer = integer(query, "layer") if "layer" in query else None
        return {"key": table.worst(table.within(begin, end, layer))}

    def record(self, query: Query) -> Numbers:
        """Return one microbatch of one layer, with the stages of all ranks."""
        trace, key = self._trace(query), key_of(query)
        step_M, microbatch_M, _ = trace.table.moments
        earlier = (step_M < key[0]) | ((step_M == key[0]) & (microbatch_M < key[2]))
        around = {
            "layers": trace.table.layers[0].tolist(),
            "moment": int(earlier.sum()),
            "moments": len(step_M),
        }
        record = trace.record(key)
        return numbers_of(record) | {"around": around, "stages": stages_of(record)}

    def _trace(self, query: Query) -> OpenTrace:
        return self.catalogue.trace(query.get("trace", ""))

    def replay(self, query: Query) -> Numbers:
        """Start a replay, or return the progress and the answer of the replay of this number."""
        if "number" in query:
            return self.replays.job(integer(query, "number")).to_json()
        trace = self._trace(query)
        return self.replays.ask(trace, case_of(query, trace.header)).to_json()

    def stop(self, query: Query) -> Numbers:
        """Stop a replay early."""
        job = self.replays.job(integer(query, "number"))
        job.stop.set()
        return job.to_json()


def item_facts(item: Item) -> Numbers:
    """Return a trace or a report as the page lists it."""
    facts: Numbers = {name: getattr(item, name) for name in ("kind", "name", "error")}
    facts |= {"path": str(item.path), "gone": GONE if item.gone else ""}
    if item.trace is None:
        return facts
    facts |= {name: getattr(item.trace.header, name) for name in HEADER_FACTS}
    facts |= {name: getattr(item.trace, name) for name in TRACE_FACTS}
    return facts | {"records": len(item.trace.table)}


# -- parameters of requests ----------------------------------------------------------------------


def integer(query: Query, name: str, usual: int = 0, *, low: int = 0, high: int = LARGEST) -> int:
    """Return an integer of the query; raise `ConfigError` unless it is within the limits."""
    text = query.get(name, str(usual))
    if not text.isdecimal() or len(text) > 19 or not low <= int(text) <= high:
        raise ConfigError(f"{name} must be an integer in {low}..{high}, got {text[:40]!r}")
    return int(text)


def moments(query: Query) -> tuple[int, int]:
    """Return the first moment of a range, and its end."""
    return integer(query, "from"), integer(query, "to", LARGEST)


def key_of(query: Query) -> Key:
    """Return step, layer and microbatch."""
    step, layer, microbatch = (integer(query, name) for name in KEY)
    return step, layer, microbatch


def case_of(query: Query, header: Header) -> Case:
    """Return the settings of a replay; missing ones are as recorded."""
    text = query.get("tolerance")
    try:
        tolerance = None if text is None else float(text)
    except ValueError:
        got = query["tolerance"][:40]
        raise ConfigError(f"tolerance must be a number, got {got!r}") from None
    [case] = cases(
        Trace(header, {}),
        policies=[get_policy(query.get("policy", "")).name],
        slots=[integer(query, "slots", header.slots)],
        ranks=[integer(query, "ranks", header.ranks)],
        history=[integer(query, "history", 1)],
        tolerance=tolerance,
    )
    return case


def static_files() -> dict[str, Answer]:
    """Return the files of the page by path."""
    texts = {"/": own_file(VIEWER, "page/index.html"), "/static/plotly.js": plotly_js()}
    texts |= {f"/static/{name}": own_file("ultraep.tools.report", name) for name in SHARED}
    texts |= {f"/static/{name}": own_file(VIEWER, f"page/{name}") for name in OWN}
    files = {}
    for path, text in texts.items():
        content, ending = text.encode("utf-8"), path.rpartition(".")[2]
        headers = {
            "content-type": f"{TYPES.get(ending, 'text/html')}; charset=utf-8",
            "etag": f'"{hashlib.sha256(content).hexdigest()[:16]}"',
            "cache-control": "no-cache",
        }
        files[path] = Answer(content, headers=headers)
    return files
