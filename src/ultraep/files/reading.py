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
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ultraep.errors import FileError

Array = NDArray[Any]
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
ENCRYPTED, UNREADABLE = 0x1, 0x60  # flags of a member
COMPRESSIONS = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}  # most bytes out of one byte
PACKED_SHARE, PACKED_MORE = 2, 1024  # packed bytes are at most so many times the unpacked, and more
ENDING = ".npy"
LOCAL, LOCAL_MAGIC = struct.Struct("<4s22xHH"), b"PK\x03\x04"  # before the bytes of a member
LENGTHS = {(1, 0): struct.Struct("<H"), (2, 0): struct.Struct("<I")}  # of an array's header
MOST_HEADER = 10_000  # bytes, as NumPy has it
MOST_TEXT = 16 << 20  # bytes of a text file; parsed as JSON or CSV they take up to 30 times as much
MOST_ARRAYS = 1 << 30  # bytes of all arrays that are read from one file
MOST_DIRECTORY = 4 << 20  # bytes of an archive's directory
HEAD = 512  # bytes that hold the header of an array of few dimensions
Layout = tuple[tuple[int, ...], bool, np.dtype[Any]]  # shape, in Fortran's order, type

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
        said = " ".join(str(error).split()) or type(error).__name__
        raise FileError(f"{path}: cannot be read{wanted}, truncated or damaged: {said}") from None


def read_text(path: str | Path, *, most: int = MOST_TEXT) -> str:
    """Return the text of a file of at most `most` bytes, without its byte order mark.

    The encoding is UTF-8, unless a byte order mark says UTF-16.
    """
    with reading(path), opened(path) as file:
        check_size(path, most)
        content = file.read(most)
        return content.decode("utf-16" if content.startswith(UTF16) else "utf-8-sig")


def read_beginning(path: str | Path, most: int) -> str:
    """Return the text of the first `most` bytes of a file, as `read_text` decodes it."""
    with reading(path), opened(path) as file:
        content = file.read(most)
        encoding = "utf-16" if content.startswith(UTF16) else "utf-8-sig"
        cut = os.stat(path).st_size > most  # perhaps within a character
        return codecs.getincrementaldecoder(encoding)().decode(content, final=not cut)


def check_size(path: str | Path, most: int) -> None:
    """Refuse a file of more than `most` bytes."""
    size = os.stat(path).st_size
    if size > most:
        raise FileError(f"{path}: {size:,} bytes, but such a file may have at most {most:,}")


def read_array(path: str | Path, *, most: int = MOST_ARRAYS) -> Array:
    """Return the array of an .npy file of at most `most` bytes."""
    with reading(path), opened(path) as file:
        if zipfile.is_zipfile(file):
            raise FileError(f"{path}: an archive of arrays; its name should end in .npz")
        check_size(path, most)
        file.seek(0)
        return _array(file, os.fstat(file.fileno()).st_size)


def read_arrays(
    path: str | Path, only: Container[str] | None = None, *, most: int = MOST_ARRAYS
) -> dict[str, Array]:
    """Return the arrays of an .npz file by name, in its order.

    only: names of the arrays to read; None: all of them.
    most: bytes that they may take together, unpacked.
    """
    with archive_of(path) as archive:
        return archive.arrays(only, most=most)


@contextmanager
def archive_of(path: str | Path) -> Iterator[Archive]:
    """An .npz file that is open; what is damaged is told as a `FileError`."""
    with reading(path), opened(path) as file, _zipped(file) as zipped:
        members = {_name(member): member for member in zipped.infolist()}
        if len(members) < len(zipped.infolist()):
            names = ", ".join(zipped.namelist())
            raise FileError(f"{path}: two arrays of one name among {names}")
        yield Archive(path, file, members)


@dataclass(frozen=True)
class Archive:
    """Arrays of an open file, by name."""

    path: str | Path
    file: IO[bytes]
    members: dict[str, zipfile.ZipInfo]

    def arrays(
        self, only: Container[str] | None = None, *, most: int = MOST_ARRAYS
    ) -> dict[str, Array]:
        """Return them as `read_arrays` does."""
        wanted = {n: one for n, one in self.members.items() if only is None or n in only}
        size = sum(member.file_size for member in wanted.values())
        if size > most:
            raise FileError(
                f"{self.path}: its arrays unpack to {size:,} bytes, but at most {most:,} are read"
            )
        return {name: _member(self.file, member) for name, member in wanted.items()}

    def places(self, only: Container[str]) -> dict[str, ArrayPlace]:
        """Where those of these names lie."""
        wanted = {name: one for name, one in self.members.items() if name in only}
        return {name: _place(self.file, member) for name, member in wanted.items()}


class _Directory:
    """A file for zipfile, which would read a directory of any size that the file claims."""

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


def names_of_arrays(path: str | Path) -> list[str]:
    """The names of the arrays of an .npz file; none if it is no such file."""
    if Path(path).suffix.lower() != ".npz" or not os.path.isfile(path):
        return []
    with reading(path), opened(path) as file:
        if not zipfile.is_zipfile(file):
            return []
        with _zipped(file) as archive:
            return [name.removesuffix(ENDING) for name in archive.namelist()]


