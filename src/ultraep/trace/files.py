"""The files of a trace: its header, and arrays in .npz files without pickle.

A trace may come from an untrusted source, so sizes are checked before anything is unpacked.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from ultraep.errors import FileError
from ultraep.files.reading import read_arrays, read_text, sizes_of_arrays
from ultraep.files.writing import whole_file
from ultraep.trace.schema import (
    HEADER_FILE,
    Array,
    Arrays,
    Header,
    checked_arrays,
    fields_in_file,
    fields_in_pieces,
)

LEVEL = 1  # of compression: most bytes of counts are zero, higher levels hardly help
MOST_HEADER = 16 << 20  # bytes of the text; in an array, a character takes four
SMALL, RATIO = 128 << 20, 100  # bytes that may always be unpacked; otherwise, per byte on disk


def check_claims(where: Path, files: Iterable[Path]) -> None:
    """Refuse a trace whose files claim to unpack to far more than their size on disk."""
    claimed = on_disk = 0
    for path in files:
        claimed += sum(sizes_of_arrays(path).values())
        on_disk += path.stat().st_size
    most = max(SMALL, RATIO * on_disk)
    if claimed > most:
        raise FileError(
            f"{where}: its {on_disk:,} bytes claim to unpack to {claimed:,}, but at most {most:,} "
            "are unpacked"
        )


def folders_of_traces(folder: Path) -> list[Path]:
    """Return the folder itself if it is a trace, then the traces one and two levels below it."""
    depths = (folder.glob(f"{below}{HEADER_FILE}") for below in ("", "*/", "*/*/"))
    return [header.parent for headers in depths for header in sorted(headers)]


def read_header(folder: Path) -> Header:
    path = folder / HEADER_FILE
    return Header.from_json(read_text(path, most=MOST_HEADER), path)


def read_piece(path: Path, header: Header, rank: int) -> Arrays:
    """Return the arrays of a piece, checked against the header; `check_claims` comes first."""
    arrays = read_arrays(path, most=None)
    return checked_arrays(arrays, fields_in_pieces(rank), header.sizes(rank), path)


def read_single(path: Path) -> tuple[Header, Arrays]:
    """Read a file written by `Trace.save`."""
    check_claims(path, [path])
    arrays = read_arrays(path, most=None)
    text = arrays.pop("header", np.zeros(0))
    if text.dtype.kind != "U" or text.ndim or text.nbytes > MOST_HEADER:
        raise FileError(f"{path}: not a trace, its header is not one text")
    header = Header.from_json(str(text), path)
    return header, checked_arrays(arrays, fields_in_file(), header.sizes(), path)


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write a compressed .npz file; on failure, leave no partial file."""
    with (
        whole_file(path) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=LEVEL) as archive,
    ):
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
