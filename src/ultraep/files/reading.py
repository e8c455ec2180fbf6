"""Read text and NumPy arrays from files that the user names; a damaged file is a `FileError`.

A file may be hostile. Claimed sizes are compared with the bytes in the file and with a limit before
anything is read or unpacked. Pickles are never opened.
"""

from __future__ import annotations

import codecs
import io
import math
import os
import stat
import struct
import warnings
import zipfile
import zlib
from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ultraep.errors import FileError

Array = NDArray[Any]
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
ENCRYPTED, UNREADABLE = 0x1, 0x60  # flags of a member
ENDING = ".npy"
LOCAL, LOCAL_MAGIC = struct.Struct("<4s22xHH"), b"PK\x03\x04"  # before the bytes of a member
LENGTHS = {(1, 0): struct.Struct("<H"), (2, 0): struct.Struct("<I")}  # of an array's header
MOST_HEADER = 10_000  # bytes, the limit of NumPy
MOST_TEXT = 16 << 20  # bytes of a text file; parsed as JSON or CSV they take up to 30 times as much
MOST_ARRAYS = 1 << 30  # bytes of all arrays that are read from one file
MOST_DIRECTORY = 4 << 20  # bytes of an archive's directory
HEAD = 512  # bytes that hold the header of an array of few dimensions
Layout = tuple[tuple[int, ...], bool, np.dtype[Any]]  # shape, Fortran order, dtype

# What NumPy and zipfile raise on files that were cut short or overwritten.
DAMAGE = (
    ValueError,
    TypeError,
    KeyError,
    OverflowError,
    EOFError,
    OSError,
    MemoryError,
    RecursionError,
    NotImplementedError,  # flags and versions of archives
    SyntaxError,
    TokenError,
    struct.error,
    UserWarning,  # NumPy's, where it mends a header
    zipfile.BadZipFile,
    zlib.error,
)


@contextmanager
def reading(path: str | Path, what: str = "") -> Iterator[None]:
    """Turn all that a damaged file can cause into one error that names it."""
    wanted = f" as {what}" if what else ""
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
        raise FileError(f"{path}: cannot be read{wanted}, truncated or damaged: {reason}") from None


def opened(path: str | Path) -> IO[bytes]:
    """Open a regular file: a device or a pipe may have no end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise FileError(f"{path}: not a regular file")
    return open(path, "rb")


def check_size(path: str | Path, most: int) -> None:
    """Refuse a file of more than `most` bytes."""
    size = os.stat(path).st_size
    if size > most:
        raise FileError(f"{path}: {size:,} bytes, but such a file may have at most {most:,}")


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
        cut = os.stat(path).st_size > most  # perhaps within a character
        return codecs.getincrementaldecoder(encoding)().decode(content, final=not cut)


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers; unlike `splitlines`, a form feed ends none."""
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

    only: names of the arrays to read; None: all of them.
    most: bytes that they may take together, unpacked.
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
    with reading(path), opened(path) as file, _zipped(file) as zipped:
        size = os.fstat(file.fileno()).st_size
        members = {_name(member, size): member for member in zipped.infolist()}
        if len(members) < len(zipped.infolist()):
            names = ", ".join(zipped.namelist())
            raise FileError(f"{path}: two arrays of one name among {names}")
        yield Archive(path, file, members)


class Archive(NamedTuple):
    """The arrays of an open .npz file, by name."""

    path: str | Path
    file: IO[bytes]
    members: dict[str, zipfile.ZipInfo]

    def size(self, only: Container[str] | None = None) -> int:
        """Bytes that these arrays claim to unpack to."""
        return sum(member.file_size for member in self._wanted(only).values())

    def arrays(
        self, only: Container[str] | None = None, *, most: int = MOST_ARRAYS
    ) -> dict[str, Array]:
        """Return arrays as `read_arrays` does."""
        if (size := self.size(only)) > most:
            raise FileError(
                f"{self.path}: its arrays unpack to {size:,} bytes, but at most {most:,} are read"
            )
        return {name: self._array(member) for name, member in self._wanted(only).items()}

    def rows(self, only: Container[str]) -> dict[str, ArrayRows]:
        """Return where the rows of these arrays lie."""
        return {name: self._rows(member) for name, member in self._wanted(only).items()}

    def _wanted(self, only: Container[str] | None) -> dict[str, zipfile.ZipInfo]:
        return {n: member for n, member in self.members.items() if only is None or n in only}

    def _array(self, member: zipfile.ZipInfo) -> Array:
        self._seek(member)
        content = _unpacked(self.file.read(member.compress_size), member, member.file_size + 1)
        if len(content) != member.file_size or zlib.crc32(content) != member.CRC:
            raise zipfile.BadZipFile(f"{member.filename} is not what was written")
        return _array(content)

    def _rows(self, member: zipfile.ZipInfo) -> ArrayRows:
        begin = self._seek(member)
        head = io.BytesIO(_unpacked(self.file.read(min(HEAD, member.compress_size)), member, HEAD))
        shape, fortran, dtype = _header(head)
        _check_shape(shape, dtype, member.file_size - head.tell())
        if not shape or (fortran and len(shape) > 1):
            raise ValueError(f"{member.filename} has no rows that lie together")
        return ArrayRows(member, begin, head.tell(), shape, dtype)

    def _seek(self, member: zipfile.ZipInfo) -> int:
        """Go to where the bytes of a member begin; zipfile takes several times as long for it."""
        self.file.seek(member.header_offset)
        magic, name_size, more_size = LOCAL.unpack(self.file.read(LOCAL.size))
        if magic != LOCAL_MAGIC:
            raise ValueError(f"{member.filename} does not begin where the archive says")
        return self.file.seek(name_size + more_size, os.SEEK_CUR)


