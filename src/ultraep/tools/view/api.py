"""What the page asks for. All numbers come from the catalogue, as JSON; errors are one sentence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import IO

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ultraep import __version__
from ultraep.errors import ConfigError, UltraEPError
from ultraep.files.reading import check_size, opened, reading
from ultraep.policies import policy_names
from ultraep.tools.report.numbers import Numbers
from ultraep.tools.report.page import own_file, plotly_js
from ultraep.tools.view.catalogue import GONE, Catalogue, Shown
from ultraep.tools.view.guard import CHUNK
from ultraep.tools.view.record import numbers_of, stages_of
from ultraep.tools.view.replays import Question, Replays
from ultraep.tools.view.table import VALUES, heat, overview
from ultraep.tools.view.traces import SERVED, TIMED, OpenTrace
from ultraep.trace.schema import KEY, Key

MOST_POINTS, MOST_COLUMNS = 2000, 400
LARGEST = 2**62
SCRIPTS = ("routes.js", "overview.js", "record.js", "compare.js", "view.js")
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
MOST_REPORT = 64 << 20  # bytes
SANDBOX = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'"
)
HEADER_FACTS = (
    *("ranks", "experts", "slots", "domain", "policy", "tolerance", "objective"),
    *("created", "note"),
)
TRACE_FACTS = ("dropped", "left_out", "notes", "version", "done", "total", "finished", "complete")


class Api:
    """The answers to all questions about a catalogue."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue, self.replays = catalogue, Replays(catalogue)
        self.files = static_files()

    def app(self) -> Starlette:
        """Return the application, without a guard."""
        answers = ("state", "overview", "heat", "worst", "record", "stages")
        routes = [Route(f"/api/{name}", answered(getattr(self, name))) for name in answers]
        routes += [
            Route("/", self.static),
            Route("/static/{name}", self.static),
            Route("/report/{number}", answered(self.report)),
            Route("/api/replays", self.ask, methods=["POST"]),
            Route("/api/replays/{number}", answered(self.replay)),
            Route("/api/replays/{number}/stop", answered(self.stop), methods=["POST"]),
        ]
        return Starlette(routes=routes)

    async def static(self, request: Request) -> Response:
        """The page, or one of its files; there are no others."""
        name = request.path_params.get("name", "index.html")
        if name not in self.files:
            return Response("There is no such file.\n", 404, media_type="text/plain")
        content, kind, tag = self.files[name]
        headers = {"etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    def report(self, request: Request) -> Response:
        """A report that was written before; it may do nothing but draw itself."""
        path = self.catalogue.report(number_in_path(request))
        with reading(path):
            check_size(path, MOST_REPORT)
            file = opened(path)
        headers = {"content-security-policy": SANDBOX, "cache-control": "no-store"}
        return StreamingResponse(chunks(file), media_type="text/html", headers=headers)

    def state(self, _: Request) -> Numbers:
        """What is open, and how far it was read."""
        items = [
            {"number": number} | described(shown)
            for number, shown in enumerate(list(self.catalogue.shown))
        ]
        return {
            "version": __version__,
            "live": self.catalogue.live,
            "waiting_for": [str(path) for path in self.catalogue.paths],
            "policies": sorted(policy_names()),
            "items": items,
        }

    def overview(self, request: Request) -> Numbers:
        """Lines, layers, sums."""
        trace = self._trace(request)
        most = whole(request, "points", 600, low=2, high=MOST_POINTS)
        means = zip(trace.header.stages, trace.table.stages.tolist(), strict=True)
        return overview(trace.table, *stretch(request), most=most) | {
            "stages": {stage: round(seconds, 9) for stage, seconds in means if seconds > 0},
            "complete": trace.complete,
        }

    def heat(self, request: Request) -> Numbers:
        """The map of layers and time."""
        value = request.query_params.get("value", "before")
        if value not in VALUES:
            raise ConfigError(f"value must be one of {', '.join(VALUES)}, got {value[:40]!r}")
        most = whole(request, "columns", 240, low=2, high=MOST_COLUMNS)
        return heat(self._trace(request).table, value, *stretch(request), most=most)

    def worst(self, request: Request) -> Numbers:
        """The most uneven record of a stretch."""
        table, (begin, end) = self._trace(request).table, stretch(request)
        layer = whole(request, "layer") if "layer" in request.query_params else None
        return {"key": table.worst(table.within(begin, end, layer))}

    def record(self, request: Request) -> Numbers:
        """One microbatch of one layer."""
        trace, key = self._trace(request), key_of(request)
        step_M, microbatch_M, _ = trace.table.moments
        earlier = (step_M < key[0]) | ((step_M == key[0]) & (microbatch_M < key[2]))
        around = {
            "layers": trace.table.layers[0].tolist(),
            "moment": int(earlier.sum()),
            "moments": len(step_M),
        }
        return numbers_of(trace.record(key, SERVED)) | {"around": around}

    def stages(self, request: Request) -> Numbers:
        """Its times on all ranks, forward and backward."""
        return stages_of(self._trace(request).record(key_of(request), TIMED))

    def _trace(self, request: Request) -> OpenTrace:
        return self.catalogue.trace(whole(request, "trace"))

    async def ask(self, request: Request) -> Response:
        """Begin to plan again."""
        try:
            body = await request.body()
        except ClientDisconnect:
            late = "The request did not arrive in time.\n"
            return PlainTextResponse(late, 408, {"connection": "close"})
        ask = answered(lambda _: self.replays.ask(question(body)).told())
        return await run_in_threadpool(ask, request)

    def replay(self, request: Request) -> Numbers:
        """How far that is."""
        return self.replays.job(number_in_path(request)).told()

    def stop(self, request: Request) -> Numbers:
        """End it early."""
        job = self.replays.job(number_in_path(request))
        job.stop.set()
        return job.told()


def answered(ask: Callable[[Request], Numbers | Response]) -> Callable[[Request], Response]:
    """Answer in JSON, an error in one sentence. Starlette calls it in a thread of its own."""

    def answer(request: Request) -> Response:
        try:
            found, status = ask(request), 200
        except UltraEPError as error:
            found, status = {"error": " ".join(str(error).split())}, 400
        if isinstance(found, Response):
            return found
        text = json.dumps(found, separators=(",", ":"), allow_nan=False)
        headers = {"cache-control": "no-store"}
        return Response(text, status, media_type="application/json", headers=headers)

    return answer


def described(shown: Shown) -> Numbers:
    """A trace or a report, as the page lists it."""
    facts: Numbers = {
        "kind": shown.item.kind,
        "name": shown.item.name,
        "path": str(shown.item.path),
        "error": shown.error,
        "gone": GONE if shown.gone else "",
    }
    trace = shown.trace
    if trace is None:
        return facts
    facts |= {name: getattr(trace.header, name) for name in HEADER_FACTS}
    facts |= {name: getattr(trace, name) for name in TRACE_FACTS}
    return facts | {"records": len(trace.table)}


# -- what is asked -------------------------------------------------------------------------------


def whole(request: Request, name: str, usual: int = 0, *, low: int = 0, high: int = LARGEST) -> int:
    """A whole number of the query."""
    return parsed(name, request.query_params.get(name, str(usual)), low, high)


def number_in_path(request: Request) -> int:
    """The number of a report or a replay."""
    return parsed("number", request.path_params["number"], 0, LARGEST)


def parsed(name: str, text: str, low: int, high: int) -> int:
    """A whole number; `ConfigError` unless it lies in these limits."""
    if not text.isdecimal() or len(text) > 19 or not low <= int(text) <= high:
        raise ConfigError(f"{name} must be a whole number in {low}..{high}, got {text[:40]!r}")
    return int(text)


def stretch(request: Request) -> tuple[int, int]:
    """From which moment to which."""
    return whole(request, "from"), whole(request, "to", LARGEST)


def key_of(request: Request) -> Key:
    """Step, layer and microbatch."""
    step, layer, microbatch = (whole(request, name) for name in KEY)
    return step, layer, microbatch


def question(body: bytes) -> Question:
    """What to plan again, checked."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise ConfigError("the question is no JSON") from None
    kinds = {"trace": (int,), "policy": (str,), "slots": (int, type(None))}
    kinds |= {"ranks": kinds["slots"], "history": (int,), "tolerance": (int, float, type(None))}
    if not isinstance(found, dict) or not {"trace", "policy"} <= found.keys() <= kinds.keys():
        raise ConfigError(f"a question has trace, policy and some of {', '.join(kinds)}")
    for name, value in found.items():
        large = isinstance(value, (int, float)) and not -LARGEST <= value <= LARGEST
        if type(value) not in kinds[name] or large:
            raise ConfigError(f"{name} is {str(value)[:40]!r}")
    return Question(**found)


# -- files ---------------------------------------------------------------------------------------


def chunks(file: IO[bytes]) -> Iterator[bytes]:
    """The content of a file, read as the client reads it."""
    with file:
        while content := file.read(CHUNK):
            yield content


def static_files() -> dict[str, tuple[bytes, str, str]]:
    """Return all files of the page, by name: content, type, tag."""
    texts = {"plotly.js": plotly_js()}
    for name in ("page.css", "parts.js", "figures.js"):
        texts[name] = own_file("ultraep.tools.report", name)
    for name in ("index.html", "view.css", *SCRIPTS):
        texts[name] = own_file("ultraep.tools.view", f"page/{name}")
    files = {}
    for name, text in texts.items():
        content, ending = text.encode("utf-8"), name.rpartition(".")[2]
        files[name] = content, TYPES[ending], f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    return files
