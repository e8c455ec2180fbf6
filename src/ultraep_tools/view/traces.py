"""Open traces: a table with one row per record, and single records read on request.

The table comes from the summaries that the recorder stores in every piece. The pieces of all ranks
are read side by side, and a record enters the table once all ranks have it, so the table of a long
trace grows while it is read. A damaged piece adds a note; the records of other pieces are shown.

Shapes: T summary lines of a piece.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.config import MAX_ROWS
from ultraep.errors import ConfigError, FileError
from ultraep.trace.files import read_header, read_piece
from ultraep.trace.read import Trace, concatenated, imbalance, join
from ultraep.trace.schema import (
    KEY,
    PIECE,
    Array,
    Arrays,
    Column,
    Header,
    Key,
    no_records,
    piece_file,
    rank_folder,
)
from ultraep.trace.summary import NANOSECONDS, TIMES, stage_means, summary_of
from ultraep_tools.view.table import Table

SUMMARY = ("summary", "stage_sums", "dropped")  # arrays of a piece that the table needs
OF_RANK_0 = ("step", "policy", "speeds")  # the same, for the first rank
MOST_SECONDS = 1e12  # per stage and piece
MOST_NOTES = 20
COLUMNS = (  # arrays of `OpenTrace` with one entry per record
    *("_key", "_planned", "_served", "_rows", "_speeds", "_balanced", "_known", "_seconds"),
)
PUBLISH_SECONDS = 0.5  # between two tables while a trace is read
CACHED_PIECES = 2


class OpenTrace:
    """A trace that the viewer shows. One thread reads it; any thread may use table and records."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path, self.header, ranks = path, header, header.ranks
        self.notes: list[str] = []
        self.version = self.done = self.total = 0
        self.finished = False
        self._pieces: list[list[NDArray[np.int32]]] = [[] for _ in range(ranks)]  # record by line
        self._order = [np.zeros(0, np.int64)]  # records of each piece of rank 0
        self._stage_sums = np.zeros((ranks, len(header.stages)))
        self._dropped = np.zeros(ranks, np.int64)
        self._numbers: dict[tuple[int, ...], int] = {}
        # By record, in the last dimension, and longer than there are records.
        self._key: IntArray = np.zeros((len(KEY), 0), np.int64)
        self._planned: IntArray = np.zeros((3, 0), np.int64)  # routed rows, largest rank, replicas
        self._served: IntArray = np.zeros((1, 0), np.int64)  # bytes
        self._rows: NDArray[np.int32] = np.zeros((ranks, 0), np.int32)
        self._speeds: NDArray[np.int32] = np.zeros((ranks, 0), np.int32)  # zeros: equal
        self._balanced: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._known: NDArray[np.bool_] = np.zeros((ranks, 0), np.bool_)
        self._seconds: NDArray[np.float32] = np.zeros((ranks, 3, 0), np.float32)  # by TIMES
        self.table = self._table()

    def read(self, stop: Callable[[], bool]) -> None:
        """Read everything that is new; return early when `stop` returns True."""
        raise NotImplementedError

    def _with_record(self, number: int) -> Trace:
        """Return a trace that contains a record."""
        raise NotImplementedError

    def record(self, key: Key) -> Trace:
        """Return a trace of one record that all ranks have."""
        number = self._numbers.get(key, -1)
        if not (0 <= number < self._known.shape[1] and self._known[:, number].all()):
            step, layer, microbatch = key
            raise ConfigError(
                f"step {step}, layer {layer}, microbatch {microbatch}: no such record, or not all "
                "ranks have it yet"
            )
        trace = self._with_record(number)
        keys = np.column_stack([trace.arrays[name] for name in KEY])
        records = np.flatnonzero((keys == key).all(axis=1))
        if not len(records):
            raise FileError(
                f"{self.path}: a summary lists a record that its piece does not contain"
            )
        return trace.take(records[:1])

    @property
    def dropped(self) -> int:
        """Records and additions that ranks lost."""
        return int(self._dropped.sum())

    @property
    def left_out(self) -> int:
        """Records that some ranks lack, once all was read."""
        if not self.finished:
            return 0
        return int(self._known.any(axis=0).sum()) - len(self.table)

    def note(self, text: str) -> None:
        """Show a line next to the trace, once."""
        if text not in self.notes and len(self.notes) < MOST_NOTES:
            self.notes.append(text)

    def _add(self, rank: int, arrays: Arrays) -> None:
        """Add the summary of the next piece of a rank: records, then additions to earlier ones."""
        lines = arrays["summary"]
        number = self._numbered(lines[:, : len(KEY)])
        count = int((lines[:, Column.LATE] == 0).sum())
        _, first = np.unique(number[:count], return_index=True)
        new = np.sort(first[~self._known[rank, number[first]]])
        at = number[new]
        self._known[rank, at] = True
        self._rows[rank, at] = np.clip(lines[new, Column.ROWS], 0, MAX_ROWS)
        if rank == 0:
            self._planned[:, at] = lines[new, Column.ROUTED : Column.REPLICAS + 1].T
            self._speeds[:, at] = arrays["speeds"][new].T
            self._balanced[at] = arrays["policy"][new] != "none"
            self._order.append(at)
        counted = np.concatenate([new, np.arange(count, len(lines))])
        np.add.at(self._served[0], number[counted], lines[counted, Column.BYTES])
        seconds = (lines[counted, TIMES] / NANOSECONDS).astype(np.float32)
        for stage in range(3):
            np.add.at(self._seconds[rank, stage], number[counted], seconds[:, stage])
        self._stage_sums[rank] += np.clip(np.nan_to_num(arrays["stage_sums"]), 0, MOST_SECONDS)
        self._dropped[rank] = arrays["dropped"][0]
        self._pieces[rank].append(number.astype(np.int32))

    def _numbered(self, keys_T3: IntArray) -> IntArray:
        """[T] the number of the record with each key."""
        numbers = self._numbers
        if len(keys_T3):  # ranks usually record in the same order
            begin = numbers.get(tuple(keys_T3[0].tolist()), len(numbers))
            same = self._key[:, begin : min(begin + len(keys_T3), len(numbers))]
            if np.array_equal(same.T, keys_T3):
                return np.arange(begin, begin + len(keys_T3))
        keys = map(tuple, keys_T3.tolist())
        number_T = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
        self._grow(len(numbers))
        self._key[:, number_T] = keys_T3.T
        return number_T

    def _grow(self, count: int) -> None:
        """Make all columns at least `count` records long."""
        if count > self._key.shape[1]:
            more = max(count, 2 * self._key.shape[1]) - self._key.shape[1]
            for name in COLUMNS:
                column: Array = getattr(self, name)
                widths = [(0, 0)] * (column.ndim - 1) + [(0, more)]
                setattr(self, name, np.pad(column, widths))

    def _publish(self) -> None:
        self.table = self._table()
        self.version += 1

    def _table(self) -> Table:
        """Return the records that all ranks have, in the order of rank 0."""
        ranks = self.header.ranks
        order = np.concatenate(self._order)
        keep = order[self._known[:, order].all(axis=0)]
        routed, peak, replicas = self._planned[:, keep]
        rows, speeds = self._rows[:, keep].T, self._speeds[:, keep].T
        slowest = self._seconds.max(axis=0)[:, keep].astype(np.float64)
        experts = slowest[0] + slowest[1]
        mean = self._seconds[:, :2].sum(axis=(0, 1), dtype=np.float64)[keep] / ranks
        ratio = peak.astype(np.float64) * ranks / np.maximum(routed, 1)
        before = np.where(routed > 0, ratio, 1.0)
        timed = np.where(mean > 0, 1.0, np.nan)
        recorded = self._known.sum(axis=1)
        return Table(
            **dict(zip(KEY, self._key[:, keep], strict=True)),
            before=before,
            after=imbalance(rows.astype(np.int64), speeds.astype(np.int64)),
            copies=replicas.astype(np.float64),
            bytes=self._served[0, keep].astype(np.float64),
            lost=(experts - mean) * timed,
            saved=np.where(replicas > 0, mean * before - experts, 0.0) * timed,
            cost=slowest[2] * timed,
            rows=routed,
            balanced=self._balanced[keep],
            stages=stage_means(self._stage_sums, recorded),
            layer_seconds=float((self._stage_sums.sum(axis=1) / np.maximum(recorded, 1)).mean()),
        )