class ArrayRows(NamedTuple):
    """Where an array lies in its archive: a row is read without unpacking the rows behind it."""

    member: zipfile.ZipInfo
    begin: int  # of the packed bytes, in the file
    first: int  # unpacked bytes before the first row
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def row(self, file: IO[bytes], number: int) -> Array:
        """Return array[number]. The checksum of the array is not compared."""
        if not 0 <= number < self.shape[0]:
            raise ValueError(f"row {number} of {self.shape[0]}")
        size = math.prod(self.shape[1:]) * self.dtype.itemsize
        end = self.first + (number + 1) * size
        file.seek(self.begin)
        content = _unpacked(file.read(self.member.compress_size), self.member, end)
        if len(content) != end:
            raise EOFError(f"{len(content)} bytes in place of {end}")
        return np.ndarray(self.shape[1:], self.dtype, content, end - size)


class _Directory:
    """A file for zipfile, which would read a directory of any size."""

    def __init__(self, file: IO[bytes]) -> None:
        self.seek, self.tell, self._read = file.seek, file.tell, file.read

    def read(self, size: int = -1) -> bytes:
        if size > MOST_DIRECTORY:
            raise ValueError(f"a directory of {size:,} bytes, at most {MOST_DIRECTORY:,} are read")
        return self._read(size)


def _zipped(file: IO[bytes]) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(_Directory(file))
    except zipfile.BadZipFile as error:
        raise zipfile.BadZipFile(f"not an archive of arrays: {error}") from None


def _name(member: zipfile.ZipInfo, size: int) -> str:
    """Return the name of an array in an archive of `size` bytes; refuse what cannot be unpacked."""
    if not member.filename.endswith(ENDING):
        raise ValueError(f"{member.filename!r} is no array")
    if member.flag_bits & ENCRYPTED:
        raise ValueError(f"{member.filename} is encrypted")
    if member.flag_bits & UNREADABLE:
        raise ValueError(f"{member.filename} is compressed patched data, or strongly encrypted")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{member.filename} has an unknown compression, {member.compress_type}")
    if member.compress_size > size:
        raise ValueError(f"{member.filename} has {member.compress_size} bytes of {size}")
    return member.filename.removesuffix(ENDING)


def _array(content: bytes) -> Array:
    """Return the array in the content of an .npy file."""
    file = io.BytesIO(content)
    shape, fortran, dtype = _header(file)
    _check_shape(shape, dtype, len(content) - file.tell())
    return np.ndarray(shape, dtype, content, file.tell(), order="F" if fortran else "C")


def _unpacked(packed: bytes, member: zipfile.ZipInfo, most: int) -> bytes:
    """Unpack the beginning of a member, up to `most` bytes."""
    if member.compress_type == zipfile.ZIP_STORED:
        return packed[:most]
    return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, most)


def _check_shape(shape: tuple[int, ...], dtype: np.dtype[Any], size: int) -> None:
    """Refuse an array that does not take exactly `size` bytes."""
    if dtype.hasobject:
        raise ValueError("holds Python objects (a pickle), not numbers")
    needed = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or needed != size:
        raise ValueError(f"{dtype} {list(shape)} needs {needed} bytes, there are {size}")


def _header(file: IO[bytes]) -> Layout:
    version = np.lib.format.read_magic(file)
    if version not in LENGTHS:
        raise ValueError(f"an array of version {version[0]}.{version[1]}, known are 1.0 and 2.0")
    length = file.read(LENGTHS[version].size)
    (size,) = LENGTHS[version].unpack(length)
    if size > MOST_HEADER:
        raise ValueError(f"a header of {size} bytes, at most {MOST_HEADER} are read")
    return _layout(version, length + file.read(size))


@lru_cache(maxsize=512)
def _layout(version: tuple[int, int], text: bytes) -> Layout:
    """Parse a header; the pieces of a trace have few different ones."""
    read = np.lib.format.read_array_header_1_0
    if version == (2, 0):
        read = np.lib.format.read_array_header_2_0
    return read(io.BytesIO(text))
