"""FolderIndex: reads a trace piece by piece into columns; also one that is still being written.

Loads are nearly all of a trace. So of a long one first a sample of the pieces of rank 0 is read,
evenly spread, for a view of the whole run within a second; then all that is small, of every rank,
which is enough (routed.py). Of a short one, of what is added to a run that is followed, and where
the sample shows that rows did not arrive as planned, the loads are read, evenly spread again. A
piece that cannot be read is told, and the rest is shown.

Shapes: n records of a piece, R ranks, E experts.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from ultraep.arrays import IntArray
from ultraep.errors import FileError
from ultraep.inputs import read_text
from ultraep.report.numbers import FloatArray
from ultraep.trace.read import RANK_FOLDER, Trace
from ultraep.trace.schema import (
    ENDS,
    HEADER_FILE,
    KEY,
    Arrays,
    Header,
    piece_file,
    rank_folder,
)
from ultraep.view.columns import MOST_RECORDS, REPEATED, UNKNOWN, Columns, Places, RankTimes
from ultraep.view.routed import moved_rows, summed
from ultraep.view.store import Rows, Store, piece_arrays
from ultraep.view.table import Table, table_of, table_of_sample

SMALL = (
    *(*KEY, "slot_rows", "bytes_moved", "seconds"),
    *("more", "more_bytes", "more_seconds", "dropped"),
)
OF_PLANS = (ENDS, "copies", "quotas")
SAMPLED = (*KEY, "loads", *OF_PLANS)
SAMPLE_SECONDS = 0.3
FEW_PIECES = 8  # of rank 0: read at once, without a sample before
MORE_TO_COME = 4096  # records, the last ones, to which a rank may add something
MOST_NOTES = 20
PIECE = re.compile(r"(\d{6})\.npz")
READERS = 2  # threads that read pieces; unpacking them does not need Python's lock
Stop = Callable[[], bool]
Job = TypeVar("Job")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Shelf:
    """A piece of a rank: which records stand in it, and to which something is added."""

    number: int
    places: Places
    late: Places


@dataclass
class RankState:
    """How far a rank was read. told: [N] whose records came in another order than rank 0's."""

    times: RankTimes
    pieces: int = 0
    upto: int = 0  # records of it so far, all in the order of rank 0
    late: int = 0  # where the next additions are likely
    told: IntArray | None = None
    dropped: int = 0
    foreign: int = 0  # records that rank 0 does not have
    shelves: list[Shelf] = field(default_factory=list)
    waiting: list[Shelf] = field(default_factory=list)  # pieces with records not yet known


