"""FolderIndex: the records of a trace in a folder, read from the summaries of its pieces.

Rank 0 is read first. Its summaries name the records, with the imbalance without replicas. The other
ranks add the rows that arrived, bytes and times. A record counts when all ranks have it; until all
ranks were read once, the records of rank 0 are shown with what is known of them. A piece that
cannot be read is named in `notes`, and the others are shown.

Shapes: N records of rank 0, T lines of summaries, R ranks, G stages.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.errors import FileError
from ultraep.tools.view.store import UNKNOWN, Store
from ultraep.tools.view.table import Table, table_of
from ultraep.trace.files import read_header, read_piece
from ultraep.trace.read import RANK_FOLDER
from ultraep.trace.schema import KEY, Arrays, Column, Header, piece_file, rank_folder
from ultraep.trace.summary import NANOSECONDS, TIMES, summary_of

MOST_RECORDS, MOST_OF_RANKS = 2_000_000, 32 << 20  # records; records times ranks
MOST_PENDING = 100_000  # lines of a rank whose records rank 0 has not named
MOST_LINES = 32_000  # of a rank that are counted at once, which bounds memory
MOST_LINES_OF_RECORD = 1000  # of one rank
MOST_SECONDS = 1e12  # of a stage in a piece
MOST_NOTES = 20
PUBLISH_SECONDS = 0.5  # between two tables while rank 0 is read
PIECE = re.compile(r"(\d{6})\.npz")
REPEATED = -2  # in place of the place of a record that came before
NO_LINES: IntArray = np.zeros((0, len(Column)), dtype=np.int64)
READ = ("summary", "stage_sums", "dropped")  # arrays of a piece
SUMS = ("routed", "peak", "replicas", "rows", "fullest", "bytes", "ranks")


class StoredLine(NamedTuple):
    """Where a rank tells of a record: a line in the summary of a piece.

    late: the line holds additions to a record of an earlier piece.
    """

    piece: int
    line: int
    late: bool


class Keys:
    """Finds records by step, layer and microbatch."""

    def __init__(self, keys_N3: IntArray) -> None:
        self._values = [np.unique(column) for column in keys_N3.T]
        self._numbers, self.first = np.unique(self._numbered(keys_N3), return_index=True)

    def places(self, keys_T3: IntArray) -> IntArray:
        """[T] the first record with each key, or UNKNOWN."""
        if not len(self.first):
            return np.full(len(keys_T3), UNKNOWN)
        numbers = self._numbered(keys_T3)
        at = np.minimum(np.searchsorted(self._numbers, numbers), len(self._numbers) - 1)
        return np.where(self._numbers[at] == numbers, self.first[at], UNKNOWN)

    def _numbered(self, keys: IntArray) -> IntArray:
        """One number for each key; UNKNOWN if a part of it occurs in no record."""
        numbers = np.zeros(len(keys), dtype=np.int64)
        for column, values in zip(keys.T, self._values, strict=True):
            at = np.searchsorted(values, column)
            known = np.append(values, 0)[at] == column
            known &= (at < len(values)) & (numbers != UNKNOWN)
            # at most MOST_RECORDS ** 3, which is less than 2 ** 63
            numbers = np.where(known, numbers * len(values) + at, UNKNOWN)
        return numbers


class RankState:
    """What was read of one rank."""

    def __init__(self, header: Header) -> None:
        self.starts = [0]  # first line of every piece, and the end
        self.records: list[int] = []  # lines of every piece that are records: the first ones
        self.place: NDArray[np.int32] = np.zeros(0, dtype=np.int32)  # [T] of each line's record
        self.pending, self.pending_at = NO_LINES, NO_LINES[:, 0]  # lines of unknown records
        self.told: NDArray[np.bool_] = np.zeros(0, dtype=bool)  # [N] whether it has the record
        self.seconds: NDArray[np.float32] = np.zeros((3, 0), dtype=np.float32)  # [3, N] of TIMES
        self.stage_sums = np.zeros(len(header.stages))
        self.dropped = 0

    @property
    def pieces(self) -> int:
        return len(self.records)

    def add_piece(self, arrays: Arrays | None) -> IntArray:
        """Remember where the lines of the next piece stand. None: the piece cannot be read."""
        lines = NO_LINES if arrays is None else arrays["summary"]
        self.starts.append(self.starts[-1] + len(lines))
        self.records.append(int((lines[:, Column.LATE] == 0).sum()))
        if arrays is not None:
            self.stage_sums += np.clip(np.nan_to_num(arrays["stage_sums"]), 0, MOST_SECONDS)
            self.dropped = int(arrays["dropped"][0])
        return lines

    def reach(self, count: int) -> None:
        """Make room for so many records."""
        more = count - len(self.told)
        if more > 0:
            self.told = np.pad(self.told, (0, more))
            self.seconds = np.pad(self.seconds, ((0, 0), (0, more)))

    def lines_of(self, place: int) -> list[StoredLine]:
        """Where the rank tells of a record: one line of the record, others of additions."""
        found = []
        for line in np.flatnonzero(self.place == place)[:MOST_LINES_OF_RECORD].tolist():
            piece = bisect_right(self.starts, line) - 1
            own = line - self.starts[piece]
            found.append(StoredLine(piece, own, own >= self.records[piece]))
        if all(line.late for line in found):
            raise FileError(f"more than {MOST_LINES_OF_RECORD} additions before their record")
        return found


class FolderIndex:
    """A trace in a folder. One thread reads; any thread may look at the table and at records."""

    def __init__(self, folder: Path, store: Store, *, live: bool = False) -> None:
        self.folder, self.store, self.live = folder, store, live
        self.header = read_header(folder)
        self.ranks = [RankState(self.header) for _ in range(self.header.ranks)]
        self.notes: list[str] = []
        self.version = self.done = self.total = 0
        self.finished = self.complete = False  # all was read; all ranks were read once
        self._most = min(MOST_RECORDS, MOST_OF_RANKS // self.header.ranks)
        self._repeated = 0
        self._keys_N3: IntArray = NO_LINES[:, : len(KEY)]
        self._keys = Keys(self._keys_N3)
        self._sums: dict[str, IntArray] = dict.fromkeys(SUMS, NO_LINES[:, 0])  # [N]
        self.table = self._table()
        for path in sorted(folder.iterdir()):
            match = RANK_FOLDER.fullmatch(path.name)
            if match and int(match[1]) >= self.header.ranks:
                self.note(f"{path}: a rank too many, the trace is one of {self.header.ranks}")

    # -- looking --------------------------------------------------------------------------------

    @property
    def dropped(self) -> int:
        """Records and additions that ranks lost."""
        return sum(state.dropped for state in self.ranks)

    @property
    def left_out(self) -> int:
        """Records that not all ranks have, as far as was read."""
        if not self.complete:
            return 0
        lacking = int((self._sums["ranks"] < self.header.ranks).sum())
        foreign = [int((state.pending[:, Column.LATE] == 0).sum()) for state in self.ranks]
        return lacking + self._repeated + max(foreign)

    def place(self, step: int, layer: int, microbatch: int) -> int:
        """Where a record that all ranks have stands, or UNKNOWN."""
        place = int(self._keys.places(np.array([[step, layer, microbatch]]))[0])
        whole = place >= 0 and self._sums["ranks"][place] == self.header.ranks
        return place if whole and self.complete else UNKNOWN

    def path(self, rank: int, number: int) -> Path:
        """A piece of a rank."""
        return self.folder / rank_folder(rank) / piece_file(number)

    # -- reading --------------------------------------------------------------------------------

    def read(self, stop: Callable[[], bool]) -> None:
        """Read all pieces that are new; return early when `stop` says so."""
        pieces = [self._new_pieces(rank) for rank in range(self.header.ranks)]
        self.total += sum(map(len, pieces))
        if any(pieces) or not self.complete:
            self.finished = False
            for rank, numbers in enumerate(pieces):
                if numbers or len(self.ranks[rank].pending):
                    self._read_rank(rank, numbers, stop)
                if stop():
                    return
            self.complete = True
            self._publish()
        self.finished = True

    def _new_pieces(self, rank: int) -> range:
        """Numbers of pieces that were not read, up to the first that is missing."""
        folder, known = self.folder / rank_folder(rank), self.ranks[rank].pieces
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

    def _read_rank(self, rank: int, numbers: range, stop: Callable[[], bool]) -> None:
        early = rank == 0 and not self.complete
        batch, publish_at = list[IntArray](), time.monotonic() + PUBLISH_SECONDS
        for number in numbers:
            if stop():
                return
            batch.append(self.ranks[rank].add_piece(self._summary(rank, number)))
            self.done += 1
            if early and time.monotonic() > publish_at:
                self._merge(rank, batch)
                self._publish()
                publish_at = time.monotonic() + PUBLISH_SECONDS
            elif rank and sum(map(len, batch)) > MOST_LINES:
                self._merge(rank, batch)
        self._merge(rank, batch)
        if early:
            self._publish()

    def _summary(self, rank: int, number: int) -> Arrays | None:
        """The summary of a piece; None, with a note, if the piece is damaged."""
        path = self.path(rank, number)
        try:
            arrays = read_piece(path, self.header, rank, READ)
            if len(arrays) < len(READ):  # before version 4
                arrays |= summary_of(self.header, read_piece(path, self.header, rank))
            late = arrays["summary"][:, Column.LATE]
            if (np.diff(late, prepend=0, append=1) < 0).any():
                raise FileError(f"{path}: the summary has records behind additions")
        except FileError as error:
            self.note(str(error))
            return None
        return arrays

    def _merge(self, rank: int, batch: list[IntArray]) -> None:
        """Count the lines of new pieces, and those that were waiting for their records."""
        state, lines = self.ranks[rank], np.concatenate([self.ranks[rank].pending, *batch])
        batch.clear()
        new = np.arange(len(state.place), len(state.place) + len(lines) - len(state.pending))
        at = np.concatenate([state.pending_at, new])
        state.place = np.pad(state.place, (0, len(new)), constant_values=UNKNOWN)
        if rank == 0:
            self._add_records(lines)
        state.reach(len(self._keys_N3))
        place = self._keys.places(lines[:, : len(KEY)])
        record = lines[:, Column.LATE] == 0
        repeated = record & _repeated(place, record, state.told)
        place[repeated] = REPEATED
        if rank == 0:
            self._repeated += int(repeated.sum())
        state.place[at] = place
        self._add(rank, lines[place >= 0], place[place >= 0])
        waits = place == UNKNOWN
        state.pending, state.pending_at = lines[waits][-MOST_PENDING:], at[waits][-MOST_PENDING:]

    def _add_records(self, lines: IntArray) -> None:
        """New records, from lines of rank 0."""
        keys = np.concatenate([self._keys_N3, lines[lines[:, Column.LATE] == 0][:, : len(KEY)]])
        keys = keys[np.sort(Keys(keys).first)]
        if len(keys) > self._most:
            self.note(f"more than {self._most:,} records: the rest is not shown")
        keys = keys[: self._most]
        more = len(keys) - len(self._keys_N3)
        self._sums = {name: np.pad(values, (0, more)) for name, values in self._sums.items()}
        self._keys_N3, self._keys = keys, Keys(keys)

    def _add(self, rank: int, lines: IntArray, place: IntArray) -> None:
        """Count lines of a rank; every record occurs once, additions any number of times."""
        state, sums, record = self.ranks[rank], self._sums, lines[:, Column.LATE] == 0
        own, at = lines[record], place[record]
        state.told[at] = True
        sums["ranks"][at] += 1
        sums["rows"][at] += own[:, Column.ROWS]
        sums["fullest"][at] = np.maximum(sums["fullest"][at], own[:, Column.ROWS])
        if rank == 0:
            sums["routed"][at], sums["peak"][at] = own[:, Column.ROUTED], own[:, Column.PEAK]
            sums["replicas"][at] = own[:, Column.REPLICAS]
        np.add.at(sums["bytes"], place, lines[:, Column.BYTES])
        for seconds, nanoseconds in zip(state.seconds, lines[:, TIMES].T, strict=True):
            np.add.at(seconds, place, (nanoseconds / NANOSECONDS).astype(np.float32))

    # -- the table ------------------------------------------------------------------------------

    def _publish(self) -> None:
        self.table = self._table()
        self.version += 1

    def _table(self) -> Table:
        """The records that all ranks have; those of rank 0 until all ranks were read."""
        ranks, sums = self.header.ranks, self._sums
        shown = sums["ranks"] == ranks if self.complete else np.ones(len(self._keys_N3), bool)
        keep = np.flatnonzero(shown)
        slowest, total = np.zeros((3, len(keep))), np.zeros(len(keep))
        for state in self.ranks:
            state.reach(len(self._keys_N3))
            seconds = state.seconds[:, keep]
            np.maximum(slowest, seconds, out=slowest)
            total += seconds[0]
            total += seconds[1]
        told = [state.stage_sums / max(1, int(state.told.sum())) for state in self.ranks]
        unknown = 1.0 if self.complete else np.nan
        return table_of(
            dict(zip(KEY, self._keys_N3[keep].T, strict=True)),
            before=_ratio(sums["peak"], sums["routed"], ranks)[keep],
            after=_ratio(sums["fullest"], sums["rows"], ranks)[keep] * unknown,
            copies=sums["replicas"][keep].astype(np.float64),
            bytes_moved=sums["bytes"][keep].astype(np.float64) * unknown,
            experts=slowest[0] + slowest[1],
            mean=total / ranks * unknown,
            cost=slowest[2],
            stages=np.max(told, axis=0),
        )

    def note(self, text: str) -> None:
        """Show a line beside the trace, once."""
        if text not in self.notes and len(self.notes) < MOST_NOTES:
            self.notes.append(text)


def _repeated(
    place: IntArray, record: NDArray[np.bool_], told: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """[T] whether a record came before: in these lines, or according to `told`."""
    known = np.flatnonzero(record & (place >= 0))
    _, first = np.unique(place[known], return_index=True)
    fresh = known[first]
    fresh = fresh[~told[place[fresh]]]
    found = np.zeros(len(place), dtype=bool)
    found[known] = True
    found[fresh] = False
    return found


def _ratio(fullest: IntArray, rows: IntArray, ranks: int) -> NDArray[np.float64]:
    """[N] fullest rank over mean rank; 1.0 where there is no row."""
    found: NDArray[np.float64] = fullest.astype(np.float64) * ranks / np.maximum(rows, 1)
    return np.where(rows > 0, found, 1.0)
