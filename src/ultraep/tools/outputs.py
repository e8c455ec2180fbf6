"""OutputDir: the output directory of a command, in which earlier outputs of it are replaced.

A marker file lists what runs of that command have made; everything else is left alone. A running
command holds a lock on the marker, and so do its processes: the directory is free when the last of
them is gone, however they end.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ultraep.errors import FileError
from ultraep.files.writing import is_unfinished
from ultraep.trace.schema import HEADER_FILE, PIECE, RANK_FOLDER

MOST_MARKER = 1 << 16  # bytes


class OutputDir:
    """The directory of one run of a command, until it is closed.

    work: what such a run is called: "demo" of `ultraep demo`.
    files, traces: what it makes, by name in the directory.
    lock: a descriptor; a process that has it keeps the directory.
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
        if not self.marker.exists():
            self._check([])  # before anything is made
        self.lock = self._locked()
        try:
            made = self._content().get("made", [])
            if not isinstance(made, list):
                raise FileError(f"{self.marker}: not the marker of a run: move it away")
            self._check(made)
            self._mark(made)
            self._clear()
        except OSError as error:
            self.close()
            raise FileError(f"{folder}: cannot be written to: {error.strerror}") from None
        except FileError:
            self.close()
            raise

    def close(self) -> None:
        """Release the directory."""
        os.close(self.lock)

    def __enter__(self) -> OutputDir:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check(self, made: Sequence[str]) -> None:
        """Refuse a directory in which another file is in the way."""
        for path, name in zip((*self.files, *self.traces), self._names, strict=True):
            if os.path.lexists(path) and name not in made:
                raise FileError(
                    f"{path}: no {self.work} has marked it as its own, and this one would write "
                    "there: move it away, or name another folder with --out"
                )
        for path in self.files:
            if os.path.lexists(path) and not _is_own_file(path):
                raise FileError(f"{path}: no file that a run made: move it away")
        for trace in self.traces:
            for path in _foreign(trace):
                raise FileError(f"{path}: not part of a trace, it would be removed: move it away")

    def _clear(self) -> None:
        for path in self.files:
            path.unlink(missing_ok=True)
        for path in self.traces:
            if path.exists():
                shutil.rmtree(path)

    def _locked(self) -> int:
        """Open and lock the marker."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.marker, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise FileError(f"{self.folder}: cannot be written to: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.lock = lock
            reason = f"cannot be locked: {error.strerror}"
            if isinstance(error, BlockingIOError):
                process = self._content().get("process")
                reason = f"in use by another {self.work}, process {process}"
            self.close()
            raise FileError(f"{self.folder}: {reason}: name another folder with --out") from None
        return lock

    def _mark(self, made: Sequence[str]) -> None:
        """Write the marker in place: the lock is on this very file."""
        content = {
            "made by": f"ultraep {self.work}",
            "process": os.getpid(),
            "made": sorted({*map(str, made), *self._names}),
        }
        os.ftruncate(self.lock, 0)
        os.pwrite(self.lock, json.dumps(content).encode() + b"\n", 0)

    def _content(self) -> dict[str, Any]:
        """Return what the marker says; nothing if it is new."""
        try:
            content = json.loads(os.pread(self.lock, MOST_MARKER, 0) or b"{}")
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise FileError(f"{self.marker}: not the marker of a run: move it away")
        return content


def _foreign(folder: Path) -> Iterator[Path]:
    """Yield what no recorder has written into the folder of a trace."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        yield folder
        return
    for path in sorted(folder.iterdir()):
        if RANK_FOLDER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            for piece in sorted(path.iterdir()):
                known = PIECE.fullmatch(piece.name) or is_unfinished(piece.name)
                if not known or not _is_own_file(piece):
                    yield piece
        elif (path.name != HEADER_FILE and not is_unfinished(path.name)) or not _is_own_file(path):
            yield path


def _is_own_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