class WholeTrace(OpenTrace):
    """A trace in memory, from a file of `ultraep trace export --npz`."""

    def __init__(self, path: Path, trace: Trace) -> None:
        super().__init__(path, trace.header)
        self.trace = trace
        for rank in range(self.header.ranks):
            self._add(rank, self._summary(rank))
        self._dropped[0] += self.trace.dropped
        self.finished = True
        self.done = self.total = 1
        self._publish()

    def read(self, stop: Callable[[], bool]) -> None:
        """Do nothing: the file is read already."""

    def _summary(self, rank: int) -> Arrays:
        """Return the summary of the arrays of one rank."""
        arrays, slots = self.trace.arrays, self.header.topology.first_slot_of_rank
        own = no_records(self.header, rank)
        own |= {name: arrays[name] for name in own.keys() & arrays.keys() if name != "dropped"}
        own |= {name: arrays[name][:, rank] for name in ("bytes_moved", "seconds")}
        own["slot_rows"] = arrays["slot_rows"][:, slots[rank] : slots[rank + 1]]
        summary = summary_of(self.header, own) | {"dropped": own["dropped"]}
        return summary | {name: own[name] for name in OF_RANK_0} if rank == 0 else summary

    def _with_record(self, _: int) -> Trace:
        return self.trace


