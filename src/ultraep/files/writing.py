"""Write files that the user names, atomically.

A file is written under a temporary name and then renamed. If the path is a symbolic link, its
target is replaced. Devices and pipes are refused.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ultraep.errors import FileError


@contextmanager
def whole_file(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file for writing; on any error, leave the existing file untouched.

    Errors of the system become a `FileError` that names the path.
    """
    try:
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
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}") from None


def write_text(path: str | Path, content: str) -> None:
    """Write a text file in UTF-8 atomically."""
    with whole_file(path) as file:
        file.write(content.encode("utf-8"))


def is_unfinished(name: str) -> bool:
    """Whether this is the temporary file of a process that was killed while writing."""
    return name.startswith(".") and name.endswith(".tmp")


def resolved_target(path: str | Path) -> Path:
    """Return the file behind all links; raise `OSError` if it is not a writable regular file."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():  # a loop
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "not a regular file")
    if target.exists() and not os.access(target, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    return target
