"""Writer: the queue of a recorder, and the thread that empties it into pieces.

Shapes: see schema.py.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ultraep.errors import FileError
from ultraep.trace.files import write_arrays
from ultraep.trace.schema import (
    ENDS,
    KEY,
    Array,
    Arrays,
    Field,
    Header,
    Key,
    fields_in_pieces,
    fields_of_plan,
    piece_file,
)
from ultraep.trace.summary import summary_of

PIECE_BYTES = 4 << 20  # after which a piece is written, uncompressed
FIRST_WAIT, LONGEST_WAIT = 0.25, 60.0  # seconds until a piece is written; each twice the last one
LOOK = 0.25  # seconds between two looks at what has come
PATIENCE = 30.0  # seconds that `close` waits

logger = logging.getLogger(__name__)


class Entry(NamedTuple):
    """What a rank tells of one microbatch of one layer: first a record, then what is added."""

    key: Key
    values: dict[str, Any]  # by the name of the field
    shared: tuple[Any, ...] | None  # of the plan, on rank 0; None: this is added to a record
    nbytes: int  # of memory, as long as it waits


class Writer:
    """Takes records without waiting, as long as there is room for them; the rest is dropped."""

    def __init__(self, folder: Path, header: Header, rank: int, memory: int) -> None:
        self._folder, self._header, self._rank, self._memory = folder, header, rank, memory
        self._lock, self._look = threading.Lock(), threading.Event()
        self._waiting: list[Entry] = []
        self._held = 0  # bytes that wait, or are being written
        self.dropped = self._told = 0  # so far; of them, what the last piece says
        self._closed = self._failed = False
        self._pieces = 0
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def put(self, entry: Entry) -> bool:
        """Take it, or drop it."""
        with self._lock:
            if self._closed or self._failed or self._held + entry.nbytes > self._memory:
                self.dropped += 1
                return False
            self._waiting.append(entry)
            self._held += entry.nbytes
            if self._thread is None:
                self._start()
        if 2 * self._held > self._memory:
            self._look.set()
        return True

    def lose(self, count: int) -> None:
        """Count what was dropped elsewhere."""
        with self._lock:
            self.dropped += count
            if self._thread is None and not self._closed:
                self._start()

    def close(self) -> None:
        """Write what waits; a writer that is stuck is left behind after a while."""
        if os.getpid() != self._process:  # a child that was forked off has no such thread
            return
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._look.set()
            thread.join(PATIENCE)
            if thread.is_alive():
                logger.warning("%s: still being written, the last records may go", self._folder)
        if self.dropped:
            logger.warning("%s: %d records were dropped", self._folder, self.dropped)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="ultraep trace", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Collect for a while, write a piece, and again until closed."""
        wait, closed = FIRST_WAIT, False
        while not closed and not self._failed:
            closed = self._collect(time.monotonic() + wait)
            self._write()
            wait = min(2 * wait, LONGEST_WAIT)

    def _collect(self, until: float) -> bool:
        """Wait until enough has come, or some and it is time; whether that was all."""
        most = min(PIECE_BYTES, self._memory // 2)
        while not self._closed:
            if self._held > most or (self._waiting and time.monotonic() >= until):
                break
            self._look.wait(LOOK)
            self._look.clear()
        return self._closed

    def _write(self) -> None:
        with self._lock:
            entries, self._waiting, lost = self._waiting, [], self.dropped
        if entries or lost > self._told:
            arrays = piece(entries, self._header, self._rank, dropped=lost)
            try:
                write_arrays(self._folder / piece_file(self._pieces), arrays)
            except FileError as error:
                self._give_up(error, len(entries))
                return
            self._told, self._pieces = lost, self._pieces + 1
        with self._lock:
            self._held -= sum(entry.nbytes for entry in entries)

    def _give_up(self, error: FileError, unwritten: int) -> None:
        logger.warning("recording ends here: %s", error)
        with self._lock:
            self._failed = True
            self.dropped += unwritten + len(self._waiting)
            self._waiting, self._held = [], 0


def piece(entries: list[Entry], header: Header, rank: int, *, dropped: int) -> Arrays:
    """Return the arrays of one piece, with its summary."""
    records, more = ([one for one in entries if (one.shared is None) == late] for late in (0, 1))
    names = (*KEY, *(field.name for field in fields_of_plan()))
    told = zip(*(one.key + (one.shared or ()) for one in records), strict=True)
    columns: dict[str, Sequence[Any]] = dict(zip(names, told, strict=False))
    columns["more"] = [one.key for one in more]
    sizes, arrays = header.sizes(rank), {"dropped": np.array([dropped], dtype=np.int64)}
    for name, field in fields_in_pieces(rank).items():
        by_record = more if field.shape[0] == "M" else records
        values = columns.get(field.name)
        if values is None:
            optional = field.since > 1
            if name in arrays or (optional and not any(field.name in e.values for e in by_record)):
                continue
            nothing = field.filled(sizes, field.shape[1:]) if optional else None
            values = [one.values.get(field.name, nothing) for one in by_record]
        arrays[name] = _array(field, values, [sizes[letter] for letter in field.shape[1:]])
    return arrays | summary_of(header, arrays)


def _array(field: Field, values: Sequence[Any], shape: list[int]) -> Array:
    """One row per record, also if there are none; copies of all of them behind each other."""
    if field.shape[0] == "C":
        none = np.empty((0, *shape), dtype=field.kind)
        return np.concatenate([none, *values]).astype(field.kind)
    if field.name == ENDS:
        return np.cumsum([len(copies) for copies in values], dtype=field.kind)
    return np.array(values, dtype=field.kind).reshape(len(values), *shape)
