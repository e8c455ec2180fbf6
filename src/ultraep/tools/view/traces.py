"""Open traces: a table of all records, and single records read when the page asks for them.

The table comes from the summaries that recorders store in every piece. Rank 0 is read first: its
summaries name the records, with the imbalance without replicas. The other ranks add the rows that
arrived, bytes and times. A record counts when all ranks have it; until all ranks were read once,
the records of rank 0 are shown with what is known of them. A piece that cannot be read is named in
`notes`, and the others are shown.

Shapes: N records, T lines of summaries, R ranks, G stages.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.errors import ConfigError, FileError
from ultraep.files.reading import ArrayRows, opened, reading
from ultraep.tools.view.table import Table
from ultraep.trace.files import open_piece, read_header, read_piece
from ultraep.trace.join import side_by_side
from ultraep.trace.read import Routed, Trace, read_trace
from ultraep.trace.schema import (
    KEY,
    PIECE,
    RANK_FOLDER,
    Array,
    Arrays,
    Column,
    Field,
    Header,
    Key,
    checked_arrays,
    fields_in_file,
    fields_in_pieces,
    piece_file,
    rank_folder,
    taken,
)
from ultraep.trace.summary import NANOSECONDS, TIMES, lines_of_additions, summary_of

# Fields of a record that are read together.
PLANNED = ("layer", "policy", "loads", "copy_ends", "copies", "quotas", "rates")
SERVED = (*PLANNED, "slot_rows", "bytes_moved")
TIMED = ("began", "back_began", "seconds", "waited")

MOST_RECORDS, MOST_OF_RANKS = 2_000_000, 32 << 20  # records; records times ranks
MOST_ADDITIONS = 1000  # lines, and additions of a line, that are read of one record and rank
MOST_SECONDS = 1e12  # of a stage in a piece
MOST_NOTES = 20
PUBLISH_SECONDS = 0.5  # between two tables while rank 0 is read
CACHED_RECORDS, CACHED_PLANS, CACHED_LAYOUTS = 8, 2, 4096  # records; pieces
UNKNOWN = -1
SUMMARY = ("summary", "stage_sums", "dropped")  # arrays of a piece
SUMS = ("routed", "peak", "replicas", "rows", "fullest", "bytes", "ranks")


class RankColumns:
    """The columns of one rank. Records have a number, which is the same on all ranks."""

    def __init__(self, header: Header) -> None:
        self.starts = [0]  # first line of every piece, and the end
        self.line: NDArray[np.int32] = np.zeros(0, dtype=np.int32)  # [N] UNKNOWN: none
        self.seconds: NDArray[np.float32] = np.zeros((3, 0), dtype=np.float32)  # [3, N] TIMES
        # numbers of records that have additions in later pieces, and the lines of these additions
        self.late: IntArray = np.zeros((2, 0), dtype=np.int64)
        self.stage_sums = np.zeros(len(header.stages))
        self.dropped = self.repeated = 0

    def reach(self, count: int) -> None:
        """Make room for so many records."""
        if (more := count - len(self.line)) > 0:
            more = max(more, len(self.line))
            self.line = np.pad(self.line, (0, more), constant_values=UNKNOWN)
            self.seconds = np.pad(self.seconds, ((0, 0), (0, more)))

    def piece_of(self, line: int) -> int:
        """Return the number of the piece that holds a line."""
        return bisect_right(self.starts, line) - 1


class OpenTrace:
    """A trace that is shown. One thread reads; any thread may look at the table and at records."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path, self.header = path, header
        self.ranks = [RankColumns(header) for _ in range(header.ranks)]
        self.notes: list[str] = []
        self.version = self.done = self.total = 0
        self.finished = self.complete = False  # all was read; all ranks were read once
        self._most = min(MOST_RECORDS, MOST_OF_RANKS // header.ranks)
        self._numbers: dict[Key, int] = {}
        self._keys_N3: IntArray = np.zeros((0, len(KEY)), dtype=np.int64)
        self._sums = {name: np.zeros(0, dtype=np.int64) for name in SUMS}  # [N]
        self.record = lru_cache(CACHED_RECORDS)(self._record)
        self.table = self._table()

    def read(self, stop: Callable[[], bool]) -> None:
        """Read everything that is new; return early when `stop` says so."""
        raise NotImplementedError

    def _record(self, key: Key, names: tuple[str, ...]) -> Trace:
        """Return a trace of one record, with these fields; `record` caches it."""
        raise NotImplementedError

    def routed(self, key: Key) -> Routed:
        """Return what a record asked to be planned."""
        return self._record(key, PLANNED).routed(0)

    @property
    def dropped(self) -> int:
        """Records and additions that ranks lost."""
        return sum(own.dropped for own in self.ranks)

    @property
    def left_out(self) -> int:
        """Records that not all ranks have, as far as was read."""
        if not self.complete:
            return 0
        lacking = (self._sums["ranks"] > 0) & (self._sums["ranks"] < self.header.ranks)
        return int(lacking.sum()) + max(own.repeated for own in self.ranks)

    def number_of(self, key: Key) -> int:
        """Return the number of a record that all ranks have."""
        number, ranks = self._numbers.get(key, UNKNOWN), self._sums["ranks"]
        if self.complete and 0 <= number < len(ranks) and ranks[number] == self.header.ranks:
            return number
        step, layer, microbatch = key
        reason = "no such record, or not all ranks have it"
        if not self.complete:
            reason = "not all ranks were read yet, wait a moment"
        raise ConfigError(f"step {step}, layer {layer}, microbatch {microbatch}: {reason}")

    def note(self, text: str) -> None:
        """Show a line beside the trace, once."""
        if text not in self.notes and len(self.notes) < MOST_NOTES:
            self.notes.append(text)

    # -- columns --------------------------------------------------------------------------------

    def _add(self, rank: int, arrays: Arrays) -> None:
        """Add the summary of the next piece of a rank: records, then additions to earlier ones."""
        own, lines = self.ranks[rank], arrays["summary"]
        number = self._numbered(lines[:, : len(KEY)])
        own.reach(len(self._numbers))
        count = int((lines[:, Column.LATE] == 0).sum())
        _, first = np.unique(number[:count], return_index=True)
        fresh = first[(number[first] >= 0) & (own.line[number[first]] == UNKNOWN)]
        late = count + np.flatnonzero(number[count:] >= 0)
        own.repeated += count - len(fresh)
        own.late = np.hstack([own.late, [number[late], own.starts[-1] + late]])
        at, rows = number[fresh], lines[fresh, Column.ROWS]
        own.line[at] = own.starts[-1] + fresh
        sums = self._sums
        sums["ranks"][at] += 1
        sums["rows"][at] += rows
        sums["fullest"][at] = np.maximum(sums["fullest"][at], rows)
        if rank == 0:
            sums["routed"][at], sums["peak"][at], sums["replicas"][at] = lines[
                fresh, Column.ROUTED : Column.REPLICAS + 1
            ].T
        counted = np.concatenate([fresh, late])
        np.add.at(sums["bytes"], number[counted], lines[counted, Column.BYTES])
        for seconds, nanoseconds in zip(own.seconds, lines[counted, TIMES].T, strict=True):
            np.add.at(seconds, number[counted], (nanoseconds / NANOSECONDS).astype(np.float32))
        own.stage_sums += np.clip(np.nan_to_num(arrays["stage_sums"]), 0, MOST_SECONDS)
        own.dropped = int(arrays["dropped"][0])
        own.starts.append(own.starts[-1] + len(lines))

    def _numbered(self, keys_T3: IntArray) -> IntArray:
        """[T] the number of the record with each key; UNKNOWN if there are too many records."""
        numbers = self._numbers
        if len(keys_T3):  # ranks usually record in the same order
            step, layer, microbatch = keys_T3[0].tolist()
            begin = numbers.get((step, layer, microbatch), UNKNOWN)
            same = self._keys_N3[: len(numbers)][begin : begin + len(keys_T3)]
            if begin >= 0 and np.array_equal(same, keys_T3):
                return np.arange(begin, begin + len(keys_T3))
        keys = [(step, layer, microbatch) for step, layer, microbatch in keys_T3.tolist()]
        if len(numbers) + len(keys) <= self._most:
            number_T = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
        else:
            number_T = np.array([numbers.get(key, UNKNOWN) for key in keys], np.int64)
            if (number_T == UNKNOWN).any():
                self.note(f"more than {self._most:,} records: the rest is not shown")
        if (more := len(numbers) - len(self._keys_N3)) > 0:
            more = max(more, len(self._keys_N3))
            self._keys_N3 = np.pad(self._keys_N3, ((0, more), (0, 0)))
            self._sums = {name: np.pad(sums, (0, more)) for name, sums in self._sums.items()}
        known = number_T >= 0
        self._keys_N3[number_T[known]] = keys_T3[known]
        return number_T

    def _publish(self) -> None:
        self.record.cache_clear()
        self.table = self._table()
        self.version += 1

    def _table(self) -> Table:
        """Return the records that all ranks have; those of rank 0 until all ranks were read."""
        ranks, sums, count = self.header.ranks, self._sums, len(self._numbers)
        for own in self.ranks:
            own.reach(count)
        recorded = self.ranks[0].line[:count]
        shown = sums["ranks"][:count] == ranks if self.complete else recorded >= 0
        keep = np.flatnonzero(shown)
        keep = keep[np.argsort(recorded[keep], kind="stable")]
        slowest, total = np.zeros((3, len(keep))), np.zeros(len(keep))
        for own in self.ranks:
            seconds = own.seconds[:, keep]
            np.maximum(slowest, seconds, out=slowest)
            total += seconds[0] + seconds[1]
        experts, mean = slowest[0] + slowest[1], total / ranks
        before = _ratio(sums["peak"][keep], sums["routed"][keep], ranks)
        replicas = sums["replicas"][keep].astype(np.float64)
        saved = np.where(replicas > 0, mean * before - experts, 0.0)
        known = 1.0 if self.complete else np.nan
        timed = np.where(mean > 0, known, np.nan)
        stages = [own.stage_sums / max(1, int((own.line >= 0).sum())) for own in self.ranks]
        return Table(
            **dict(zip(KEY, self._keys_N3[keep].T, strict=True)),
            before=before,
            after=_ratio(sums["fullest"][keep], sums["rows"][keep], ranks) * known,
            copies=replicas,
            bytes=sums["bytes"][keep].astype(np.float64) * known,
            lost=(experts - mean) * timed,
            saved=saved * timed,
            cost=slowest[2] * timed,
            stages=np.max(stages, axis=0),
        )


def _ratio(fullest: IntArray, rows: IntArray, ranks: int) -> NDArray[np.float64]:
    """[N] fullest rank over mean rank; 1.0 where there is no row."""
    ratio: NDArray[np.float64] = fullest.astype(np.float64) * ranks / np.maximum(rows, 1)
    return np.where(rows > 0, ratio, 1.0)


class FileTrace(OpenTrace):
    """A trace in one file, as `ultraep trace export --npz` writes it, read at once."""

    def __init__(self, path: Path) -> None:
        self.trace = read_trace(path)
        super().__init__(path, self.trace.header)
        for rank in range(self.header.ranks):
            self._add(rank, self._summary(rank))
        self.ranks[0].dropped += self.trace.dropped
        self.ranks[0].repeated += self.trace.left_out
        self.complete = self.finished = True
        self.done = self.total = 1
        self._publish()

    def read(self, stop: Callable[[], bool]) -> None:
        """Nothing is left to read."""

    def _summary(self, rank: int) -> Arrays:
        """Return the summary of what one rank has recorded."""
        arrays, slots = self.trace.arrays, self.header.topology.first_slot_of_rank
        none = {"N": 0, "C": 0, "M": 0} | self.header.sizes(rank)
        own = {name: f.filled(none, f.shape) for name, f in fields_in_pieces(rank).items()}
        own |= {name: arrays[name] for name in own.keys() & arrays.keys() if name != "dropped"}
        own |= {name: arrays[name][:, rank] for name in ("bytes_moved", "seconds")}
        own["slot_rows"] = arrays["slot_rows"][:, slots[rank] : slots[rank + 1]]
        return summary_of(self.header, own) | {"dropped": own["dropped"]}

    def _record(self, key: Key, _names: tuple[str, ...]) -> Trace:
        return self.trace.take(np.array([self.ranks[0].line[self.number_of(key)]]))


class FolderTrace(OpenTrace):
    """A trace in a folder, perhaps still being written."""

    def __init__(self, folder: Path, *, live: bool = False) -> None:
        super().__init__(folder, read_header(folder))
        self.live = live
        self._plans = lru_cache(CACHED_PLANS)(self._read_plans)
        self._layout = lru_cache(CACHED_LAYOUTS)(self._read_layout)
        for path in sorted(folder.iterdir()):
            match = RANK_FOLDER.fullmatch(path.name)
            if match and int(match[1]) >= self.header.ranks:
                self.note(f"{path}: a rank too many, the trace is one of {self.header.ranks}")

    def path_of(self, rank: int, piece: int) -> Path:
        """Return the path of a piece."""
        return self.path / rank_folder(rank) / piece_file(piece)

    # -- the table ------------------------------------------------------------------------------

    def read(self, stop: Callable[[], bool]) -> None:
        """Read all pieces that are new; return early when `stop` says so."""
        pieces = [self._new_pieces(rank) for rank in range(self.header.ranks)]
        self.total += sum(map(len, pieces))
        if any(pieces) or not self.complete:
            self.finished = False
            for rank, numbers in enumerate(pieces):
                self._read_rank(rank, numbers, stop)
                if stop():
                    return
            self.complete = True
            self._publish()
        self.finished = True

    def _new_pieces(self, rank: int) -> range:
        """Return the numbers of pieces that were not read, up to the first that is missing."""
        folder, known = self.path / rank_folder(rank), len(self.ranks[rank].starts) - 1
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

    def _read_rank(self, rank: int, pieces: range, stop: Callable[[], bool]) -> None:
        early, published = rank == 0 and not self.complete, time.monotonic()
        for piece in pieces:
            if stop():
                return
            self._add(rank, self._summary(rank, piece))
            self.done += 1
            if early and time.monotonic() > published + PUBLISH_SECONDS:
                self._publish()
                published = time.monotonic()
        if early:
            self._publish()

    def _summary(self, rank: int, piece: int) -> Arrays:
        """Return the summary of a piece; an empty one, with a note, if the piece is damaged."""
        path = self.path_of(rank, piece)
        try:
            arrays = read_piece(path, self.header, rank, SUMMARY)
            if len(arrays) < len(SUMMARY):  # before version 4
                arrays |= summary_of(self.header, read_piece(path, self.header, rank))
            late = arrays["summary"][:, Column.LATE]
            if (np.diff(late, prepend=0, append=1) < 0).any():
                raise FileError(f"{path}: the summary has records behind additions")
        except FileError as error:
            self.note(str(error))
            nothing = np.zeros((0, len(Column)), dtype=np.int64)
            dropped = np.array([self.ranks[rank].dropped])
            return {"summary": nothing, "stage_sums": np.zeros(1), "dropped": dropped}
        return arrays

    # -- one record -----------------------------------------------------------------------------

    def _record(self, key: Key, names: tuple[str, ...]) -> Trace:
        number, fields = self.number_of(key), fields_in_file()
        arrays = self._planned(number) if "loads" in names else {}
        of_ranks = {name: fields[name] for name in names if fields[name].join in ("ranks", "slots")}
        if of_ranks:
            ranks = [self._rows(rank, number, of_ranks) for rank in range(self.header.ranks)]
            row = [np.zeros(1, dtype=np.int64)] * len(ranks)
            with np.errstate(invalid="ignore"):  # a file may hold anything
                for name, field in of_ranks.items():
                    additions = [len(rank[field.late]) if field.late else 0 for rank in ranks]
                    places = [np.zeros(count, dtype=np.int64) for count in additions]
                    arrays[name] = side_by_side(field, ranks, row, places)
        return Trace(self.header, arrays)

    def _planned(self, number: int) -> Arrays:
        """Return the arrays that only rank 0 stores, with one record."""
        own = self.ranks[0]
        line = int(own.line[number])
        piece = own.piece_of(line)
        planned, row = self._plans(piece), line - own.starts[piece]
        if row >= len(planned["loads"]):
            path = self.path_of(0, piece)
            raise FileError(f"{path}: row {row} of {len(planned['loads'])} in the summary")
        return taken(planned, np.array([row]))

    def _read_plans(self, piece: int) -> Arrays:
        return read_piece(self.path_of(0, piece), self.header, 0, PLANNED)

    def _rows(self, rank: int, number: int, of_ranks: Mapping[str, Field]) -> Arrays:
        """Return arrays of one rank with one record: its row, and the rows of its additions."""
        own, sizes = self.ranks[rank], self.header.sizes(rank)
        fields = {n: f for n, f in fields_in_pieces(rank).items() if f.name in of_ranks}
        rows: dict[str, list[Array]] = {name: [] for name in fields}
        first = int(own.line[number])
        late_number, late_line = own.late
        for line in (first, *late_line[late_number == number][:MOST_ADDITIONS].tolist()):
            piece = own.piece_of(line)
            path, stored, more_lines = self._layout(rank, piece)
            row = line - own.starts[piece]
            additions = np.flatnonzero(more_lines == row)[:MOST_ADDITIONS].tolist()
            with reading(path), opened(path) as file:
                for name, field in fields.items():
                    wanted = additions if field.shape[0] == "M" else [row] if line == first else []
                    if name in stored:
                        rows[name] += [stored[name].row(file, at) for at in wanted]
                    else:
                        rows[name] += [field.filled(sizes, field.shape[1:])] * len(wanted)
                arrays = {name: np.array(values) for name, values in rows.items() if values}
        nothing = sizes | {"N": 0, "M": 0}
        for name, field in fields.items():
            if not rows[name]:
                arrays[name] = field.filled(nothing, field.shape)
        return checked_arrays(arrays, fields, sizes, path)

    def _read_layout(self, rank: int, piece: int) -> tuple[Path, dict[str, ArrayRows], Array]:
        """Return the path of a piece, its rows, and [M] the line of each of its additions."""
        path, fields = self.path_of(rank, piece), fields_in_pieces(rank)
        with open_piece(path, rank) as archive:
            stored = archive.rows([n for n, f in fields.items() if f.join in ("ranks", "slots")])
            keys = ("more_lines",) if "more_lines" in archive.members else (*KEY, "more")
        arrays = read_piece(path, self.header, rank, keys)
        lines = arrays["more_lines"] if "more_lines" in arrays else lines_of_additions(arrays)[1]
        return path, stored, lines
