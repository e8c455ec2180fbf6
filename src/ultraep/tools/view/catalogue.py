"""Catalogue: all traces and reports that are open, and the thread that reads them.

What cannot be opened is told, and the rest is open nevertheless.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ultraep.errors import ConfigError, FileError, UltraEPError
from ultraep.tools.report.numbers import Numbers
from ultraep.tools.view.folder import FolderIndex
from ultraep.tools.view.found import Item, look
from ultraep.tools.view.record import (
    numbers_of,
    record_of_pieces,
    record_of_trace,
    routed_of_pieces,
    stages_of,
    times_of_pieces,
    times_of_trace,
)
from ultraep.tools.view.single import SingleIndex
from ultraep.tools.view.store import Store
from ultraep.trace.files import read_header
from ultraep.trace.read import Routed
from ultraep.trace.schema import HEADER_FILE

PASSES = ("forward", "backward")
PERIOD = 1.0  # seconds between two looks at a folder that is followed
GONE = "the folder is gone: what was read before is shown"
Index = FolderIndex | SingleIndex
Tell = Callable[[str], None]


@dataclass
class Shown:
    """A trace or a report; without an index, and with an error, if it cannot be opened."""

    item: Item
    index: Index | None = None
    error: str = ""
    gone: bool = False
    failed: bool = False  # reading it has ended early


class Catalogue:
    """What is open, known by its number. tell: is told of what is damaged."""

    def __init__(
        self, paths: Sequence[Path], *, live: bool = False, tell: Tell | None = None
    ) -> None:
        self.paths, self.live, self.shown = list(paths), live, list[Shown]()
        self._tell, self._told = tell, set[str]()
        self._store = Store()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ultraep view", daemon=True)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="ultraep view")
        self._look()

    def start(self) -> None:
        """Begin to read, in a thread, unless that was begun."""
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
            index = shown.index
            if index is None or shown.failed:
                continue
            error = self._reader.submit(index.read, self._stop.is_set).exception()
            if error is not None:
                shown.failed, index.finished = True, True
                index.notes.append(f"reading ended early, only a part is shown: {_words(error)}")
            self._tell_notes(index.notes)

    def _tell_notes(self, notes: Sequence[str]) -> None:
        """Tell who started this what is damaged, once."""
        for note in notes:
            if self._tell is not None and note not in self._told:
                self._told.add(note)
                self._tell(note)

    @property
    def errors(self) -> list[str]:
        """What could not be opened, one line each."""
        return [shown.error for shown in self.shown if shown.error]

    @property
    def usable(self) -> bool:
        """Whether there is anything to show, or may be later."""
        return self.live or any(not shown.error for shown in self.shown)

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
        opened = self._reader.submit(self._index, item.path)
        error = opened.exception()
        return Shown(item, opened.result()) if error is None else Shown(item, error=_words(error))

    def _index(self, path: Path) -> Index:
        if path.is_dir():
            return FolderIndex(path, self._store, live=self.live)
        return SingleIndex(path)

    def _look_again(self, shown: Shown) -> None:
        """Whether a folder is gone, or holds another trace now."""
        if shown.item.kind == "report" or isinstance(shown.index, SingleIndex):
            return
        file = shown.item.path / HEADER_FILE
        try:
            header = read_header(shown.item.path)
        except FileError as error:
            shown.gone = not file.exists()
            if shown.index is None and not shown.gone:
                shown.error = str(error)
            return
        shown.gone = False
        if shown.index is None or shown.index.header != header:
            self._store = Store()  # what is cached belongs to the trace that was here before
            again = self._opened(shown.item)
            shown.index, shown.error, shown.failed = again.index, again.error, False

    # -- questions ------------------------------------------------------------------------------

    def index(self, number: int) -> Index:
        """The trace of this number."""
        if not 0 <= number < len(self.shown) or self.shown[number].item.kind != "trace":
            raise ConfigError(f"trace {number}: there is none of this number")
        shown = self.shown[number]
        if shown.index is None:
            raise FileError(shown.error)
        return shown.index

    def report(self, number: int) -> Path:
        """The file of the report of this number."""
        if not 0 <= number < len(self.shown) or self.shown[number].item.kind != "report":
            raise ConfigError(f"report {number}: there is none of this number")
        return self.shown[number].item.path

    def record(self, number: int, key: tuple[int, int, int]) -> Numbers:
        """One microbatch of one layer."""
        index, place = self._found(number, key)
        if isinstance(index, SingleIndex):
            return numbers_of(record_of_trace(index.trace, place))
        return numbers_of(record_of_pieces(index, place))

    def stages(self, number: int, key: tuple[int, int, int]) -> dict[str, Numbers | None]:
        """When the stages of all ranks ran, forward and backward; None if no times are known."""
        index, place = self._found(number, key)
        if isinstance(index, SingleIndex):
            times = times_of_trace(index.trace, place)
        else:
            times = times_of_pieces(index, place)
        return {name: stages_of(times, backward=name == "backward") for name in PASSES}

    def routed(self, number: int, key: tuple[int, int, int]) -> Routed:
        """What was routed in one record."""
        index, place = self._found(number, key)
        if isinstance(index, SingleIndex):
            return index.trace.routed(place)
        return routed_of_pieces(index, place)

    def _found(self, number: int, key: tuple[int, int, int]) -> tuple[Index, int]:
        """A trace, and where a record stands in it."""
        index = self.index(number)
        place = index.place(*key)
        if place < 0:
            step, layer, microbatch = key
            why = "no such record, or not all ranks have it"
            if not index.complete:
                why = "not all ranks were read yet, wait a moment"
            raise ConfigError(f"step {step}, layer {layer}, microbatch {microbatch}: {why}")
        return index, place


def _words(error: BaseException) -> str:
    """An error in one line; of an error of the program, where it was raised."""
    if isinstance(error, (UltraEPError, OSError)):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(frame.filename).name}:{frame.lineno}"
    return f"an error of ultraep, please report it: {type(error).__name__}: {error} ({where})"
