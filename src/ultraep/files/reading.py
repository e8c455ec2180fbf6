"""Read text and NumPy arrays from files that the user names; a damaged file is a `FileError`.

Files may come from strangers: their sizes are checked against limits before anything is unpacked,
and pickles are never loaded.
"""

from __future__ import annotations

import codecs
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
ENDING = ".npy"
MOST_TEXT = 16 << 20  # bytes of a text file; parsed JSON or CSV takes up to 30 times as much
MOST_ARRAYS = 1 << 30  # bytes of all arrays read from one file

# Exceptions of NumPy and zipfile on truncated or overwritten files.
DAMAGE = (
    ValueError,
    TypeError,
    KeyError,
    OverflowError,
    EOFError,
    OSError,
    MemoryError,
    RuntimeError,  # zipfile: encrypted members, unknown flags and versions
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


# -- arrays --------------------------------------------------------------------------------------


def read_array(path: str | Path, *, most: int = MOST_ARRAYS) -> Array:
    """Return the array of an .npy file of at most `most` bytes."""
    with reading(path), opened(path) as file:
        check_size(path, most)
        array = np.load(file, allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise FileError(f"{path}: an archive of arrays; its name should end in .npz")
        return array


def read_arrays(
    path: str | Path, only: Container[str] | None = None, *, most: int | None = MOST_ARRAYS
) -> dict[str, Array]:
    """Return the arrays of an .npz file by name, in its order.

    only: names of the arrays to read; None reads all.
    most: limit of their unpacked size in bytes; None: the caller has checked it.
    """
    with _archive(path) as archive:
        sizes = {name: size for name, size in _sizes(archive).items() if not only or name in only}
        if most is not None and sum(sizes.values()) > most:
            raise FileError(
                f"{path}: its arrays unpack to {sum(sizes.values()):,} bytes, but at most {most:,} "
                "are read"
            )
        return {name: archive[name] for name in sizes}


def sizes_of_arrays(path: str | Path) -> dict[str, int]:
    """Return the unpacked sizes in bytes that the arrays of an .npz file claim, by name."""
    with _archive(path) as archive:
        return _sizes(archive)


def names_of_arrays(path: str | Path) -> list[str]:
    """Return the names of the arrays of an .npz file; [] for any other file."""
    if Path(path).suffix.lower() != ".npz" or not os.path.isfile(path):
        return []
    return list(sizes_of_arrays(path)) if zipfile.is_zipfile(path) else []


@contextmanager
def _archive(path: str | Path) -> Iterator[Any]:
    """Open an .npz file; damage becomes a `FileError`."""
    with (
        reading(path, "an archive of arrays"),
        opened(path) as file,
        np.lib.npyio.NpzFile(file, allow_pickle=False) as archive,
    ):
        yield archive


def _sizes(archive: Any) -> dict[str, int]:
    members = archive.zip.infolist()
    sizes = {member.filename.removesuffix(ENDING): member.file_size for member in members}
    if len(sizes) < len(members) or not all(m.filename.endswith(ENDING) for m in members):
        raise ValueError("it has a file that is not an array, or an array twice")
    return sizes
