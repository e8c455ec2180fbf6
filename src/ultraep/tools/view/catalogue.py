"""Catalogue: all traces and reports that are open, and the thread that reads them.

A folder is one of a trace, or of several (`ULTRAEP_TRACE`), or the output of a demo or an
inspection: their traces and their report. A report may be named by itself; the traces beside it
are shown, too. If a trace cannot be opened, the page says why, and the others are open.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from ultraep.errors import ConfigError, FileError, UltraEPError
from ultraep.files.reading import names_of_arrays
from ultraep.tools.view.traces import FileTrace, FolderTrace, OpenTrace
from ultraep.trace.files import read_header
from ultraep.trace.schema import HEADER_FILE

REPORT_FILE, RESULT_FILE = "report.html", "result.json"
DEPTH = ("", "*/", "*/*/")  # how far below a folder traces are looked for
MOST_ITEMS = 64
PERIOD = 1.0  # seconds between two looks at a folder that is followed
GONE = "the folder is gone: what was read before is shown"


class Item(NamedTuple):
    """Something to view. path: a folder or a file, as it was named; name: as it is shown."""

    kind: Literal["trace", "report"]
    path: Path
    name: str


@dataclass
class Shown:
    """A trace or a report; without a trace, and with an error, if it cannot be opened."""

    item: Item
    trace: OpenTrace | None = None
    error: str = ""
    gone: bool = False
    failed: bool = False  # reading it has ended early


class Catalogue:
    """The open traces and reports, by number. warn: called once with each note about damage."""

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        live: bool = False,
        warn: Callable[[str], object] = str,
    ) -> None:
        self.paths, self.live, self.shown = list(paths), live, list[Shown]()
        self._warn, self._warned = warn, set[str]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ultraep view", daemon=True)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="ultraep view")
        self._look()

    def start(self) -> None:
        """Begin to read in a thread, unless it has begun."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Stop reading."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._reader.shutdown()

    def read_all(self) -> None:
        """Read everything that is there, and return when it is read.

        An exception, whichever, ends the reading of one trace; its page says so.
        """
        for shown in self.shown:
            trace = shown.trace
            if trace is None or shown.failed:
                continue
            error = self._reader.submit(trace.read, self._stop.is_set).exception()
            if error is not None:
                shown.failed = trace.finished = True
                trace.notes.append(f"reading ended early, only a part is shown: {_words(error)}")
            for note in trace.notes:
                if note not in self._warned:
                    self._warned.add(note)
                    self._warn(note)

    @property
    def errors(self) -> list[str]:
        """What could not be opened, one line each."""
        return [shown.error for shown in self.shown if shown.error]

    @property
    def usable(self) -> bool:
        """Whether there is anything to show, or may be later."""
        return self.live or any(not shown.error for shown in self.shown)

    def trace(self, number: int) -> OpenTrace:
        """Return the trace of this number."""
        shown = self._numbered(number, "trace")
        if shown.trace is None:
            raise FileError(shown.error)
        return shown.trace

    def report(self, number: int) -> Path:
        """Return the file of the report of this number."""
        return self._numbered(number, "report").item.path

    def _numbered(self, number: int, kind: str) -> Shown:
        if not 0 <= number < len(self.shown) or self.shown[number].item.kind != kind:
            raise ConfigError(f"{kind} {number}: there is none of this number")
        return self.shown[number]

    # -- reading --------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            self.read_all()
            if not self.live:
                return
            self._stop.wait(PERIOD)
            self._look()
            for shown in self.shown:
                self._look_again(shown)

    def _look(self) -> None:
        """Open what is there and was not there before."""
        known = {shown.item.path for shown in self.shown}
        try:
            items = look(self.paths, live=self.live)
        except OSError:
            return  # a folder that goes away while it is looked through
        self.shown += [self._opened(item) for item in items if item.path not in known]

    def _opened(self, item: Item) -> Shown:
        if item.kind == "report":
            return Shown(item)
        opened = self._reader.submit(self._open, item.path)
        error = opened.exception()
        return Shown(item, opened.result()) if error is None else Shown(item, error=_words(error))

    def _open(self, path: Path) -> OpenTrace:
        return FolderTrace(path, live=self.live) if path.is_dir() else FileTrace(path)

    def _look_again(self, shown: Shown) -> None:
        """Notice that a folder is gone, or holds another trace now."""
        if shown.item.kind == "report" or isinstance(shown.trace, FileTrace):
            return
        try:
            header = read_header(shown.item.path)
        except FileError as error:
            shown.gone = not (shown.item.path / HEADER_FILE).exists()
            if shown.trace is None and not shown.gone:
                shown.error = str(error)
            return
        shown.gone = False
        if shown.trace is None or shown.trace.header != header:
            again = self._opened(shown.item)
            shown.trace, shown.error, shown.failed = again.trace, again.error, False


def _words(error: BaseException) -> str:
    """Say an error in one line; for an error of the program, with the place that raised it."""
    if isinstance(error, (UltraEPError, OSError)):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(frame.filename).name}:{frame.lineno}"
    return f"an error of ultraep, please report it: {type(error).__name__}: {error} ({where})"


# -- what the paths hold -------------------------------------------------------------------------


def look(paths: Iterable[Path], *, live: bool = False) -> list[Item]:
    """Return all that these paths hold; `FileError` for one that is missing or holds nothing.

    live: a folder may still be empty, or missing.
    """
    items: dict[Path, Item] = {}
    for path in paths:
        held = list(_in_folder(path) if path.is_dir() else _of_file(path, live))
        if not held and not live:
            raise FileError(
                f"{path}: nothing to view, neither a trace ({HEADER_FILE}) nor a {REPORT_FILE}"
            )
        for item in held:
            items.setdefault(item.path.resolve(), item)
    return list(items.values())[:MOST_ITEMS]


def _of_file(path: Path, live: bool) -> Iterator[Item]:
    if not path.exists():
        if not live:
            raise FileError(f"{path}: no such file or folder")
    elif path.suffix.lower() in (".html", ".htm"):
        yield Item("report", path, path.name)
        yield from (item for item in _in_folder(path.parent) if item.kind == "trace")
    elif path.name in (RESULT_FILE, HEADER_FILE):
        yield from _in_folder(path.parent)
    elif "header" in names_of_arrays(path):
        yield Item("trace", path, path.name)
    else:
        raise FileError(f"{path}: not a trace (a folder, or an .npz file) and not a report (.html)")


def _in_folder(folder: Path) -> Iterator[Item]:
    for below in DEPTH:
        for header in sorted(folder.glob(f"{below}{HEADER_FILE}")):
            inside = header.parent.relative_to(folder)
            name = folder.resolve().name if inside == Path() else str(inside)
            yield Item("trace", header.parent, name)
    if (folder / REPORT_FILE).is_file():
        yield Item("report", folder / REPORT_FILE, REPORT_FILE)
