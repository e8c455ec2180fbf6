"""Answers to the requests of the page: files, numbers as JSON, errors as one sentence.

A replay plans the loads of a trace again under other settings, in the background. In a long trace,
it plans only some evenly spaced layers, each with all of its moments, because policies may use past
loads.

The page can also be one HTML file with all answers inside, which needs no network and cannot load
anything. Of a long trace it holds some microbatches, evenly spaced, and the most imbalanced one.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ultraep import __version__
from ultraep.arrays import IntArray
from ultraep.errors import ConfigError, FileError, UltraEPError
from ultraep.files.reading import check_size, opened, reading
from ultraep.files.writing import write_text
from ultraep.plan import Plan
from ultraep.policies import get_policy, policy_names
from ultraep.trace.read import Trace
from ultraep.trace.schema import KEY, Header
from ultraep_tools.demo.result import DemoResult, trace_folder
from ultraep_tools.replay import Case, cases, plans, replayed_plans
from ultraep_tools.report.numbers import MOST_NUMBERS, Numbers, plain, sample
from ultraep_tools.report.page import embedded, own_file, plotly_js
from ultraep_tools.view.catalogue import GONE, Catalogue, Item, message_of
from ultraep_tools.view.table import (
    VALUES,
    Table,
    heat,
    numbers_of,
    overview,
    records_to_replan,
    stages_of,
)
from ultraep_tools.view.traces import OpenTrace

VIEWER = "ultraep_tools.view"
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
    """Answers requests about the traces and reports of a catalogue."""

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
        return Answer.text("Page not found", 404)

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

    def replay(self, query: Query) -> Numbers:
        """Start a replay, or return the progress and the answer of the replay of this number."""
        if "number" in query:
            return self.replays.job(integer(query, "number")).to_json()
        trace = self._trace(query)
        return self.replays.start(trace, case_of(query, trace.header)).to_json()

    def stop(self, query: Query) -> Numbers:
        job = self.replays.job(integer(query, "number"))
        job.stop.set()
        return job.to_json()


def item_facts(item: Item) -> Numbers:
    facts: Numbers = {name: getattr(item, name) for name in ("kind", "name", "error")}
    facts |= {"path": str(item.path), "gone": GONE if item.gone else ""}
    if item.trace is None:
        return facts
    facts |= {name: getattr(item.trace.header, name) for name in HEADER_FACTS}
    facts |= {name: getattr(item.trace, name) for name in TRACE_FACTS}
    return facts | {"records": len(item.trace.table)}


# -- parameters of requests ----------------------------------------------------------------------


def integer(query: Query, name: str, default: int = 0, *, low: int = 0, high: int = LARGEST) -> int:
    """Return an integer of the query; raise `ConfigError` unless it is within the limits."""
    text = query.get(name, str(default))
    if not text.isdecimal() or len(text) > 19 or not low <= int(text) <= high:
        raise ConfigError(f"{name} must be an integer in {low}..{high}, got {text[:40]!r}")
    return int(text)


def moments(query: Query) -> tuple[int, int]:
    """Return the first moment of a range, and its end."""
    return integer(query, "from"), integer(query, "to", LARGEST)


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
    texts = {"/": own_file(VIEWER, "page/index.html"), "/static/plotly.js": plotly_js()}
    texts |= {f"/static/{name}": own_file("ultraep_tools.report", name) for name in SHARED}
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


# -- replays -------------------------------------------------------------------------------------

MOST_JOBS = 16  # finished jobs included
MOST_WAITING = 4


@dataclass(eq=False)
class ReplayJob:
    """A trace to plan again, the settings, and the progress."""

    number: int
    trace: OpenTrace
    version: int  # of the trace
    case: Case
    done: int = 0
    total: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    future: Future[Numbers] = field(default_factory=Future)

    @property
    def state(self) -> str:
        if not self.future.done():
            return "running" if self.future.running() else "waiting"
        if self.future.exception() is not None:
            return "failed"
        return "stopped" if self.stop.is_set() else "done"

    def to_json(self) -> Numbers:
        facts = {"number": self.number, "state": self.state, "done": self.done, "total": self.total}
        error = self.future.exception() if self.future.done() else None
        answer = self.future.result() if self.future.done() and error is None else {}
        return facts | {"error": message_of(error) if error else "", "answer": answer}

    def run(self) -> Numbers:
        table = self.trace.table
        records = records_to_replan(table.layer)
        self.total = len(records)
        replayed = replayed_plans(self._plans(table, records), self.case)
        records = records[: len(replayed.after)]
        values = {name: getattr(replayed, name) for name in ("before", "after", "copies")}
        for name in ("bytes", "lost", "saved", "cost"):
            values[name] = np.full(len(records), np.nan)
        return {
            "layers": len(np.unique(table.layer[records])),
            "all_layers": len(table.layers[0]),
            "recorded": overview(table.take(records)),
            "replayed": overview(table.take(records, **values)),
            "settings": self.case.settings(),
            "beyond": int(replayed.beyond.sum()),
        }

    def _plans(self, table: Table, records: IntArray) -> Iterator[Plan]:
        keys = map(table.key, records.tolist())
        for plan in plans(map(self.trace.planned, keys), self.case):
            yield plan
            self.done += 1
            if self.stop.is_set():
                return


class Replays:
    """All replays; one runs at a time."""

    def __init__(self) -> None:
        self._jobs: dict[int, ReplayJob] = {}
        self._lock, self._count = threading.Lock(), 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="ultraep replay")

    def start(self, trace: OpenTrace, case: Case) -> ReplayJob:
        """Return the job with these settings; start it unless it exists."""
        settings = trace, trace.version, case
        with self._lock:
            states = {job: job.state for job in self._jobs.values()}
            for job, state in states.items():
                usable = state in ("waiting", "running", "done")
                if usable and (job.trace, job.version, job.case) == settings:
                    return job
            waiting = list(states.values()).count("waiting")
            if waiting >= MOST_WAITING:
                raise ConfigError(f"{waiting} replays are waiting: wait, or stop one")
            ended = [job.number for job in states if job.future.done()]
            for number in ended[: max(0, len(states) + 1 - MOST_JOBS)]:
                del self._jobs[number]
            job = self._jobs[self._count] = ReplayJob(self._count, *settings)
            self._count += 1
            job.future = self._worker.submit(job.run)
        return job

    def job(self, number: int) -> ReplayJob:
        if number not in self._jobs:
            raise ConfigError(f"replay {number} does not exist, or is no longer stored")
        return self._jobs[number]

    def close(self) -> None:
        for job in list(self._jobs.values()):
            job.stop.set()
        self._worker.shutdown()  # a job that waits plans one record


# -- export --------------------------------------------------------------------------------------

EXPORT_POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:\">"
)
FILE_TAGS = re.compile(r'<link rel="stylesheet" href="(.*?)">|<script src="(.*?)"></script>')


def write_page(catalogue: Catalogue, path: Path) -> int:
    """Write the only trace of a catalogue; return the number of its records."""
    items = [item for item in catalogue.items if item.trace is not None]
    if len(items) != 1:
        names = ", ".join(item.name for item in items) or "none"
        raise ConfigError(
            f"--export writes one trace, but {len(items)} are open ({names}): pass one"
        )
    [item], api = items, Api(catalogue)
    catalogue.read_all()
    trace = catalogue.trace(item.name)
    if not len(trace.table):
        raise ConfigError(f"{item.path}: nothing to export, the trace has no records")
    write_text(path, _html(api, _answers(api, item.name, trace)))
    return len(trace.table)


def _answers(api: Api, name: str, trace: OpenTrace) -> Numbers:
    """Return the answers that the exported page needs, by name."""
    query, state = {"trace": name}, api.state({})
    state["items"] = [entry for entry in state["items"] if entry["name"] == name]
    table, header = trace.table, trace.header
    step_M, _, moment_N = table.moments
    slots = int(header.topology.first_slot_of_rank[-1])
    per_record = header.experts + 2 * slots + 3 * header.ranks * len(header.stages)
    worst = int(moment_N[table.before.argmax()])
    moments = sample(len(step_M), per_record * len(table.layers[0]), worst, MOST_NUMBERS)
    records = map(table.key, np.flatnonzero(np.isin(moment_N, moments)).tolist())
    notes = []
    if len(moments) < len(step_M):
        notes.append(f"this file holds {len(moments):,} of {len(step_M):,} microbatches")
    return {
        "state": state,
        "overview": api.overview(query),
        "training": api.training(query),
        "heat": {value: api.heat(query | {"value": value}) for value in VALUES},
        "records": {",".join(map(str, key)): _record(api, name, key) for key in records},
        "notes": notes,
    }


def _record(api: Api, name: str, key: tuple[int, int, int]) -> Numbers:
    values = dict(zip(KEY, map(str, key), strict=True))
    return api.record({"trace": name} | values)


def _html(api: Api, answers: Numbers) -> str:

    def inline(match: re.Match[str]) -> str:
        style, script = match.groups()
        text = api.files[style or script].content.decode()
        if style:
            return f"<style>\n{text}</style>"
        return "<script>" + text.replace("</script", "<\\/script") + "</script>"

    page = api.files["/"].content.decode().replace("<title>", f"{EXPORT_POLICY}\n<title>", 1)
    baked = embedded("baked", answers).replace('id="numbers-baked"', 'id="baked"', 1)
    first, rest = page.split("<script", 1)
    return FILE_TAGS.sub(inline, f"{first}{baked}\n<script{rest}")