class FolderTrace(OpenTrace):
    """A trace in a folder. live: a job may still be writing it."""

    def __init__(self, folder: Path, *, live: bool = False) -> None:
        super().__init__(folder, read_header(folder))
        self.live = live
        self._joined = lru_cache(CACHED_PIECES)(self._read_joined)

    def piece_path(self, rank: int, piece: int) -> Path:
        return self.path / rank_folder(rank) / piece_file(piece)

    # -- the table ------------------------------------------------------------------------------

    def read(self, stop: Callable[[], bool]) -> None:
        """Read all new pieces, the first ones of all ranks first."""
        pieces = sorted((n, r) for r in range(self.header.ranks) for n in self._new_pieces(r))
        self.total, published = self.done + len(pieces), time.monotonic()
        self.finished = self.finished and not pieces
        for piece, rank in pieces:
            if stop():
                return
            self._add(rank, self._summary(rank, piece))
            self.done += 1
            if time.monotonic() > published + PUBLISH_SECONDS:
                self._publish()
                published = time.monotonic()
        self.finished = True
        if pieces:
            self._publish()

    def _new_pieces(self, rank: int) -> range:
        """Return the numbers of pieces to read, up to the first missing one."""
        folder, known = self.path / rank_folder(rank), len(self._pieces[rank])
        try:
            names = {path.name for path in folder.iterdir()}
        except OSError:
            return range(0)
        end = known
        while piece_file(end) in names:
            end += 1
        beyond = sorted(name for name in names if PIECE.fullmatch(name) and name > piece_file(end))
        if beyond and not self.live:
            self.note(f"{folder / beyond[0]}: not read, {piece_file(end)} before it is missing")
        return range(known, end)

    def _summary(self, rank: int, piece: int) -> Arrays:
        """Return the summary of a piece; an empty one, with a note, if the piece is damaged."""
        path = self.piece_path(rank, piece)
        try:
            wanted = SUMMARY if rank else (*SUMMARY, *OF_RANK_0)
            arrays = read_piece(path, self.header, rank, wanted)
            if not set(SUMMARY) <= arrays.keys():  # before version 4
                arrays |= summary_of(self.header, read_piece(path, self.header, rank))
            late = arrays["summary"][:, Column.LATE]
            if (np.diff(late, prepend=0, append=1) < 0).any():
                raise FileError(f"{path}: the summary has records after additions")
            if rank == 0 and len(arrays["speeds"]) != (late == 0).sum():
                raise FileError(f"{path}: the summary has another number of records")
        except FileError as error:
            self.note(str(error))
            nothing = no_records(self.header, rank)
            dropped = self._dropped[rank : rank + 1]
            return nothing | summary_of(self.header, nothing) | {"dropped": dropped}
        return arrays

    # -- one record -----------------------------------------------------------------------------

    def _with_record(self, number: int) -> Trace:
        """Return the pieces of all ranks that mention a record."""
        return self._joined(
            tuple(
                tuple(n for n, numbers in enumerate(own) if (numbers == number).any())
                for own in self._pieces
            )
        )

    def _read_joined(self, pieces: tuple[tuple[int, ...], ...]) -> Trace:
        """Return the records of some pieces of each rank."""
        with np.errstate(invalid="ignore"):  # a file may hold any number
            ranks = [
                concatenated([read_piece(self.piece_path(rank, n), self.header, rank) for n in own])
                for rank, own in enumerate(pieces)
            ]
            return Trace(self.header, join(ranks))
