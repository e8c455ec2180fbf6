"""Read text and NumPy arrays from files that the user names; a damaged file is a `FileError`.

A file may be hostile: sizes are checked against limits before anything is unpacked, and pickles are
never loaded.
"""

from __future__ import annotations

import codecs
import io
import math
import os
import stat
import struct
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ultraep.errors import FileError

Array = NDArray[Any]
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
ENCRYPTED, UNREADABLE = 0x1, 0x60  # flags of a zip member
ENDING = ".npy"
MOST_TEXT = 16 << 20  # bytes of a text file; parsed JSON or CSV takes up to 30 times as much
MOST_ARRAYS = 1 << 30  # bytes of all arrays read from one file
MOST_DIRECTORY = 4 << 20  # bytes of an archive's directory
# Readers of the shape, the order and the dtype of an .npy file, by version.
HEADERS: dict[tuple[int, int], Callable[[IO[bytes]], tuple[Any, bool, np.dtype[Any]]]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}

# Exceptions of NumPy and zipfile on truncated or overwritten files.
DAMAGE = (
    ValueError,
    TypeError,
    KeyError,
    OverflowError,
    EOFError,
    OSError,
    MemoryError,
    RecursionError,
    NotImplementedError,  # zipfile: unknown flags and versions
    SyntaxError,
    TokenError,
    struct.error,
    UserWarning,  # NumPy: a header that it repaired
    zipfile.BadZipFile,
    zlib.error,
)


@contextmanager
def reading(path: str | Path, what: str = "") -> Iterator[None]:
    """Turn every exception of a damaged file into one `FileError` that names the file."""
    as_what = f" as {what}" if what else ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            yield
    except FileError:
        raise
    except FileNotFoundError:
        raise FileError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise FileError(f"{path}: a folder, not a file") from None
    except DAMAGE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FileError(
            f"{path}: cannot be read{as_what}, truncated or damaged: {reason}"
        ) from None


def opened(path: str | Path) -> IO[bytes]:
    """Open a regular file; refuse devices and pipes, which may be endless."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise FileError(f"{path}: not a regular file")
    return open(path, "rb")


def check_size(path: str | Path, most: int) -> None:
    """Refuse a file of more than `most` bytes."""
    size = os.stat(path).st_size
    if size > most:
        raise FileError(f"{path}: {size:,} bytes, but at most {most:,} are read")


# -- text ----------------------------------------------------------------------------------------


def read_text(path: str | Path, *, most: int = MOST_TEXT) -> str:
    """Return the text of a file of at most `most` bytes, without its byte order mark.

    The encoding is UTF-8, unless a byte order mark says UTF-16.
    """
    with reading(path):
        check_size(path, most)
    return read_beginning(path, most)


def read_beginning(path: str | Path, most: int) -> str:
    """Return the text of the first `most` bytes of a file, as `read_text` decodes it."""
    with reading(path), opened(path) as file:
        content = file.read(most)
        encoding = "utf-16" if content.startswith(UTF16) else "utf-8-sig"
        cut = os.stat(path).st_size > most  # possibly inside a character
        return codecs.getincrementaldecoder(encoding)().decode(content, final=not cut)


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines with their numbers; unlike `splitlines`, do not split at a form feed."""
    return enumerate(io.StringIO(text, newline=None), start=1)


# -- arrays --------------------------------------------------------------------------------------


def read_array(path: str | Path, *, most: int = MOST_ARRAYS) -> Array:
    """Return the array of an .npy file of at most `most` bytes."""
    with reading(path), opened(path) as file:
        if zipfile.is_zipfile(file):
            raise FileError(f"{path}: an archive of arrays; its name should end in .npz")
        check_size(path, most)
        file.seek(0)
        return _array(file.read())


def read_arrays(
    path: str | Path, only: Container[str] | None = None, *, most: int = MOST_ARRAYS
) -> dict[str, Array]:
    """Return the arrays of an .npz file by name, in its order.

    only: names of the arrays to read; None reads all.
    most: limit of their unpacked size in bytes.
    """
    with archive_of(path) as archive:
        return archive.arrays(only, most=most)


