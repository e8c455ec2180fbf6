"""Write files that the user names, atomically.

A regular file is written under a temporary name and then renamed. If the path is a symbolic link,
its target is replaced. A device, a pipe or standard output receives the content as a stream.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ultraep.errors import FileError

STREAMS = (1, 2)  # descriptors of standard output and standard error


@contextmanager
def whole_file(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file for writing; on any error, leave the existing file untouched.

    Errors of the system become a `FileError` that names the path.
    """
    try:
        with _streamed(path) if is_stream(path) else _replaced(path) as file:
            yield file
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _own_stream(path) is not None:
            raise  # `| head` is not an error
        raise FileError(f"{path}: cannot be written: {error.strerror or error}") from None


def write_text(path: str | Path, content: str) -> None:
    """Write a text file in UTF-8 atomically."""
    with whole_file(path) as file:
        file.write(content.encode("utf-8"))


def is_stream(path: str | Path) -> bool:
    """Whether a path is a device, a pipe or an output of this process, to be written in place."""
    with suppress(OSError):
        mode = os.stat(path).st_mode
        regular = stat.S_ISREG(mode) or stat.S_ISDIR(mode)  # folders are refused later
        return not regular or _own_stream(path) is not None
    return False


def is_unfinished(name: str) -> bool:
    """Whether this is the temporary file of a process that was killed while writing."""
    return name.startswith(".") and name.endswith(".tmp")


def _own_stream(path: str | Path) -> int | None:
    """Return the descriptor of standard output or error if the path, like /dev/stdout, names it.

    The shell may have redirected it to a regular file.
    """
    for descriptor in STREAMS:
        with suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor
    return None


@contextmanager
def _streamed(path: str | Path) -> Iterator[IO[bytes]]:
    """Collect the content before streaming it: some formats, such as zip, seek backwards."""
    with tempfile.TemporaryFile() as content:
        yield content
        content.seek(0)
        print(end="", flush=True)  # keep the order of printed lines
        descriptor = _own_stream(path)
        with open(path if descriptor is None else os.dup(descriptor), "wb") as stream:
            shutil.copyfileobj(content, stream)


@contextmanager
def _replaced(path: str | Path) -> Iterator[IO[bytes]]:
    target = resolved_target(path)
    unfinished = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with unfinished.open("xb") as file:
            yield file
        if target.exists():
            shutil.copymode(target, unfinished)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)  # missing after a successful rename


def resolved_target(path: str | Path) -> Path:
    """Return the file behind all links; raise `OSError` if it is not writable."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():  # a loop
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if target.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if target.exists() and not os.access(target, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    return target
