"""The files of a trace: its header, and arrays in .npz files without pickle.

A trace may come from anybody. What its files claim to hold is bounded before it is unpacked.
"""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import numpy as np

from ultraep.errors import FileError
from ultraep.inputs import Archive, archive_of, read_text
from ultraep.outputs import whole_file
from ultraep.trace.schema import (
    HEADER_FILE,
    SUMMARIES,
    Array,
    Arrays,
    Header,
    checked_arrays,
    fields_in_file,
    fields_in_pieces,
)

LEVEL = 1  # of compression: counts are mostly zero bytes, more effort hardly helps
MOST_HEADER = 4 << 20  # bytes of the text
SMALL, RATIO = 128 << 20, 100  # bytes that may always be unpacked; beyond, so many per byte on disk


class Budget:
    """Bytes that some files may unpack to, all together."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.left = max(SMALL, RATIO * sum(path.stat().st_size for path in paths))

    def claim(self, archive: Archive, names: Collection[str]) -> int:
        """Count what these arrays claim to take; `FileError` if that is more than is left."""
        size = sum(one.file_size for name, one in archive.members.items() if name in names)
        if size > self.left:
            raise FileError(
                f"{archive.path}: its arrays claim {size:,} bytes, at most {self.left:,} are "
                f"unpacked ({RATIO} for each byte on the disk)"
            )
        self.left -= size
        return size

    def arrays(self, archive: Archive, names: Collection[str]) -> Arrays:
        """Unpack those of these arrays that are there."""
        return archive.arrays(names, most=self.claim(archive, names))


def read_header(folder: Path) -> Header:
    """Return the header of the trace in a folder."""
    path = folder / HEADER_FILE
    try:
        size = path.stat().st_size
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from None
    if size > MOST_HEADER:
        raise FileError(f"{path}: {size:,} bytes, a trace's header has at most {MOST_HEADER:,}")
    return Header.from_json(read_text(path), path)


def read_piece(
    path: Path,
    header: Header,
    rank: int,
    names: Iterable[str] | None = None,
    *,
    budget: Budget | None = None,
) -> Arrays:
    """Return the arrays of a piece, or only these; their types and shapes fit the header.

    A summary that the piece does not hold is left out.
    """
    known = fields_in_pieces(rank)
    wanted = known if names is None else {name: (known | SUMMARIES)[name] for name in names}
    with archive_of(path) as archive:
        unknown = archive.members.keys() - known.keys() - SUMMARIES.keys()
        if unknown:
            raise FileError(
                f"{path}: not a piece of a trace: unknown arrays {', '.join(sorted(unknown))}"
            )
        arrays = (budget or Budget([path])).arrays(archive, wanted)
    return checked_arrays(arrays, wanted, header.sizes(rank), path)


def read_single(path: Path) -> tuple[Header, Arrays]:
    """Return what `Trace.save` has written."""
    with archive_of(path) as archive:
        if "header" not in archive.members:
            raise FileError(f"{path}: not a trace, it has no header")
        size, most = archive.members["header"].file_size, 4 * MOST_HEADER  # four bytes a letter
        if size > most:
            raise FileError(f"{path}: a header of {size:,} bytes, at most {most:,} are read")
        arrays = Budget([path]).arrays(archive, archive.members)
    text = arrays.pop("header")
    if text.dtype.kind != "U" or text.ndim:
        raise FileError(f"{path}: not a trace, it has no header of text, but {text.dtype}")
    header = Header.from_json(str(text), path)
    return header, checked_arrays(arrays, fields_in_file(), header.sizes(), path)


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write a compressed .npz file, whole or not at all."""
    with (
        whole_file(path) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=LEVEL) as archive,
    ):
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
