"""Arrays of the pieces of a trace: read when wanted, checked, and the last ones kept; single rows.

A piece appears whole and never changes, so what was read once stays right.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock

import numpy as np

from ultraep.inputs import archive_of
from ultraep.trace.files import Budget, read_piece
from ultraep.trace.schema import Arrays, Header, checked_arrays, fields_in_pieces

MEMORY = 64 << 20  # bytes of arrays that are kept
TIMES = {"seconds", "waited", "more_seconds", "more_waited"}
UNKNOWN = -1  # in place of the place of a record


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


def read_rows(
    path: Path, header: Header, rank: int, wanted: Sequence[Mapping[str, int]]
) -> list[Arrays]:
    """Return single rows of arrays of a piece, by name, without unpacking what is behind them."""
    names = {name for rows in wanted for name in rows}
    fields = {name: one for name, one in fields_in_pieces(rank).items() if name in names}
    sizes = header.sizes(rank)
    with archive_of(path) as archive:
        Budget([path]).claim(archive, names)
        places = archive.places(names)
        claimed = {
            name: np.broadcast_to(one.dtype.type(), one.shape) for name, one in places.items()
        }
        checked_arrays(claimed, fields, sizes, path)
        absent = {
            name: one.filled(sizes, one.shape[1:])
            for name, one in fields.items()
            if name not in places
        }
        return [
            finite(
                {
                    name: places[name].row(archive.file, row) if name in places else absent[name]
                    for name, row in rows.items()
                }
            )
            for rows in wanted
        ]


def finite(arrays: Arrays) -> Arrays:
    """The arrays, with 0 in place of seconds that are no number: nothing can be drawn of them."""
    for name in TIMES & arrays.keys():
        known = np.isfinite(arrays[name])
        if not known.all():
            arrays[name] = np.where(known, arrays[name], 0)
    return arrays