def names_of_arrays(path: str | Path) -> list[str]:
    """Return the names of the arrays of an .npz file; [] for any other file."""
    if Path(path).suffix.lower() != ".npz" or not os.path.isfile(path):
        return []
    with reading(path):
        if not zipfile.is_zipfile(path):
            return []
    with archive_of(path) as archive:
        return list(archive.members)


@contextmanager
def archive_of(path: str | Path) -> Iterator[Archive]:
    """Open an .npz file; damage becomes a `FileError`."""
    with reading(path), opened(path) as file, _zip_file(file) as zipped:
        members = {_array_name(member): member for member in zipped.infolist()}
        if len(members) < len(zipped.infolist()):
            names = ", ".join(zipped.namelist())
            raise FileError(f"{path}: two arrays have the same name among {names}")
        yield Archive(path, zipped, members)


class Archive(NamedTuple):
    """The arrays of an open .npz file, by name."""

    path: str | Path
    file: zipfile.ZipFile
    members: dict[str, zipfile.ZipInfo]

    def size(self) -> int:
        """Return the size in bytes that all arrays claim to unpack to."""
        return sum(member.file_size for member in self.members.values())

    def arrays(
        self, only: Container[str] | None = None, *, most: int = MOST_ARRAYS
    ) -> dict[str, Array]:
        """Return arrays as `read_arrays` does."""
        members = {n: member for n, member in self.members.items() if only is None or n in only}
        size = sum(member.file_size for member in members.values())
        if size > most:
            raise FileError(
                f"{self.path}: its arrays unpack to {size:,} bytes, but at most {most:,} are read"
            )
        arrays = {}
        for name, member in members.items():
            with self.file.open(member) as file:
                content = file.read(member.file_size)  # read() would unpack more than is claimed
            arrays[name] = _array(content)
        return arrays


class _BoundedFile:
    """A file for zipfile that refuses single reads of more than `most` bytes."""

    def __init__(self, file: IO[bytes], most: int) -> None:
        self.most, self._read = most, file.read
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        if size > self.most:
            raise ValueError(f"a directory of {size:,} bytes, at most {self.most:,} are read")
        return self._read(size)


def _zip_file(file: IO[bytes]) -> zipfile.ZipFile:
    """Open a zip archive whose directory has a bounded size."""
    bounded = _BoundedFile(file, MOST_DIRECTORY)
    try:
        zipped = zipfile.ZipFile(bounded)
    except zipfile.BadZipFile as error:
        raise zipfile.BadZipFile(f"not an archive of arrays: {error}") from None
    bounded.most = sys.maxsize  # the caller checks the sizes of members
    return zipped


def _array_name(member: zipfile.ZipInfo) -> str:
    """Return the name of an array in an archive; refuse what cannot be unpacked."""
    if not member.filename.endswith(ENDING):
        raise ValueError(f"{member.filename!r} is not an array")
    if member.flag_bits & ENCRYPTED:
        raise ValueError(f"{member.filename} is encrypted")
    if member.flag_bits & UNREADABLE:
        raise ValueError(f"{member.filename} is compressed patched data, or strongly encrypted")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{member.filename} has an unknown compression, {member.compress_type}")
    return member.filename.removesuffix(ENDING)


def _array(content: bytes) -> Array:
    """Return the array in the content of an .npy file, which must have exactly its size."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    if version not in HEADERS:
        number = ".".join(map(str, version))
        raise ValueError(f"version {number} of .npy cannot be read; save it as version 1.0 or 2.0")
    shape, fortran, dtype = HEADERS[version](file)
    begin = file.tell()
    if dtype.hasobject:
        raise ValueError("holds Python objects (a pickle), not numbers")
    needed, size = math.prod(shape) * dtype.itemsize, len(content) - begin
    if min(shape, default=0) < 0 or needed != size:
        raise ValueError(f"{dtype} {list(shape)} needs {needed} bytes, there are {size}")
    return np.ndarray(shape, dtype, content, begin, order="F" if fortran else "C")
