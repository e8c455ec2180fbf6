"""Write files that the user names: whole or not at all, and over no file of another program.

A regular file is written under another name beside it, then renamed. A symbolic link stays, and
its target is written. A device, a pipe or standard output is streamed to.
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
from itertools import combinations
from pathlib import Path
from typing import IO

from ultraep.errors import FileError

STREAMS = (1, 2)  # descriptors of standard output and standard error
HEAD = 4096  # bytes at the beginning of a file in which its mark stands
# By what is written: bytes by which an earlier one is recognised.
MARKS = {
    "page": b'<meta name="generator" content="ultraep">',
    "picture": b"ultraep",
    "timeline": b'{"traceEvents": [{"ph": "M", "name": "process_name"',
    "table": b"step,layer,microbatch,",
    "trace": b"header.npy",
    "benchmark": b'[\n{"benchmark":',
}
Target = tuple[str | Path | None, str]  # a file, and what will be written into it


@contextmanager
def whole_file(path: str | Path) -> Iterator[IO[bytes]]:
    """A file to write into; an error, whichever, leaves what was there before.

    What the system refuses is a `FileError` that names the path.
    """
    try:
        with _streamed(path) if is_stream(path) else _replaced(path) as file:
            yield file
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _own_stream(path) is not None:
            raise  # `| head` is no error
        raise FileError(f"{path}: cannot be written: {error.strerror or error}") from None


def write_text(path: str | Path, content: str) -> None:
    """A text file in UTF-8, whole or not at all."""
    with whole_file(path) as file:
        file.write(content.encode("utf-8"))


def check_targets(*targets: Target, force: bool = False) -> None:
    """Refuse files that cannot be written, before anything is computed for them.

    A file that exists must be one that this program wrote, unless `force` is set.
    """
    files = [(path, kind) for path, kind in targets if path is not None and not is_stream(path)]
    for path, kind in files:
        try:
            with tempfile.TemporaryFile(dir=_target(path).parent):
                pass
            if not force and not _replaceable(path, MARKS[kind]):
                raise FileError(
                    f"{path}: exists and is not a {kind} file written by ultraep: choose another "
                    "name, or overwrite it with --force"
                )
        except OSError as error:
            raise FileError(f"{path}: cannot be written: {error.strerror}") from None
    for path, other in combinations([path for path, _ in files], 2):
        if os.path.realpath(path) == os.path.realpath(other):
            raise FileError(f"{path} and {other} are one file, of which only the last would stay")


def is_stream(path: str | Path) -> bool:
    """Whether there is something that takes what is written and must not be replaced."""
    with suppress(OSError):
        mode = os.stat(path).st_mode
        whole = stat.S_ISREG(mode) or stat.S_ISDIR(mode)  # of these, folders are refused
        return not whole or _own_stream(path) is not None
    return False


def _replaceable(path: str | Path, mark: bytes) -> bool:
    """Whether there is no file, an empty one, or one with this mark."""
    if not os.path.exists(path):
        return True
    with open(path, "rb") as file:
        head = file.read(HEAD)
    return not head or mark in head


def is_unfinished(name: str) -> bool:
    """Whether a process was killed while it wrote this file; what it should have held is lost."""
    return name.startswith(".") and name.endswith(".tmp")


def _own_stream(path: str | Path) -> int | None:
    """The descriptor of this process that the path is another name of, as /dev/stdout is.

    It may be a regular file to which a shell has redirected, also one that already has content.
    """
    for descriptor in STREAMS:
        with suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor
    return None


@contextmanager
def _streamed(path: str | Path) -> Iterator[IO[bytes]]:
    """Collected first: formats such as zip go back in what they write, a stream cannot."""
    with tempfile.TemporaryFile() as content:
        yield content
        content.seek(0)
        with _open_stream(path) as stream:
            shutil.copyfileobj(content, stream)


def _open_stream(path: str | Path) -> IO[bytes]:
    descriptor = _own_stream(path)
    if descriptor is None:
        return open(path, "wb")
    print(end="", flush=True)  # what was printed comes first
    return open(os.dup(descriptor), "wb")


@contextmanager
def _replaced(path: str | Path) -> Iterator[IO[bytes]]:
    target = _target(path)
    unfinished = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with unfinished.open("xb") as file:
            yield file
        if target.exists():
            shutil.copymode(target, unfinished)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)  # it is gone already if all went well


def _target(path: str | Path) -> Path:
    """The file behind all links, where it may be written."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():  # it points to itself
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if target.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if target.exists() and not os.access(target, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    return target
