"""Start time, response time and memory of `ultraep view` with a large trace.

    python benchmarks/bench_view.py                  # EP64 x 256, 100 layers x 1000 microbatches
    python benchmarks/bench_view.py --trace FOLDER   # a recorded one
    python benchmarks/bench_view.py --toy            # tiny, for CI

The script starts a server from an installed package, whose modules Python has compiled, and sends
the requests of the page. `open` is the time from the start of the process to the first overview (of
the records read so far), and until all ranks are read. `clicks` are requests for places all over
the run, never the same twice, while the trace is being read and afterwards.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlencode

import numpy as np
from big_trace import Size, write_trace
from harness import Bench, Line, Metric, main

LISTENS = Metric("time_to_listen", "s", "listens s", ".2f")
FIRST = Metric("time_to_overview", "s", "overview s", ".2f")
BUSY = Metric("cpu_time_to_overview", "s", "CPU s", ".2f")
SHOWN = Metric("records_in_overview", "records", "of records", ".0f")
WHOLE = Metric("time_to_read_all", "s", "all read s", ".1f")
WHOLE_BUSY = Metric("cpu_time_to_read_all", "s", "CPU s", ".1f")
MEMORY = Metric("peak_memory", "MB", "peak MB", ".0f")
DISK = Metric("bytes_on_disk", "MB", "on disk MB", ".0f")
MEDIAN = Metric("answer_time_p50", "ms", "p50 ms", ".1f")
TAIL = Metric("answer_time_p95", "ms", "p95 ms", ".1f")
WORST = Metric("answer_time_max", "ms", "max ms", ".1f")
WORK = Metric("answer_cpu_time_mean", "ms", "CPU ms", ".1f")
COUNT = Metric("answers", "answers", "answers", ".0f")
READ_LIMIT_S = 1800.0  # for reading a trace
MB = 1e6
Took = tuple[float, float | None]  # wall and CPU seconds


@dataclass(frozen=True)
class Server:
    """A running server and its start time."""

    process: subprocess.Popen[str]
    connection: http.client.HTTPConnection
    began: float

    def get(self, path: str, **parameters: Any) -> Any:
        """Send a request of the page and return the answer."""
        self.connection.request("GET", f"/api/{path}?{urlencode(parameters)}")
        answer = self.connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{path} {parameters}: {answer.status} {content[:200]!r}")
        return json.loads(content)

    @property
    def trace(self) -> dict[str, Any]:
        """The state of the only trace."""
        state: dict[str, Any] = self.get("state")["items"][0]
        return state

    def cpu(self) -> float | None:
        """CPU seconds of the server, if the system reports them."""
        status = Path(f"/proc/{self.process.pid}/stat")
        if not status.exists():
            return None
        user, system = status.read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def peak(self) -> float | None:
        """Peak memory of the server in MB, if the system reports it."""
        status = Path(f"/proc/{self.process.pid}/status")
        peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text() if status.exists() else "")
        return int(peak[1]) * 1024 / MB if peak else None


@contextmanager
def installed(folder: Path) -> Iterator[dict[str, str]]:
    """Environment variables for a package with compiled modules, as after an installation."""
    source = str(Path(__file__).resolve().parent.parent / "src")
    with tempfile.TemporaryDirectory() as compiled:
        environment = os.environ | {"PYTHONPATH": source, "PYTHONPYCACHEPREFIX": compiled}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with served(folder, environment) as server:
            wait_for_overview(server)
        yield environment


@contextmanager
def served(folder: Path, environment: dict[str, str]) -> Iterator[Server]:
    """Start `ultraep view` for a folder."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "ultraep", "view", str(folder), "--port", "0"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = re.match(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())
        if address is None:
            raise SystemExit("ultraep view did not start")
        yield Server(process, http.client.HTTPConnection("127.0.0.1", int(address[1])), began)
    finally:
        process.terminate()
        process.wait()


def wait_for_overview(server: Server) -> dict[Metric, float | None]:
    """Wait for the first overview, and return the times until then."""
    listens = time.perf_counter() - server.began
    name = server.trace["name"]
    while not (records := server.get("overview", trace=name)["totals"]["records"]):
        time.sleep(0.01)
    first = time.perf_counter() - server.began
    return {LISTENS: listens, FIRST: first, BUSY: server.cpu(), SHOWN: records}


