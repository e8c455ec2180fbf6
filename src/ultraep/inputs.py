"""Files that the user names: text, and NumPy's arrays. What is damaged is a `FileError`.

Nothing that a file merely claims is believed: an array is made when its bytes are there, no pickle
is opened, and of an archive only plain arrays are read.
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
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ultraep.errors import FileError

Array = NDArray[Any]
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
ENCRYPTED = 0x1  # flag of a member
COMPRESSIONS = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}  # most bytes out of one byte
ENDING = ".npy"

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


def read_text(path: str | Path) -> str:
    """The text of a file in UTF-8, or in what its byte order mark says; without that mark."""
    with reading(path), _opened(path) as file:
        content = file.read()
        return content.decode("utf-16" if content.startswith(UTF16) else "utf-8-sig")


def read_array(path: str | Path) -> Array:
    """The array of an .npy file."""
    with reading(path), _opened(path) as file:
        if zipfile.is_zipfile(file):
            raise FileError(f"{path}: an archive of arrays; its name should end in .npz")
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        return _array(file, size)


def read_arrays(
    path: str | Path, only: Container[str] | None = None, *, most: int | None = None
) -> dict[str, Array]:
    """All arrays of an .npz file, or only those of these names, in its order.

    most: bytes that they may take together; what claims to be larger is refused unread.
    """
    with reading(path), _opened(path) as file, _archive(file) as archive:
        members = {_name(member): member for member in archive.infolist()}
        if len(members) < len(archive.infolist()):
            names = ", ".join(archive.namelist())
            raise FileError(f"{path}: two arrays of one name among {names}")
        wanted = {n: member for n, member in members.items() if only is None or n in only}
        size = sum(member.file_size for member in wanted.values())
        if most is not None and size > most:
            raise FileError(f"{path}: its arrays take {size:,} bytes, at most {most:,} are read")
        return {name: _member(archive, member) for name, member in wanted.items()}


def _archive(file: IO[bytes]) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        raise zipfile.BadZipFile(f"not an archive of arrays: {error}") from None


def names_of_arrays(path: str | Path) -> list[str]:
    """The names of the arrays of an .npz file; none if it is no such file."""
    if Path(path).suffix.lower() != ".npz" or not Path(path).is_file():
        return []
    with reading(path), _opened(path) as file:
        if not zipfile.is_zipfile(file):
            return []
        with zipfile.ZipFile(file) as archive:
            return [name.removesuffix(ENDING) for name in archive.namelist()]


def _opened(path: str | Path) -> IO[bytes]:
    """Only what has an end: a device may not."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise FileError(f"{path}: not a regular file")
    return open(path, "rb")


def _name(member: zipfile.ZipInfo) -> str:
    if not member.filename.endswith(ENDING):
        raise ValueError(f"{member.filename!r} is no array")
    return member.filename.removesuffix(ENDING)


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    if member.flag_bits & ENCRYPTED:
        raise ValueError(f"{member.filename} is encrypted")
    if member.compress_type not in COMPRESSIONS:
        raise ValueError(f"{member.filename} has an unknown compression, {member.compress_type}")
    most = member.compress_size * COMPRESSIONS[member.compress_type]
    if member.file_size > most:
        raise ValueError(
            f"{member.filename} cannot hold {member.file_size} bytes, at most {most} fit"
        )
    with archive.open(member) as file:
        return _array(file, member.file_size)


def _array(file: IO[bytes], size: int) -> Array:
    """The array of a file, or part of one, with so many bytes."""
    shape, fortran, dtype = _header(file)
    if dtype.hasobject:
        raise ValueError("holds Python objects (a pickle), not numbers")
    needed, left = math.prod(shape) * dtype.itemsize, size - file.tell()
    if min(shape, default=0) < 0 or needed != left:
        raise ValueError(f"{dtype} {list(shape)} needs {needed} bytes, there are {left}")
    content = file.read(needed + 1)
    if len(content) != needed:
        raise EOFError(f"{len(content)} bytes in place of {needed}")
    return np.ndarray(shape, dtype, buffer=content, order="F" if fortran else "C")


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(file)
    raise ValueError(f"an array of version {version[0]}.{version[1]}, known are 1.0 and 2.0")


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers; unlike `splitlines`, a form feed ends none."""
    return enumerate(io.StringIO(text, newline=None), start=1)
