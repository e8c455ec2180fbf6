"""Catalogue: all traces and reports that are open, and the thread that reads them.

What cannot be opened is told, and the rest is open nevertheless.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ultraep.errors import ConfigError, FileError
from ultraep.inputs import read_text
from ultraep.report.numbers import Numbers
from ultraep.trace.read import Routed
from ultraep.trace.schema import HEADER_FILE, Header
from ultraep.view.found import Item, look
from ultraep.view.index import FolderIndex
from ultraep.view.record import (
    numbers_of,
    record_as_planned,
    record_of_pieces,
    record_of_trace,
    routed_of_pieces,
    stages_of,
    times_of_pieces,
    times_of_trace,
)
from ultraep.view.single import SingleIndex
from ultraep.view.store import Store

HEAD_START = 2.0  # seconds for the first answer, before all of a large trace is read
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


class Catalogue:
    """What is open, known by its number. tell: is told of what is damaged."""

    def __init__(
        self, paths: Sequence[Path], *, live: bool = False, tell: Tell | None = None
    ) -> None:
        self.paths, self.live, self.shown = list(paths), live, list[Shown]()
        self._tell, self._told = tell, set[str]()
        self._store = Store()
        self._stop, self._answered = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ultraep view", daemon=True)
        self._look()

    def start(self) -> None:
        """Begin to read, in a thread, unless that was begun."""
        if self._thread.ident is None:
            self._thread.start()

    def answered(self) -> None:
        """The first answer is given: there is time for what takes long."""
        self._answered.set()

    def close(self) -> None:
        """Stop to read."""
        self._stop.set()
        self._answered.set()
        if self._thread.is_alive():
            self._thread.join()

    def read_all(self) -> None:
        """Read everything that is there, in this thread."""
        for shown in self.shown:
            if shown.index is not None:
                shown.index.read(self._stop.is_set)
                self._tell_notes(shown.index.notes)

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
        indices = [shown.index for shown in self.shown if shown.index is not None]
        for index in indices:
            index.look()
        if any(index.sampled for index in indices):
            self._answered.wait(HEAD_START)
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
        try:
            if item.path.is_dir():
                return Shown(item, FolderIndex(item.path, self._store, live=self.live))
            return Shown(item, SingleIndex(item.path))
        except (FileError, OSError) as error:
            return Shown(item, error=str(error))

    def _look_again(self, shown: Shown) -> None:
        """Whether a folder is gone, or holds another trace now."""
        if shown.item.kind == "report" or isinstance(shown.index, SingleIndex):
            return
        file = shown.item.path / HEADER_FILE
        try:
            header = Header.from_json(read_text(file), file)
        except FileError as error:
            shown.gone = not file.exists()
            if shown.index is None and not shown.gone:
                shown.error = str(error)
            return
        shown.gone = False
        if shown.index is None or shown.index.header != header:
            again = self._opened(shown.item)
            shown.index, shown.error = again.index, again.error

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
        """One microbatch of one layer; `planned` if not all of it is read yet."""
        index = self.index(number)
        place = index.place(*key)
        if isinstance(index, SingleIndex):
            _check(place, key)
            return numbers_of(record_of_trace(index.trace, place)) | {"planned": False}
        if place >= 0:
            return numbers_of(record_of_pieces(index, place)) | {"planned": False}
        planned = None if index.finished else index.planned(*key)
        _check(place if planned is None else 0, key)
        assert planned is not None
        return numbers_of(record_as_planned(index, *planned)) | {"planned": True}

    def stages(self, number: int, key: tuple[int, int, int], *, backward: bool) -> Numbers | None:
        """When the stages of all ranks were in one pass; None if no times are known, or not yet."""
        index = self.index(number)
        place = index.place(*key)
        if isinstance(index, SingleIndex):
            _check(place, key)
            return stages_of(times_of_trace(index.trace, place), backward=backward)
        if place < 0 and not index.finished:
            return None
        _check(place, key)
        return stages_of(times_of_pieces(index, place, backward=backward), backward=backward)

    def routed(self, number: int, key: tuple[int, int, int]) -> Routed:
        """What was routed in one record."""
        index = self.index(number)
        place = index.place(*key)
        _check(place, key)
        if isinstance(index, SingleIndex):
            return index.trace.routed(place)
        return routed_of_pieces(index, place)


def _check(place: int, key: tuple[int, int, int]) -> None:
    if place < 0:
        step, layer, microbatch = key
        raise ConfigError(
            f"step {step}, layer {layer}, microbatch {microbatch}: no such record, or not all "
            "ranks have it"
        )
