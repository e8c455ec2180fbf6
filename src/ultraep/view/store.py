"""Arrays of the pieces of a trace: read when wanted, checked, and the last ones kept.

A piece appears whole and never changes, so what was read once stays right.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from threading import Lock

import numpy as np

from ultraep.inputs import read_arrays
from ultraep.trace.schema import Arrays, Header, checked_arrays, fields_in_pieces

MEMORY = 128 << 20  # bytes of arrays that are kept
MOST_PIECE = 512 << 20  # bytes; recorders write some 4 MiB at a time
TIMES = {"seconds", "waited", "more_seconds", "more_waited"}


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
    known = fields_in_pieces(rank)
    wanted = {name: known[name] for name in names}
    arrays = read_arrays(path, wanted, most=MOST_PIECE)
    return finite(checked_arrays(arrays, wanted, header.sizes(rank), path))


def finite(arrays: Arrays) -> Arrays:
    """The arrays, with 0 in place of seconds that are no number: nothing can be drawn of them."""
    for name in TIMES & arrays.keys():
        known = np.isfinite(arrays[name])
        if not known.all():
            arrays[name] = np.where(known, arrays[name], 0)
    return arrays
