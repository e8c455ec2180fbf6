"""OutputDir: the output directory of a command, whose earlier outputs are replaced.

A marker file lists the outputs of earlier runs; everything else in the directory stays. A running
command and its processes hold a lock on the marker, so the directory is free once the last of them
has ended, however it ended.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ultraep.errors import FileError
from ultraep.files.reading import read_text
from ultraep.files.writing import is_unfinished
from ultraep.trace.schema import HEADER_FILE, PIECE, RANK_FOLDER


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