class FolderIndex:
    """A trace in a folder, read in the background. One thread reads, any may look."""

    def __init__(self, folder: Path, store: Store, *, live: bool = False) -> None:
        file = folder / HEADER_FILE
        self.folder, self.store, self.live = folder, store, live
        self.header = Header.from_json(read_text(file), file)
        self.columns, self.rows = Columns(self.header), Rows(self.header)
        stages = len(self.header.stages)
        self.ranks = [RankState(times=RankTimes(stages)) for _ in range(self.header.ranks)]
        self.notes: list[str] = []
        self.version, self.done, self.total, self.finished = 0, 0, 0, False
        self._sample: Table | None = None
        self._sampled: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._table: tuple[int, Table] | None = None
        self._unread: list[tuple[Path, Places]] = []  # pieces of rank 0 whose loads are not known
        for path in sorted(folder.iterdir()):
            match = RANK_FOLDER.fullmatch(path.name)
            if match and int(match[1]) >= self.header.ranks:
                self._note(f"{path}: a rank too many, the trace is one of {self.header.ranks}")

    # -- looking --------------------------------------------------------------------------------

    @property
    def table(self) -> Table:
        """What is known now; a sample until all ranks were read once."""
        if self._sample is not None:
            return self._sample
        version = self.version
        if self._table is None or self._table[0] != version:
            self._table = version, table_of(self.columns)
        return self._table[1]

    @property
    def sampled(self) -> bool:
        """Whether only a part of the pieces was looked at so far."""
        return self._sample is not None

    @property
    def dropped(self) -> int:
        """Records and additions that ranks lost."""
        return sum(rank.dropped for rank in self.ranks)

    @property
    def left_out(self) -> int:
        """Records that not all ranks have, as far as was read."""
        if self._sample is not None:
            return 0
        lacking = int((self.columns["ranks"] < self.header.ranks).sum())
        return lacking + self.columns.repeated + max(rank.foreign for rank in self.ranks)

    def place(self, step: int, layer: int, microbatch: int) -> int:
        """Where a record that all ranks have stands, or UNKNOWN."""
        place = self.columns.place(step, layer, microbatch)
        whole = place >= 0 and self.columns["ranks"][place] == self.header.ranks
        return place if whole else UNKNOWN

    def planned(self, step: int, layer: int, microbatch: int) -> tuple[int, int] | None:
        """The piece of rank 0 with the plan of a record, and the row there."""
        place = self.columns.place(step, layer, microbatch)
        if place >= 0:
            return int(self.columns["piece"][place]), int(self.columns["row"][place])
        return self._sampled.get((step, layer, microbatch))

    # -- reading --------------------------------------------------------------------------------

    def look(self) -> None:
        """Read a sample, if all of it would take long."""
        numbers = self._new_pieces(0)
        if not self.version and len(numbers) > FEW_PIECES:
            self._read_sample(numbers)
            self.columns.derive()

    def read(self, stop: Stop) -> None:
        """Read all that is there and was not read; returns early when `stop` says so."""
        pieces = [self._new_pieces(rank) for rank in range(self.header.ranks)]
        self.total += sum(map(len, pieces))
        if not any(pieces) and not self._unread:
            self.finished = True
            return
        self.finished = False
        self.look()
        for rank, numbers in enumerate(pieces):
            for number, arrays in zip(
                numbers, ahead(partial(self._small, rank), numbers), strict=True
            ):
                if stop():
                    return
                self._take(rank, number, arrays)
            self._retry(rank)
            self.columns.settle(self.ranks[rank].times, MORE_TO_COME if self.live else 0)
        self._settle()
        self._read_loads(stop)
        self.finished = not stop()

    def _settle(self) -> None:
        """All ranks were read: no sample is shown any more. Which loads are still needed?"""
        sample, self._sample, self._sampled = self._sample, None, {}
        derived = self.columns.derived()
        if sample is not None and not np.isnan(derived).all():
            if self._agree(sample, derived):
                self.columns.set_before(range(len(derived)), derived)
                self._unread = [
                    one for one in self._unread if np.isnan(derived[_known(one[1])]).any()
                ]
            else:
                self._note("rows did not arrive as planned: all loads are read")
        self.total += len(self._unread)
        self.version += 1

    def _agree(self, sample: Table, derived: FloatArray) -> bool:
        """Whether records of the sample are as uneven by their loads as by what arrived."""
        places = np.asarray(self.columns.places(sample.keys, 0))
        found = np.where(places < 0, np.nan, derived[places])
        known = ~np.isnan(found)
        return bool(known.any() and (found[known] == sample.before[known]).all())

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
            self._note(f"{folder / beyond[0]}: not read, {piece_file(end)} before it is missing")
        return range(known, end)

    def path(self, rank: int, number: int) -> Path:
        """A piece of a rank."""
        return self.folder / rank_folder(rank) / piece_file(number)

    def _read_sample(self, numbers: range) -> None:
        until, found = time.monotonic() + SAMPLE_SECONDS, []
        for number in spread(numbers):
            path = self.path(0, number)
            try:
                arrays = piece_arrays(path, self.header, 0, SAMPLED)
            except FileError:
                continue  # told when it is read in its turn
            found.append((number, summed(self.header, arrays)))
            keys = zip(*(arrays[name].tolist() for name in KEY), strict=True)
            self._sampled |= {key: (number, row) for row, key in enumerate(keys)}
            if time.monotonic() > until:
                break
        self._sample = table_of_sample([part for _, part in sorted(found, key=lambda one: one[0])])
        self.version += 1

    def _small(self, rank: int, number: int) -> Arrays | FileError:
        """All of a piece but its loads."""
        names = (*SMALL, *(OF_PLANS if rank == 0 else ()))
        try:
            return self.rows.learn(self.path(rank, number), rank, names)
        except FileError as error:
            return error

    def _take(self, rank: int, number: int, arrays: Arrays | FileError) -> None:
        state = self.ranks[rank]
        state.pieces = number + 1
        self.done += 1
        if isinstance(arrays, FileError):
            self._note(str(arrays))
            return
        state.dropped = int(arrays["dropped"][0])
        places = self._places_of_rank(rank, number, arrays)
        self.columns.add(rank, places, arrays, state.times)
        late = self.columns.places(_late_keys(arrays), state.late)
        self.columns.add_late(late, arrays, state.times)
        if len(state.times) > 2 * MORE_TO_COME:
            self.columns.settle(state.times, MORE_TO_COME)
        if isinstance(late, range):
            state.late = late.stop
        shelf = Shelf(number, places, late)
        state.shelves.append(shelf)
        if _lacks(places) or _lacks(late):
            state.waiting.append(shelf)

    def _places_of_rank(self, rank: int, number: int, arrays: Arrays) -> Places:
        state = self.ranks[rank]
        if rank == 0:
            places = self.columns.append(number, arrays)
            self.columns.set_copies(places, np.diff(arrays[ENDS], prepend=0))
            self.columns.set_moved(places, moved_rows(self.header, arrays))
            self._unread.append((self.path(0, number), places))
            if self.columns.count >= MOST_RECORDS:
                self._note(f"more than {MOST_RECORDS:,} records: the rest is not shown")
            return places
        places = self.columns.places(arrays, state.upto)
        if isinstance(places, range) and places.start == state.upto and state.told is None:
            state.upto = places.stop
            return places
        return self._told_once(state, places)

    def _told_once(self, state: RankState, places: Places) -> IntArray:
        """Without records that the rank has told of already: the first one counts."""
        places, count = np.asarray(places), self.columns.count
        if not count:
            return places
        if state.told is None:
            state.told = (np.arange(count) < state.upto).astype(np.int8)
        state.told = np.pad(state.told, (0, count - len(state.told)))
        _, first = np.unique(places, return_index=True)
        fresh = np.zeros(len(places), dtype=bool)
        fresh[first] = True
        fresh &= (places >= 0) & (state.told[places] == 0)
        state.told[places[fresh]] = 1
        return np.where(fresh, places, np.where(places < 0, UNKNOWN, REPEATED))

    def _retry(self, rank: int) -> None:
        """Look again at pieces with records that rank 0 had not told of before."""
        state = self.ranks[rank]
        waiting, state.waiting, state.foreign = state.waiting, [], 0
        for shelf in waiting:
            path = self.path(rank, shelf.number)
            try:
                arrays = piece_arrays(path, self.header, rank, SMALL)
            except FileError as error:
                self._note(str(error))
                continue
            places = self._found_now(shelf.places, arrays)
            late = self._found_now(shelf.late, _late_keys(arrays))
            if rank:
                places = np.where(places >= 0, self._told_once(state, places), places)
                self.columns.add(rank, places, arrays, state.times)
            self.columns.add_late(late, arrays, state.times)
            whole = Shelf(shelf.number, _merged(shelf.places, places), _merged(shelf.late, late))
            state.shelves = [whole if one.number == shelf.number else one for one in state.shelves]
            if _lacks(whole.places) or _lacks(whole.late):
                state.waiting.append(whole)
            state.foreign += int((np.asarray(whole.places) == UNKNOWN).sum()) if rank else 0

    def _found_now(self, places: Places, keys: Arrays) -> IntArray:
        """Places of records that were unknown; REPEATED for those that were known."""
        again = np.asarray(self.columns.places(keys, 0))
        return np.where(np.asarray(places) == UNKNOWN, again, REPEATED)

    def _read_loads(self, stop: Stop) -> None:
        """Imbalance as routed, of pieces all over the run first."""
        unread = [self._unread[at] for at in spread(range(len(self._unread)))]
        for (_, places), before in zip(unread, ahead(self._before, unread), strict=True):
            if stop():
                return
            self.done += 1
            if isinstance(before, FileError):
                self._note(str(before))
                continue
            self.columns.set_before(places, before)
            self.version += 1
        self._unread = []

    def _before(self, piece: tuple[Path, Places]) -> FloatArray | FileError:
        try:
            arrays = piece_arrays(piece[0], self.header, 0, ("loads",))
        except FileError as error:
            return error
        return Trace(self.header, arrays).imbalance_before

    def _note(self, text: str) -> None:
        if text not in self.notes and len(self.notes) < MOST_NOTES:
            self.notes.append(text)


