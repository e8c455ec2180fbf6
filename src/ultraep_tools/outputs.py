"""Outputs of a command: single files, and OutputDir, whose earlier outputs are replaced.

A command never writes over a file of another program.

A marker file lists the outputs of earlier runs; everything else in the directory stays. A running
command and its processes hold a lock on the marker, so the directory is free once the last of them
has ended, however it ended.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Any

from ultraep.errors import FileError
from ultraep.files.reading import read_text
from ultraep.files.writing import is_stream, is_unfinished, resolved_target
from ultraep.trace.schema import HEADER_FILE, PIECE, RANK_FOLDER

HEAD = 4096  # bytes at the beginning of a file that contain its mark
# Bytes that identify an earlier output of each kind.
MARKS = {
    "page": b'<meta name="generator" content="ultraep">',
    "timeline": b'{"traceEvents": [{"ph": "M", "name": "process_name"',
    "table": b"step,layer,microbatch,",
    "trace": b"header.npy",
    "placement": b'{"placed_by": "ultraep',
    "benchmark": b'[\n{"benchmark":',
    "schedule": b'"faults": [',
    "check": b'{\n  "verdict": "',
}
Target = tuple[str | Path | None, str]  # a file, and the kind of output for it


def check_targets(*targets: Target, force: bool = False) -> None:
    """Refuse files that cannot be written, before their content is computed.

    Unless `force` is set, an existing file must be an output of this program.
    """
    files = [(path, kind) for path, kind in targets if path is not None and not is_stream(path)]
    for path, kind in files:
        try:
            tempfile.TemporaryFile(dir=resolved_target(path).parent).close()
            if not force and not _replaceable(path, MARKS[kind]):
                raise FileError(
                    f"{path}: exists and is not a {kind} file written by ultraep: choose another "
                    "name, or overwrite it with --force"
                )
        except OSError as error:
            raise FileError(f"{path}: cannot be written: {error.strerror}") from None
    for path, other in combinations([path for path, _ in files], 2):
        if os.path.realpath(path) == os.path.realpath(other):
            raise FileError(f"{path} and {other} are the same file: choose different names")


def _replaceable(path: str | Path, mark: bytes) -> bool:
    """Whether the file is missing, empty, or has this mark."""
    if not os.path.exists(path):
        return True
    with open(path, "rb") as file:
        head = file.read(HEAD)
    return not head or mark in head


class OutputDir:
    """The directory of one run of a command, until it is closed.

    work: the name of the run, for the marker and for errors.
    files, traces: its outputs, by name in the directory.
    lock: a file descriptor; a process that has it open keeps the directory.
    """

    def __init__(
        self, folder: str | Path, *, work: str, files: Sequence[str], traces: Sequence[str]
    ) -> None:
        self.folder, self.work = Path(folder), work
        self.marker = self.folder / f".ultraep-{work}"
        self.files = [self.folder / name for name in files]
        self.traces = [self.folder / name for name in traces]
        self._names = [*files, *traces]
        for path in (self.folder, *(trace.parent for trace in self.traces)):
            if os.path.lexists(path) and not path.is_dir():
                raise FileError(f"{path}: cannot be written to: not a directory")
        earlier = self._read_marker()["made"]
        self._check(earlier)
        with ExitStack() as on_error:
            try:
                self.lock = self._open_marker()
                on_error.callback(self.close)
                self._write_marker(earlier)
                for path in self.files:
                    path.unlink(missing_ok=True)
                for path in self.traces:
                    if path.exists():
                        shutil.rmtree(path)
            except OSError as error:
                raise FileError(f"{self.folder}: cannot be written to: {error.strerror}") from None
            on_error.pop_all()

    def close(self) -> None:
        os.close(self.lock)

    def __enter__(self) -> OutputDir:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read_marker(self) -> dict[str, Any]:
        """Return the contents of the marker; "made" lists the outputs of earlier runs."""
        text = read_text(self.marker) if os.path.lexists(self.marker) else ""
        try:
            content = json.loads(text or "{}")
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict) or not isinstance(content.setdefault("made", []), list):
            raise FileError(f"{self.marker}: not the marker of a {self.work}: move it away")
        return content

    def _check(self, earlier: Sequence[str]) -> None:
        """Raise if a file that this command did not write would be replaced."""
        for path, name in zip((*self.files, *self.traces), self._names, strict=True):
            if os.path.lexists(path) and name not in earlier:
                raise FileError(
                    f"{path}: exists, but not as output of an earlier {self.work}: move it away, "
                    "or choose another directory with --out"
                )
        foreign = [p for p in self.files if p.is_symlink() or (p.exists() and not p.is_file())]
        for path in (*foreign, *(path for trace in self.traces for path in _foreign(trace))):
            raise FileError(f"{path}: not written by an earlier {self.work}: move it away")

    def _open_marker(self) -> int:
        """Open and lock the marker; return its file descriptor."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.marker, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            reason = f"cannot be locked: {error.strerror}"
            if isinstance(error, BlockingIOError):
                process = self._read_marker().get("process")
                reason = f"in use by another {self.work}, process {process}"
            raise FileError(
                f"{self.folder}: {reason}: choose another directory with --out"
            ) from None
        return lock

    def _write_marker(self, earlier: Sequence[str]) -> None:
        """Overwrite the marker in place, because the lock belongs to this file."""
        content = {
            "made by": f"ultraep {self.work}",
            "process": os.getpid(),
            "made": sorted({*map(str, earlier), *self._names}),
        }
        os.ftruncate(self.lock, 0)
        os.pwrite(self.lock, json.dumps(content).encode() + b"\n", 0)


def _foreign(trace: Path) -> Iterator[Path]:
    """Yield everything in the folder of a trace that no recorder wrote."""
    if os.path.lexists(trace) and (trace.is_symlink() or not trace.is_dir()):
        yield trace
    for path in sorted(trace.rglob("*")):
        name, pattern = path.name, RANK_FOLDER if path.is_dir() else PIECE
        known = pattern.fullmatch(name) or name == HEADER_FILE or is_unfinished(name)
        if not known or path.is_symlink():
            yield path
