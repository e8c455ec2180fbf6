"""Columns: what is known of every record of a trace, some numbers each, filled piece by piece.

Ranks write the same records, usually in the same order. A record counts when all ranks have it.
Of what ranks tell for themselves only sums, largest and least values are kept, so memory grows
with the records and not with ranks times stages.

Shapes: N records, n of a piece, m additions of a piece, R ranks, G stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.trace.schema import KEY, Array, Arrays, Header, of_backward

EXPERTS = ("experts", "experts back")  # stages in which a rank computes and waits for nobody
COST = ("plan", "verify", "replicate", "weights again", "reduce")  # stages that balancing adds
MOST_RECORDS = 2_000_000
MOST_MOVED = 1 << 25  # numbers, of records times ranks
ROOM = 1024  # records, to begin with
UNKNOWN, REPEATED = -1, -2  # in place of a place
Places = range | IntArray


class Columns:
    """The records of one trace, in the order of rank 0; grows."""

    def __init__(self, header: Header) -> None:
        stages = len(header.stages)
        self.header, self.count = header, 0
        self._own_G, self._back_G = np.isin(header.stages, EXPERTS), of_backward(header.stages)
        self._kinds: dict[str, tuple[Any, tuple[int, ...], Any]] = {
            **dict.fromkeys(KEY, (np.int64, (), 0)),
            "piece": (np.int32, (), 0),  # of rank 0
            "row": (np.int32, (), 0),  # in it
            "before": (np.float64, (), np.nan),
            "copies": (np.int32, (), 0),
            "fullest": (np.int64, (), 0),  # rows of the fullest rank
            "rows": (np.int64, (), 0),  # of all ranks
            "bytes": (np.int64, (), 0),
            "ranks": (np.int32, (), 0),  # that have told of it
            "work": (np.float64, (), 0),  # seconds of the experts' stages, all ranks
            "slowest": (np.float32, (stages,), 0),
            "mixed": (np.bool_, (), False),  # stages of forward told late, or of backward at once
        }
        self._arrays = {name: self._empty(name, ROOM) for name in self._kinds}
        self._places: dict[int, int] = {}  # by key
        self._moves: Moves | None = None
        self.repeated = 0

    def __getitem__(self, name: str) -> Array:
        """A column, as far as there are records."""
        return self._arrays[name][: self.count]

    def _empty(self, name: str, size: int) -> Array:
        kind, shape, default = self._kinds[name]
        return np.full((size, *shape), default, dtype=kind)

    def _grow(self, wanted: int) -> None:
        room = len(self._arrays["step"])
        if wanted > room:
            size = max(wanted, 2 * room)
            for name, old in self._arrays.items():
                new = self._empty(name, size)
                new[:room] = old
                self._arrays[name] = new  # whole, for those who look meanwhile
            if self._moves is not None:
                self._moves = self._moves.grown(size)

    # -- records --------------------------------------------------------------------------------

    def append(self, piece: int, arrays: Arrays) -> Places:
        """New records, from a piece of rank 0; where they stand. A key that is known is not new."""
        numbers = _numbers(arrays)
        fresh = [row for row, number in enumerate(numbers) if number not in self._places]
        if len(set(numbers)) < len(numbers):  # within one piece the first one counts
            first = {number: row for row, number in reversed(list(enumerate(numbers)))}
            fresh = [row for row in fresh if first[numbers[row]] == row]
        fresh = fresh[: MOST_RECORDS - self.count]
        self.repeated += len(numbers) - len(fresh)
        begin, end = self.count, self.count + len(fresh)
        self._grow(end)
        for name in KEY:
            self._arrays[name][begin:end] = arrays[name][fresh]
        self._arrays["piece"][begin:end] = piece
        self._arrays["row"][begin:end] = fresh
        self._places |= zip((numbers[row] for row in fresh), range(begin, end), strict=True)
        self.count = end
        if len(fresh) == len(numbers):
            return range(begin, end)
        places = np.full(len(numbers), REPEATED)
        places[fresh] = np.arange(begin, end)
        return places

    def places(self, keys: Arrays, guess: int) -> Places:
        """Where these records stand; UNKNOWN: nowhere. guess: of the first, where it is likely."""
        count = len(keys["step"])
        if guess + count <= self.count and all(
            np.array_equal(self._arrays[name][guess : guess + count], keys[name]) for name in KEY
        ):
            return range(guess, guess + count)
        return np.array([self._places.get(number, UNKNOWN) for number in _numbers(keys)], dtype=int)

    def place(self, step: int, layer: int, microbatch: int) -> int:
        """Where one record stands, or UNKNOWN."""
        return self._places.get(_number(step, layer, microbatch), UNKNOWN)

    # -- what is told of them -------------------------------------------------------------------

    def add(self, rank: int, places: Places, told: Arrays, times: RankTimes) -> None:
        """What a rank tells of records, each of them once. times: of this rank."""
        at, rows = _kept(places)
        of_rank = told["slot_rows"][rows].sum(axis=1, dtype=np.int64)
        seconds, columns = told["seconds"][rows], self._arrays
        if self._moves is not None:
            self._moves.add(rank, at, of_rank)
        columns["fullest"][at] = np.maximum(columns["fullest"][at], of_rank)
        columns["rows"][at] += of_rank
        columns["bytes"][at] += told["bytes_moved"][rows]
        columns["ranks"][at] += 1
        columns["work"][at] += seconds[:, self._own_G].sum(axis=1, dtype=np.float64)
        columns["mixed"][at] |= seconds[:, self._back_G].any(axis=1)
        times.add(at, seconds, columns["slowest"])

    def add_late(self, places: Places, told: Arrays, times: RankTimes) -> None:
        """What a rank adds to records later; to one of them perhaps several times."""
        at, rows = _kept(places)
        seconds, columns = told["more_seconds"][rows], self._arrays
        work = seconds[:, self._own_G].sum(axis=1, dtype=np.float64)
        mixed = seconds[:, ~self._back_G].any(axis=1)
        times.add(at, seconds, columns["slowest"])
        if isinstance(at, slice):  # each of them once
            columns["bytes"][at] += told["more_bytes"][rows]
            columns["work"][at] += work
            columns["mixed"][at] |= mixed
            return
        np.add.at(columns["bytes"], at, told["more_bytes"][rows])
        np.add.at(columns["work"], at, work)
        columns["mixed"][at[mixed]] = True

    def settle(self, times: RankTimes, keep: int) -> None:
        """What a rank has told by now counts; of the last records it may tell more."""
        times.settle(self._arrays["slowest"], keep)

    def set_before(self, places: Places, before_n: NDArray[np.float64]) -> None:
        """Imbalance as routed."""
        at, rows = _kept(places)
        self._arrays["before"][at] = before_n[rows]

    def set_copies(self, places: Places, copies_n: IntArray) -> None:
        """How many copies were made."""
        at, rows = _kept(places)
        self._arrays["copies"][at] = copies_n[rows]

    # -- what was routed ------------------------------------------------------------------------

    def derive(self) -> None:
        """Find the imbalance as routed from rows that arrive; before anything is told."""
        self._moves = Moves.of(len(self._arrays["step"]), self.header.ranks)

    def set_moved(self, places: Places, moved_nR: IntArray) -> None:
        """Rows that every rank has fewer by copies."""
        if self._moves is not None:
            at, rows = _kept(places)
            self._moves.moved[at] = moved_nR[rows]

    def derived(self) -> NDArray[np.float64]:
        """[N] the imbalance as routed, NaN where it is not known; what it needed is given up."""
        moves, self._moves = self._moves, None
        if moves is None:
            return np.full(self.count, np.nan)
        rows, fullest = self["rows"], moves.fullest[: self.count]
        found = np.where(rows > 0, fullest * self.header.ranks / np.maximum(rows, 1), 1.0)
        return np.where(self["ranks"] == self.header.ranks, found, np.nan)


class RankTimes:
    """Seconds of the stages of one rank, as long as more may be told of a record.

    A rank may add to a record several times; which rank is the slowest is known when it has told
    all. Of records far back, to which hardly anything is added, only the largest is kept.
    """

    def __init__(self, stages: int) -> None:
        self._first, self._sums = 0, np.zeros((0, stages), dtype=np.float32)

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, at: slice | IntArray, seconds_nG: Array, slowest: Array) -> None:
        """Seconds of records; `slowest`: [N, G] of all ranks."""
        if isinstance(at, slice) and at.start >= self._first:
            self._reach(at.stop)
            self._sums[at.start - self._first : at.stop - self._first] += seconds_nG
            return
        places = np.arange(at.start, at.stop) if isinstance(at, slice) else at
        self._reach(int(places.max(initial=-1)) + 1)
        late = places < self._first
        np.add.at(self._sums, places[~late] - self._first, seconds_nG[~late])
        np.maximum.at(slowest, places[late], seconds_nG[late])

    def _reach(self, end: int) -> None:
        if end - self._first > len(self._sums):
            more = end - self._first - len(self._sums)
            self._sums = np.pad(self._sums, ((0, more), (0, 0)))

    def settle(self, slowest: Array, keep: int) -> None:
        """Put what is known into `slowest`, and give up all but the last records."""
        known = slowest[self._first : self._first + len(self._sums)]
        np.maximum(known, self._sums, out=known)
        given_up = max(0, len(self._sums) - keep)
        self._first, self._sums = self._first + given_up, self._sums[given_up:].copy()


@dataclass(eq=False)
class Moves:
    """Rows of ranks without copies, as long as ranks are being read. N is the room for records."""

    moved: Array  # [N, R] rows that a rank has fewer by copies
    fullest: IntArray  # [N] of the fullest rank without copies, as far as was read

    @classmethod
    def of(cls, size: int, ranks: int) -> Moves | None:
        """None if that takes too much memory."""
        if size * ranks > MOST_MOVED:
            return None
        return cls(np.zeros((size, ranks), np.int32), np.zeros(size, np.int64))

    def grown(self, size: int) -> Moves | None:
        """These with more room, if that is not too much."""
        ranks = self.moved.shape[1]
        found, room = Moves.of(size, ranks), len(self.fullest)
        if found is not None:
            found.moved[:room], found.fullest[:room] = self.moved, self.fullest
        return found

    def add(self, rank: int, at: slice | IntArray, arrived: IntArray) -> None:
        """Rows that a rank has served of these records."""
        self.fullest[at] = np.maximum(self.fullest[at], arrived + self.moved[at, rank])


def _kept(places: Places) -> tuple[slice | IntArray, slice | IntArray]:
    """Places in the columns, and rows of the piece that belong there."""
    if isinstance(places, range):
        return slice(places.start, places.stop), slice(None)
    rows = np.flatnonzero(places >= 0)
    return places[rows], rows


def _numbers(keys: Arrays) -> list[int]:
    columns = (keys[name].tolist() for name in KEY)
    return [_number(*key) for key in zip(*columns, strict=True)]


def _number(step: int, layer: int, microbatch: int) -> int:
    """One number for a key: layers and microbatches lie below 2**31."""
    return (step << 62) | (layer << 31) | microbatch