def opened(path: str | Path) -> IO[bytes]:
    """Only what has an end: a device may not."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise FileError(f"{path}: not a regular file")
    return open(path, "rb")


def _name(member: zipfile.ZipInfo) -> str:
    if not member.filename.endswith(ENDING):
        raise ValueError(f"{member.filename!r} is no array")
    return member.filename.removesuffix(ENDING)


def _member(file: IO[bytes], member: zipfile.ZipInfo) -> Array:
    _seek(file, member)
    content = _unpacked(file, member.compress_size, member.compress_type, member.file_size + 1)
    if len(content) != member.file_size or zlib.crc32(content) != member.CRC:
        raise zipfile.BadZipFile(f"{member.filename} is not what was written")
    return _array(io.BytesIO(content), member.file_size)


def _seek(file: IO[bytes], member: zipfile.ZipInfo) -> int:
    """Go to where the bytes of a member begin; zipfile's own way there is slow."""
    if member.flag_bits & ENCRYPTED:
        raise ValueError(f"{member.filename} is encrypted")
    if member.flag_bits & UNREADABLE:
        raise ValueError(f"{member.filename} is compressed patched data, or strongly encrypted")
    if member.compress_type not in COMPRESSIONS:
        raise ValueError(f"{member.filename} has an unknown compression, {member.compress_type}")
    most = member.compress_size * COMPRESSIONS[member.compress_type]
    if member.file_size > most:
        raise ValueError(
            f"{member.filename} cannot hold {member.file_size} bytes, at most {most} fit"
        )
    if member.compress_size > PACKED_SHARE * member.file_size + PACKED_MORE:
        raise ValueError(
            f"{member.filename} has {member.compress_size} packed bytes for {member.file_size}"
        )
    file.seek(member.header_offset)
    magic, name_size, more_size = LOCAL.unpack(file.read(LOCAL.size))
    if magic != LOCAL_MAGIC:
        raise ValueError(f"{member.filename} does not begin where the archive says")
    return file.seek(name_size + more_size, os.SEEK_CUR)


def _unpacked(file: IO[bytes], size: int, kind: int, most: int) -> bytes:
    """What so many bytes of the file hold, up to so many bytes."""
    packed = file.read(size)
    if len(packed) != size:
        raise EOFError(f"{len(packed)} bytes in place of {size}")
    if kind == zipfile.ZIP_STORED:
        return packed[:most]
    return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, most)


def _array(file: IO[bytes], size: int) -> Array:
    """The array of a file, or part of one, with so many bytes."""
    shape, fortran, dtype = _header(file)
    needed = _size(shape, dtype, size - file.tell())
    content = file.read(needed + 1)
    if len(content) != needed:
        raise EOFError(f"{len(content)} bytes in place of {needed}")
    return np.ndarray(shape, dtype, buffer=content, order="F" if fortran else "C")


def _size(shape: tuple[int, ...], dtype: np.dtype[Any], left: int) -> int:
    """Bytes of an array, which must be those that are left."""
    if dtype.hasobject:
        raise ValueError("holds Python objects (a pickle), not numbers")
    needed = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or needed != left:
        raise ValueError(f"{dtype} {list(shape)} needs {needed} bytes, there are {left}")
    return needed


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
    """What a header says; the pieces of a trace have few different ones."""
    read = np.lib.format.read_array_header_1_0
    if version == (2, 0):
        read = np.lib.format.read_array_header_2_0
    return read(io.BytesIO(text))


# -- single rows ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArrayPlace:
    """Where an array lies in its archive, so that a row can be read without those behind it."""

    begin: int  # of its bytes, in the file
    packed: int  # how many there are
    kind: int  # of compression
    first: int  # bytes before the first row
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def row(self, file: IO[bytes], number: int) -> Array:
        """array[number]; what the archive says of all of it is not compared."""
        if not 0 <= number < self.shape[0]:
            raise ValueError(f"row {number} of {self.shape[0]}")
        size = math.prod(self.shape[1:]) * self.dtype.itemsize
        end = self.first + (number + 1) * size
        file.seek(self.begin)
        content = _unpacked(file, self.packed, self.kind, end)
        if len(content) != end:
            raise EOFError(f"{len(content)} bytes in place of {end}")
        return np.ndarray(self.shape[1:], self.dtype, content, offset=end - size)


def _place(file: IO[bytes], member: zipfile.ZipInfo) -> ArrayPlace:
    begin, size, kind = _seek(file, member), member.compress_size, member.compress_type
    head = io.BytesIO(_unpacked(file, min(size, HEAD), kind, HEAD))
    shape, fortran, dtype = _header(head)
    _size(shape, dtype, member.file_size - head.tell())
    if not shape or (fortran and len(shape) > 1):
        raise ValueError(f"{member.filename} has no rows that lie together")
    return ArrayPlace(begin, size, kind, head.tell(), shape, dtype)


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers; unlike `splitlines`, a form feed ends none."""
    return enumerate(io.StringIO(text, newline=None), start=1)
