"""Catalogue: the open traces and reports by name, and the thread that reads them.

A path is a trace (a folder or an .npz file), a folder with several traces, the output of a demo or
an inspection, or a report, which also opens the traces next to it. If a trace cannot be opened, the
page says why and shows the others.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ultraep.errors import ConfigError, FileError, UltraEPError
from ultraep.files.reading import names_of_arrays
from ultraep.trace.files import folders_of_traces, read_header
from ultraep.trace.read import read_trace
from ultraep.trace.schema import HEADER_FILE
from ultraep_tools.report.page import REPORT_FILE, RESULT_FILE
from ultraep_tools.view.traces import FolderTrace, OpenTrace, WholeTrace

MOST_ITEMS = 64
PERIOD = 1.0  # seconds between two checks of a folder that is followed
GONE = "the folder is gone: the page shows what was read before"


@dataclass
class Item:
    """A trace or a report. If a trace cannot be opened, `error` says why."""

    kind: Literal["trace", "report"]
    path: Path
    name: str
    trace: OpenTrace | None = None
    error: str = ""
    gone: bool = False
    failed: bool = False  # an exception ended the reading early


class Catalogue:
    """The open traces and reports. warn: called once with each note about damage."""

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        live: bool = False,
        warn: Callable[[str], object] = str,
    ) -> None:
        self.paths, self.live, self.items = list(paths), live, list[Item]()
        self._warn, self._warned = warn, set[str]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ultraep view", daemon=True)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="ultraep view")
        self._find_items()

    def start(self) -> None:
        """Start the reading thread; idempotent."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._reader.shutdown()

    def read_all(self) -> None:
        """Read all traces, and return when they are read.

        An exception ends the reading of its trace only; the page shows a note.
        """
        for item in self.items:
            trace = item.trace
            if trace is None or item.failed:
                continue
            error = self._reader.submit(trace.read, self._stop.is_set).exception()
            if error is not None:
                item.failed = trace.finished = True
                trace.notes.append(f"reading ended early, the rest is missing: {message_of(error)}")
            for note in trace.notes:
                if note not in self._warned:
                    self._warned.add(note)
                    self._warn(note)

    def trace(self, name: str) -> OpenTrace:
        item = self._item("trace", name)
        if item.trace is None:
            raise FileError(item.error)
        return item.trace

    def report(self, name: str) -> Path:
        return self._item("report", name).path

    def _item(self, kind: str, name: str) -> Item:
        for item in self.items:
            if (item.kind, item.name) == (kind, name):
                return item
        names = ", ".join(item.name for item in self.items if item.kind == kind) or "none"
        raise ConfigError(f"{kind} {name[:80]!r} is not open; open are: {names}")

    # -- reading --------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            self.read_all()
            if not self.live:
                return
            self._stop.wait(PERIOD)
            self._find_items()
            for item in self.items:
                if item.kind == "trace" and not isinstance(item.trace, WholeTrace):
                    self._check_folder(item)

    def _find_items(self) -> None:
        """Open the traces and reports that are new."""
        known = {item.path for item in self.items}
        try:
            items = items_in(self.paths, live=self.live)
        except OSError:
            return  # a folder disappeared during the search
        for item in items:
            if item.path not in known:
                if any(item.name == other.name for other in self.items):
                    item.name = str(item.path)
                self._open(item)
                self.items.append(item)

    def _open(self, item: Item) -> None:
        if item.kind == "trace":
            opening = self._reader.submit(open_trace, item.path, live=self.live)
            error = opening.exception()
            item.trace = opening.result() if error is None else None
            item.error, item.failed = "" if error is None else message_of(error), False

    def _check_folder(self, item: Item) -> None:
        """Notice that a folder is gone, or now holds another trace."""
        try:
            header = read_header(item.path)
        except FileError as error:
            item.gone = not (item.path / HEADER_FILE).exists()
            if item.trace is None and not item.gone:
                item.error = str(error)
            return
        item.gone = False
        if item.trace is None or item.trace.header != header:
            self._open(item)


def open_trace(path: Path, *, live: bool) -> OpenTrace:
    return FolderTrace(path, live=live) if path.is_dir() else WholeTrace(path, read_trace(path))


def message_of(error: BaseException) -> str:
    """Return an error as one line; for a bug, with the place that raised it."""
    if isinstance(error, (UltraEPError, OSError)):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(frame.filename).name}:{frame.lineno}"
    return f"an error of ultraep, please report it: {type(error).__name__}: {error} ({where})"


# -- searching -----------------------------------------------------------------------------------


def items_in(paths: Iterable[Path], *, live: bool = False) -> list[Item]:
    """Return the traces and reports in these paths, not opened.

    Raise `FileError` for a path that is missing or has neither, unless `live` is set.
    """
    items: dict[Path, Item] = {}
    for path in paths:
        inside = list(_items_in_folder(path) if path.is_dir() else _items_of_file(path, live))
        if not inside and not live:
            raise FileError(
                f"{path}: nothing to view, neither a trace ({HEADER_FILE}) nor a {REPORT_FILE}"
            )
        for item in inside:
            items.setdefault(item.path.resolve(), item)
    return list(items.values())[:MOST_ITEMS]


def _items_of_file(path: Path, live: bool) -> Iterator[Item]:
    if not path.exists():
        if not live:
            raise FileError(f"{path}: no such file or folder")
    elif path.suffix.lower() in (".html", ".htm"):
        yield Item("report", path, path.name)
        yield from (item for item in _items_in_folder(path.parent) if item.kind == "trace")
    elif path.name in (RESULT_FILE, HEADER_FILE):
        yield from _items_in_folder(path.parent)
    elif "header" in names_of_arrays(path):
        yield Item("trace", path, path.name)
    else:
        raise FileError(f"{path}: not a trace (a folder, or an .npz file) and not a report (.html)")


def _items_in_folder(folder: Path) -> Iterator[Item]:
    for trace in folders_of_traces(folder):
        name = folder.resolve().name if trace == folder else str(trace.relative_to(folder))
        yield Item("trace", trace, name)
    if (folder / REPORT_FILE).is_file():
        yield Item("report", folder / REPORT_FILE, REPORT_FILE)
