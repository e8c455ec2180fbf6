"""Arrays of the pieces of a trace: read when wanted, checked, and the last ones kept; single rows.

A piece appears whole and never changes, so what was read once stays right.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import IO

import numpy as np

from ultraep.inputs import Archive, ArrayPlace, archive_of, opened, reading
from ultraep.trace.schema import Array, Arrays, Header, checked_arrays, fields_in_pieces

MEMORY = 64 << 20  # bytes of arrays that are kept
MOST_PIECE = 512 << 20  # bytes; recorders write some 4 MiB at a time
TIMES = {"seconds", "waited", "more_seconds", "more_waited"}
TOLD = TIMES | {"slot_rows", "bytes_moved", "more_bytes", "began", "more_began"}  # by every rank


class Store:
    """What was read of pieces, up to some memory; any thread may ask."""

    def __init__(self, memory: int = MEMORY) -> None:
        self._memory, self._held = memory, 0
        self._arrays: OrderedDict[tuple[Path, tuple[str, ...]], Arrays] = OrderedDict()
        self._lock = Lock()

    def arrays(self, path: Path, header: Header, rank: int, names: tuple[str, ...]) -> Arrays:
        """These arrays of a piece; `FileError` if it is damaged."""
        key = path, names
        with self._lock:
            if key in self._arrays:
                self._arrays.move_to_end(key)
                return self._arrays[key]
        found = piece_arrays(path, header, rank, names)
        size = sum(array.nbytes for array in found.values())
        with self._lock:
            if key not in self._arrays and size <= self._memory // 2:
                self._arrays[key] = found
                self._held += size
                while self._held > self._memory:
                    _, old = self._arrays.popitem(last=False)
                    self._held -= sum(array.nbytes for array in old.values())
        return found


def piece_arrays(path: Path, header: Header, rank: int, names: Iterable[str]) -> Arrays:
    """Only these arrays of a piece, with the types and shapes that the schema wants."""
    with archive_of(path) as archive:
        return _checked(archive, header, rank, names)


def _checked(archive: Archive, header: Header, rank: int, names: Iterable[str]) -> Arrays:
    known = fields_in_pieces(rank)
    wanted = {name: known[name] for name in names}
    arrays = archive.arrays(wanted, most=MOST_PIECE)
    return finite(checked_arrays(arrays, wanted, header.sizes(rank), archive.path))


class Rows:
    """Single records of the pieces of one trace, read without those behind them."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._places: dict[Path, dict[str, ArrayPlace | Array]] = {}

    def learn(self, path: Path, rank: int, names: Iterable[str]) -> Arrays:
        """These arrays of a piece; from now on it is known where those of `TOLD` lie."""
        with archive_of(path) as archive:
            found = _checked(archive, self._header, rank, names)
            self._places[path] = self._found(archive, rank)
        return found

    def told(self, path: Path, wanted: Iterable[Mapping[str, int]]) -> list[Arrays]:
        """Rows of arrays of a piece, by name and number; `FileError` if it is damaged."""
        places = self._places[path]
        with reading(path), opened(path) as file:
            return [
                finite({name: _row(file, places[name], row) for name, row in one.items()})
                for one in wanted
            ]

    def _found(self, archive: Archive, rank: int) -> dict[str, ArrayPlace | Array]:
        """Where the arrays lie; of those that a record need not have, the default."""
        wanted = {name: one for name, one in fields_in_pieces(rank).items() if name in TOLD}
        sizes, places = self._header.sizes(rank), archive.places(wanted)
        claimed = {
            name: np.broadcast_to(one.dtype.type(), one.shape) for name, one in places.items()
        }
        checked_arrays(claimed, wanted, sizes, archive.path)
        lacking = wanted.keys() - places.keys()
        defaults = {name: wanted[name].filled(sizes, wanted[name].shape[1:]) for name in lacking}
        return defaults | places


def _row(file: IO[bytes], place: ArrayPlace | Array, number: int) -> Array:
    return place.row(file, number) if isinstance(place, ArrayPlace) else place


def finite(arrays: Arrays) -> Arrays:
    """The arrays, with 0 in place of seconds that are no number: nothing can be drawn of them."""
    for name in TIMES & arrays.keys():
        known = np.isfinite(arrays[name])
        if not known.all():
            arrays[name] = np.where(known, arrays[name], 0)
    return arrays
