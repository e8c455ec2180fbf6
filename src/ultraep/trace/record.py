"""Recorder: passes the records of one rank to a thread that writes them, and never waits for it.

Records that wait to be written take a bounded amount of memory. If the disk is too slow, further
records are dropped and counted; the trace stores the count.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError, FileError
from ultraep.files.writing import write_text
from ultraep.loads import as_integers
from ultraep.plan import DEFAULT_CONFIG, Plan
from ultraep.topology import Topology
from ultraep.trace.files import write_arrays
from ultraep.trace.schema import (
    ENDS,
    HEADER_FILE,
    KEY,
    PLAN_FIELDS,
    Array,
    Arrays,
    Field,
    Header,
    Key,
    fields_in_pieces,
    piece_file,
    rank_folder,
)

MEMORY = 64 << 20  # bytes of records that wait
OVERHEAD = 1000  # bytes of a record besides its arrays
LARGEST = np.iinfo(np.int32).max
PIECE_BYTES = 4 << 20  # after which a piece is written, uncompressed
FIRST_WAIT, LONGEST_WAIT = 0.25, 60.0  # seconds between two pieces; each wait twice the last one
POLL_SECONDS = 0.25  # between two checks of the queue
CLOSE_SECONDS = 30.0  # that `close` waits for the thread

logger = logging.getLogger(__name__)


class Recorder:
    """Writes the records of one rank into a trace.

    folder: of the trace, the same on all ranks. It must not hold a trace yet.
    topology, config: of the run; the plans of all records must have been made for them.
    rank: of the records. Rank 0 also writes loads and plans, which all ranks share.
    note: free text for the header.
    memory: bytes that may wait to be written; records beyond the limit are dropped and counted.
    """

    def __init__(
        self,
        folder: str | Path,
        topology: Topology,
        config: BalanceConfig = DEFAULT_CONFIG,
        *,
        rank: int = 0,
        note: str = "",
        memory: int = MEMORY,
    ) -> None:
        if not 0 <= rank < topology.ranks:
            raise ConfigError(f"rank must lie in 0..{topology.ranks - 1}, got {rank}")
        if memory < 1:
            raise ConfigError(f"memory must be at least 1 byte, got {memory}")
        self.folder, self.rank = Path(folder), rank
        self.header = Header.of(topology, config, note=note)
        self._config = config
        self._slots = self.header.sizes(rank)["L"]
        self._plan_values = attrgetter(*(field.plan for field in PLAN_FIELDS))
        _create_folders(self.folder, self.header, rank)
        self._writer = Writer(self.folder / rank_folder(rank), self.header, rank, memory)
        self._finish = weakref.finalize(self, Writer.close, self._writer)  # also at exit

    def add(
        self,
        *,
        plan: Plan,
        slot_rows: Any,
        step: int,
        layer: int = 0,
        microbatch: int = 0,
        bytes_moved: int = 0,
        seconds: Mapping[str, float] | None = None,
        began: float | None = None,
    ) -> bool:
        """Record one microbatch of one layer. Returns at once; False if it was dropped.

        step, layer, microbatch: the key of the record, the same on all ranks, used only once.
        plan: recorded as a whole, with its loads.
        slot_rows: rows that arrived in each slot of this rank, home slots first.
        bytes_moved: bytes of weights and gradients of replicas that this rank sent.
        seconds: by stage, on this rank.
        began: start in seconds since 1970; by default, now minus the seconds.
        """
        key = _key(step, layer, microbatch)
        self._check_plan(plan)
        rows = self._rows(slot_rows)
        values = self._values("began", began, bytes_moved, seconds) | {"slot_rows": rows}
        shared, nbytes = (), OVERHEAD + rows.nbytes
        if self.rank == 0:
            shared = self._plan_values(plan)
            nbytes += plan.loads.nbytes + plan.replicas.nbytes + plan.quotas.nbytes
        return self._writer.put(Entry(key, values, shared, nbytes))

    def more(
        self,
        *,
        step: int,
        layer: int = 0,
        microbatch: int = 0,
        bytes_moved: int = 0,
        seconds: Mapping[str, float] | None = None,
        began: float | None = None,
    ) -> bool:
        """Add bytes and seconds of the backward pass to an earlier record."""
        values = self._values("back_began", began, bytes_moved, seconds)
        return self._writer.put(Entry(_key(step, layer, microbatch), values, None, OVERHEAD))

    @property
    def dropped(self) -> int:
        """Records and additions lost so far, because writing was too slow or failed."""
        return self._writer.dropped

    def close(self) -> None:
        """Write the records that wait; later records are dropped."""
        self._finish()

    def discard(self) -> None:
        """Remove the empty trace of a group that could not be formed."""
        self.close()
        (self.folder / rank_folder(self.rank)).rmdir()
        if self.rank == 0:
            (self.folder / HEADER_FILE).unlink()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_plan(self, plan: Plan) -> None:
        if plan.topology != self.header.topology:
            raise ConfigError(
                f"the plan was made for {plan.topology}, the trace for {self.header.topology}"
            )
        mine, its = self._config, plan.config
        its_own = replace(its, policy=mine.policy, rates=mine.rates, speeds=mine.speeds)
        if mine is not its and its_own != mine:
            raise ConfigError(f"the plan was made with {its}, the trace with {mine}")

    def _rows(self, slot_rows: Any) -> Array:
        rows = as_integers(slot_rows, "slot_rows").astype(np.int32)
        if rows.shape != (self._slots,) or rows.min(initial=0) < 0:
            raise ConfigError(
                f"slot_rows must be rows of each of the {self._slots} slots of rank "
                f"{self.rank}, got {rows.tolist()}"
            )
        return rows

    def _values(
        self,
        began_name: str,
        began: float | None,
        bytes_moved: int,
        seconds: Mapping[str, float] | None,
    ) -> dict[str, Any]:
        by_stage = self._by_stage(seconds or {})
        began = time.time() - sum(by_stage) if began is None else began
        return {began_name: began, "bytes_moved": int(bytes_moved), "seconds": by_stage}

    def _by_stage(self, seconds: Mapping[str, float]) -> list[float]:
        stages = self.header.stages
        unknown = [stage for stage in seconds if stage not in stages]
        if unknown:
            raise ConfigError(f"unknown stage {unknown[0]!r}; the trace has {', '.join(stages)}")
        return [seconds.get(stage, 0.0) for stage in stages]


def _key(step: int, layer: int, microbatch: int) -> Key:
    if step < 0 or not 0 <= layer <= LARGEST or not 0 <= microbatch <= LARGEST:
        raise ConfigError(
            f"step must be >= 0, layer and microbatch must lie in 0..{LARGEST}, "
            f"got {step}, {layer}, {microbatch}"
        )
    return int(step), int(layer), int(microbatch)


def _create_folders(folder: Path, header: Header, rank: int) -> None:
    """Create the folder of a rank, and on rank 0 the header; refuse a folder that is in use."""
    try:
        if folder.exists() and not folder.is_dir():
            raise FileError(f"{folder}: is a file, but a trace needs a folder")
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(path.name for path in folder.iterdir())
        if rank_folder(rank) in names or (rank == 0 and HEADER_FILE in names):
            raise FileError(f"{folder}: already holds a trace: remove it, or choose a new folder")
        foreign = [name for name in names if not name.startswith("rank-")]
        if rank == 0 and foreign:
            raise FileError(f"{folder}: not empty, it holds {foreign[0]}: choose a new folder")
        (folder / rank_folder(rank)).mkdir()
        if rank == 0:
            write_text(folder / HEADER_FILE, header.to_json() + "\n")
    except OSError as error:
        raise FileError(f"{folder}: cannot be written to: {error.strerror}") from None


# -- the writer thread ---------------------------------------------------------------------------


class Entry(NamedTuple):
    """One microbatch of one layer on one rank: a record, or an addition to an earlier record."""

    key: Key
    values: dict[str, Any]  # by the name of the field
    shared: tuple[Any, ...] | None  # values of the plan on rank 0; None: an addition
    nbytes: int  # of memory, while it waits


class Writer:
    """The queue of a recorder, and the thread that writes it to pieces."""

    def __init__(self, folder: Path, header: Header, rank: int, memory: int) -> None:
        self._folder, self._header, self._rank, self._memory = folder, header, rank, memory
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._waiting: list[Entry] = []
        self._held = 0  # bytes that wait, or are being written
        self.dropped = self._stored = 0  # so far, and the count in the last piece
        self._closed = self._failed = False
        self._pieces = 0
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def put(self, entry: Entry) -> bool:
        """Queue an entry, or drop it if the memory is full."""
        with self._lock:
            if self._closed or self._failed or self._held + entry.nbytes > self._memory:
                self.dropped += 1
                return False
            self._waiting.append(entry)
            self._held += entry.nbytes
            self._start()
        if 2 * self._held > self._memory:
            self._wake.set()
        return True

    def close(self) -> None:
        """Write the queue; give up on a stuck writer after a while."""
        if os.getpid() != self._process:  # a forked child does not have the thread
            return
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._wake.set()
            thread.join(CLOSE_SECONDS)
            if thread.is_alive():
                logger.warning("%s: still being written; records may be lost", self._folder)
        if self.dropped:
            logger.warning("%s: %d records were dropped", self._folder, self.dropped)

    def _start(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="ultraep trace", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """Collect for a while and write a piece, until closed."""
        wait, most = FIRST_WAIT, min(PIECE_BYTES, self._memory // 2)
        closed = False
        while not closed and not self._failed:
            until = time.monotonic() + wait
            while not self._closed and self._held <= most:
                if self._waiting and time.monotonic() >= until:
                    break
                self._wake.wait(POLL_SECONDS)
                self._wake.clear()
            closed = self._closed
            self._write()
            wait = min(2 * wait, LONGEST_WAIT)

    def _write(self) -> None:
        with self._lock:
            entries, self._waiting, dropped = self._waiting, [], self.dropped
        if entries or dropped > self._stored:
            arrays = piece(entries, self._header, self._rank, dropped=dropped)
            try:
                write_arrays(self._folder / piece_file(self._pieces), arrays)
            except FileError as error:
                logger.warning("recording ends here: %s", error)
                with self._lock:
                    self._failed = True
                    self.dropped += len(entries) + len(self._waiting)
                    self._waiting, self._held = [], 0
                return
            self._stored, self._pieces = dropped, self._pieces + 1
        with self._lock:
            self._held -= sum(entry.nbytes for entry in entries)


def piece(entries: list[Entry], header: Header, rank: int, *, dropped: int) -> Arrays:
    names = (*KEY, *(field.name for field in PLAN_FIELDS))
    records, additions = [], []
    for key, values, shared, _ in entries:
        if shared is None:
            additions.append(values | {"more": key})
        else:
            records.append(values | dict(zip(names, key + shared, strict=False)))
    sizes, arrays = header.sizes(rank), {"dropped": np.array([dropped], dtype=np.int64)}
    for name, field in fields_in_pieces(rank).items():
        own = additions if field.shape[0] == "M" else records
        optional = field.since > 1
        if name in arrays or (optional and not any(field.name in values for values in own)):
            continue
        default = field.defaults(sizes, field.shape[1:]) if optional else None
        column = [values.get(field.name, default) for values in own]
        arrays[name] = _array(field, column, [sizes[letter] for letter in field.shape[1:]])
    return arrays


def _array(field: Field, column: list[Any], shape: list[int]) -> Array:
    """Return one row per record; the replicas of all records one after the other."""
    if field.shape[0] == "C":
        none = np.empty((0, *shape), dtype=field.dtype)
        return np.concatenate([none, *column]).astype(field.dtype)
    if field.name == ENDS:
        return np.cumsum([len(replicas) for replicas in column], dtype=field.dtype)
    return np.array(column, dtype=field.dtype).reshape(len(column), *shape)
