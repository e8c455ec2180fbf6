"""Arrays of the pieces of a trace, read when a record is opened; a cache of the last ones.

A piece appears whole and never changes, so what was read once stays right.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import IO

import numpy as np

from ultraep.inputs import ArrayPlace, archive_of, opened, reading
from ultraep.trace.files import check_claims, claimed_bytes, read_piece
from ultraep.trace.schema import KEY, Array, Arrays, Header, checked_arrays, fields_in_pieces
from ultraep.trace.summary import lines_of_additions

MEMORY = 64 << 20  # bytes of arrays that are kept
MOST_ADDITIONS = 1000  # to one line
MOST_PLACES = 8192  # pieces of which is known where their arrays lie
TIMES = {"seconds", "waited", "more_seconds", "more_waited"}
ROWS = TIMES | {"slot_rows", "bytes_moved", "more_bytes", "began", "more_began"}
UNKNOWN = -1  # in place of the place of a record


class Store:
    """What was read of pieces, up to some memory; any thread may ask."""

    def __init__(self, memory: int = MEMORY) -> None:
        self._memory, self._held = memory, 0
        self._arrays: OrderedDict[tuple[Path, tuple[str, ...]], Arrays] = OrderedDict()
        self._places: dict[Path, Mapping[str, ArrayPlace | Array]] = {}
        self._lock = Lock()

    def arrays(self, path: Path, header: Header, rank: int, names: tuple[str, ...]) -> Arrays:
        """These arrays of a piece; `FileError` if it is damaged."""
        key = path, names
        with self._lock:
            if key in self._arrays:
                self._arrays.move_to_end(key)
                return self._arrays[key]
        found = finite(read_piece(path, header, rank, names))
        size = sum(array.nbytes for array in found.values())
        with self._lock:
            if key not in self._arrays and size <= self._memory // 2:
                self._arrays[key] = found
                self._held += size
                while self._held > self._memory:
                    _, old = self._arrays.popitem(last=False)
                    self._held -= sum(array.nbytes for array in old.values())
        return found

    def additions(self, path: Path, header: Header, rank: int, line: int) -> list[int]:
        """Return the rows of the additions that are part of a line of the summary."""
        lines = self.arrays(path, header, rank, ("more_lines",)).get("more_lines")
        if lines is None:  # before version 4
            keys = self.arrays(path, header, rank, (*KEY, "more"))
            lines = lines_of_additions(keys)[1]
        found: list[int] = np.flatnonzero(lines == line)[:MOST_ADDITIONS].tolist()
        return found

    def rows(
        self, path: Path, header: Header, rank: int, wanted: Sequence[Mapping[str, int]]
    ) -> list[Arrays]:
        """Return single rows of arrays of a piece, without unpacking what is behind them."""
        places = self._places.get(path)
        if places is None:
            if len(self._places) >= MOST_PLACES:
                self._places.clear()
            places = self._places[path] = _places(path, header, rank)
        with reading(path), opened(path) as file:
            return [
                finite({name: _row(file, places[name], row) for name, row in rows.items()})
                for rows in wanted
            ]


def _places(path: Path, header: Header, rank: int) -> Mapping[str, ArrayPlace | Array]:
    """Where the arrays of a piece lie; for an optional array that is absent, a row of defaults."""
    fields = {name: one for name, one in fields_in_pieces(rank).items() if name in ROWS}
    sizes = header.sizes(rank)
    with archive_of(path) as archive:
        check_claims(path, claimed_bytes(archive, fields), path.stat().st_size)
        found = archive.places(fields)
    claimed = {name: np.broadcast_to(one.dtype.type(), one.shape) for name, one in found.items()}
    checked_arrays(claimed, fields, sizes, path)
    absent = {name: fields[name] for name in fields.keys() - found.keys()}
    return found | {name: one.filled(sizes, one.shape[1:]) for name, one in absent.items()}


def _row(file: IO[bytes], place: ArrayPlace | Array, number: int) -> Array:
    return place.row(file, number) if isinstance(place, ArrayPlace) else place


def finite(arrays: Arrays) -> Arrays:
    """The arrays, with 0 in place of seconds that are no number: nothing can be drawn of them."""
    for name in TIMES & arrays.keys():
        known = np.isfinite(arrays[name])
        if not known.all():
            arrays[name] = np.where(known, arrays[name], 0)
    return arrays
