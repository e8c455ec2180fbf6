"""Arrays of the pieces of a trace, read when a record is opened; a cache of the last ones.

A piece appears whole and never changes, so what was read once stays right.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import IO, NamedTuple

import numpy as np

from ultraep.files.reading import ArrayPlace, archive_of, opened, reading
from ultraep.trace.files import check_claims, claimed_bytes, read_piece
from ultraep.trace.schema import (
    KEY,
    SUMMARIES,
    Array,
    Arrays,
    Header,
    checked_arrays,
    fields_in_pieces,
)
from ultraep.trace.summary import lines_of_additions

MEMORY = 64 << 20  # bytes of arrays that are kept
MOST_ADDITIONS = 1000  # to one line
MOST_PIECES = 4096  # pieces of which is known where their arrays lie
TIMES = {"seconds", "waited", "more_seconds", "more_waited"}
ROWS = TIMES | {"slot_rows", "bytes_moved", "more_bytes", "began", "more_began"}
UNKNOWN = -1  # in place of the place of a record


class OpenPiece(NamedTuple):
    """Where the arrays of a piece lie, or a row of defaults of one that it does not hold."""

    places: Mapping[str, ArrayPlace | Array]
    more_lines: Array  # [M] line of the summary that holds each addition


class Store:
    """What was read of pieces, up to some memory; any thread may ask."""

    def __init__(self, memory: int = MEMORY) -> None:
        self._memory, self._held = memory, 0
        self._arrays: OrderedDict[tuple[Path, tuple[str, ...]], Arrays] = OrderedDict()
        self._pieces: dict[Path, OpenPiece] = {}
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
        lines = self._piece(path, header, rank).more_lines
        found: list[int] = np.flatnonzero(lines == line)[:MOST_ADDITIONS].tolist()
        return found

    def rows(
        self, path: Path, header: Header, rank: int, wanted: Sequence[Mapping[str, int]]
    ) -> list[Arrays]:
        """Return single rows of arrays of a piece, without unpacking what is behind them."""
        places = self._piece(path, header, rank).places
        with reading(path), opened(path) as file:
            return [
                finite({name: _row(file, places[name], row) for name, row in rows.items()})
                for rows in wanted
            ]

    def _piece(self, path: Path, header: Header, rank: int) -> OpenPiece:
        found = self._pieces.get(path)
        if found is None:
            if len(self._pieces) >= MOST_PIECES:
                self._pieces.clear()
            found = self._pieces[path] = _open_piece(path, header, rank)
        return found


def _open_piece(path: Path, header: Header, rank: int) -> OpenPiece:
    known, sizes = fields_in_pieces(rank) | SUMMARIES, header.sizes(rank)
    fields = {name: known[name] for name in ROWS}
    with archive_of(path) as archive:
        stored = ("more_lines",) if "more_lines" in archive.members else (*KEY, "more")
        claimed = claimed_bytes(archive, (*fields, *stored))
        check_claims(path, claimed, path.stat().st_size)
        places, arrays = archive.places(fields), archive.arrays(stored, most=claimed)
    found = {name: np.broadcast_to(one.dtype.type(), one.shape) for name, one in places.items()}
    checked_arrays(found | arrays, fields | {name: known[name] for name in stored}, sizes, path)
    absent = {name: fields[name] for name in fields.keys() - places.keys()}
    defaults = {name: one.filled(sizes, one.shape[1:]) for name, one in absent.items()}
    lines = arrays["more_lines"] if "more_lines" in arrays else lines_of_additions(arrays)[1]
    return OpenPiece({**places, **defaults}, lines)


def _row(file: IO[bytes], place: ArrayPlace | Array, number: int) -> Array:
    return place.row(file, number) if isinstance(place, ArrayPlace) else place


def finite(arrays: Arrays) -> Arrays:
    """The arrays, with 0 in place of seconds that are no number: nothing can be drawn of them."""
    for name in TIMES & arrays.keys():
        known = np.isfinite(arrays[name])
        if not known.all():
            arrays[name] = np.where(known, arrays[name], 0)
    return arrays