def clicks(
    server: Server, rng: np.random.Generator, rounds: int, *, whole: bool
) -> dict[str, list[Took]]:
    """Response times by request. whole: all ranks are read."""
    took: dict[str, list[Took]] = {}
    trace = server.trace["name"]

    def ask(name: str, path: str, **parameters: Any) -> Any:
        begin, busy = time.perf_counter(), server.cpu()
        answer = server.get(path, trace=trace, **parameters)
        seconds, after = time.perf_counter() - begin, server.cpu()
        worked = None if busy is None or after is None else after - busy
        took.setdefault(name, []).append((seconds, worked))
        return answer

    moments = server.get("overview", trace=trace)["moments"]
    for _ in range(rounds):
        begin = int(rng.integers(0, max(1, moments - 1)))
        end = int(rng.integers(begin + 1, moments + 1))
        ask("overview, zoomed", "overview", **{"from": begin, "to": end})
        ask("map", "heat", value=str(rng.choice(["before", "after", "bytes", "lost"])))
        key = ask("cell of the map", "worst", **{"from": begin, "to": begin + 1})["key"]
        if key is None or not whole:
            continue
        wanted = dict(zip(("step", "layer", "microbatch"), key, strict=True))
        ask("microbatch", "record", **wanted)
        ask("microbatch, again", "record", **wanted)
    return took


def time_to_read(server: Server) -> float:
    """Seconds until the whole trace is read."""
    while time.perf_counter() - server.began < READ_LIMIT_S:
        if server.trace["finished"]:
            return time.perf_counter() - server.began
        time.sleep(0.05)
    raise SystemExit(f"the trace was not read within {READ_LIMIT_S:.0f} s")


def lines_of(took: dict[str, list[Took]], case: dict[str, Any], *, alone: bool) -> list[Line]:
    """Lines of response times. alone: the server does nothing else, so its CPU time counts."""
    lines = []
    for name, values in took.items():
        milliseconds = 1e3 * np.array([seconds for seconds, _ in values])
        median, tail, worst = np.percentile(milliseconds, (50, 95, 100)).tolist()
        worked = [work for _, work in values if work is not None]
        shown: dict[Metric, float | None] = {COUNT: len(values), MEDIAN: median, TAIL: tail}
        shown |= {WORST: worst, WORK: 1e3 * fmean(worked) if alone and worked else None}
        lines.append(Line(case | {"asked for": name}, shown))
    return lines


@dataclass(frozen=True)
class Scale:
    """What one run measures."""

    size: Size
    rounds: int = 40
    trace: Path | None = None


def view(bench: Bench) -> None:
    """Measure the trace of `--trace`, or a synthetic one."""
    with tempfile.TemporaryDirectory() as folder:
        synthetic = Path(folder, "run")
        if bench.scale.trace is None:
            write_trace(synthetic, bench.scale.size)
        measure(bench, bench.scale.trace or synthetic)


def measure(bench: Bench, folder: Path) -> None:
    rng, rounds = np.random.default_rng(0), bench.scale.rounds
    before, cores = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count()
    disk = sum(path.stat().st_size for path in folder.rglob("*.npz")) / MB
    with installed(folder) as environment, served(folder, environment) as server:
        first = wait_for_overview(server)
        early = clicks(server, rng, rounds, whole=False)
        seconds, busy = time_to_read(server), server.cpu()
        late = clicks(server, rng, rounds, whole=True)
        shape, peak = server.trace, server.peak()
    case = {name: shape[name] for name in ("ranks", "experts", "records")}
    values = first | {WHOLE: seconds, WHOLE_BUSY: busy, MEMORY: peak, DISK: disk}
    bench.table("from the start of the process", [Line(case, values)], section="open")
    lines = lines_of(early, case | {"when": "while it is read"}, alone=False)
    lines += lines_of(late, case | {"when": "later"}, alone=True)
    bench.table("requests of the page", lines, section="clicks")
    bench.report.note(
        "CPU: CPU time of the server, whatever else the machine does. Peak: of the whole\n"
        "process, including Python and its packages.\n"
        f"Load of the machine at the start: {before:.1f} on {cores} cores."
    )


if __name__ == "__main__":
    toy = Scale(Size(ranks=4, experts=16, layers=3, microbatches=8, tokens=64), rounds=3)
    scales = {"toy": toy, "quick": Scale(Size(microbatches=50), rounds=20), "full": Scale(Size())}
    extra = {"trace": (Path, "folder of a trace (default: a synthetic one)")}
    main("view", __doc__, {"": view}, scales, extra=extra)