def ahead(work: Callable[[Job], Found], jobs: Iterable[Job]) -> Iterator[Found]:
    """What is found for each job, in their order; some are worked on before they are asked for."""
    with ThreadPoolExecutor(READERS, thread_name_prefix="ultraep view") as pool:
        begun: deque[Future[Found]] = deque()
        for job in jobs:
            begun.append(pool.submit(work, job))
            if len(begun) > 2 * READERS:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()


def spread(numbers: range) -> Iterator[int]:
    """These numbers, each once, so that the first ones are spread over all.

    >>> list(spread(range(6)))
    [0, 4, 2, 1, 5, 3]
    """
    bits = max(1, (len(numbers) - 1).bit_length())
    for at in range(1 << bits):
        turned = int(f"{at:0{bits}b}"[::-1], 2)
        if turned < len(numbers):
            yield numbers[turned]


def _late_keys(arrays: Arrays) -> Arrays:
    return dict(zip(KEY, arrays["more"].T, strict=True))


def _known(places: Places) -> IntArray:
    own = np.asarray(places)
    return own[own >= 0]


def _lacks(places: Places) -> bool:
    return not isinstance(places, range) and bool((places == UNKNOWN).any())


def _merged(places: Places, now: IntArray) -> IntArray:
    """Places of a piece, with those that are known now."""
    return np.where(now >= UNKNOWN, now, np.asarray(places))
