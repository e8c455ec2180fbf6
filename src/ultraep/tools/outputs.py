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
from pathlib import Path
from typing import Any

from ultraep.errors import FileError
from ultraep.files.writing import is_unfinished
from ultraep.trace.schema import HEADER_FILE, PIECE, RANK_FOLDER

MOST_MARKER = 1 << 16  # bytes


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
        if not self.marker.exists():
            self._check([])  # before the marker is created
        self.lock = self._open_marker()
        try:
            earlier = self._content().get("made", [])
            if not isinstance(earlier, list):
                raise self._invalid_marker()
            self._check(earlier)
            self._write_marker(earlier)
            for path in self.files:
                path.unlink(missing_ok=True)
            for path in self.traces:
                if path.exists():
                    shutil.rmtree(path)
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

    def _check(self, earlier: Sequence[str]) -> None:
        """Raise if a file that this command did not write would be replaced."""
        for path, name in zip((*self.files, *self.traces), self._names, strict=True):
            if os.path.lexists(path) and name not in earlier:
                raise FileError(
                    f"{path}: exists, but not as output of an earlier {self.work}: move it away, "
                    "or choose another directory with --out"
                )
        foreign = [path for path in self.files if os.path.lexists(path) and not _is_file(path)]
        for path in (*foreign, *(path for trace in self.traces for path in _foreign(trace))):
            raise FileError(f"{path}: not written by an earlier {self.work}: move it away")

    def _open_marker(self) -> int:
        """Open and lock the marker."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = os.open(self.marker, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise FileError(f"{self.folder}: cannot be written to: {error.strerror}") from None
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            reason = f"cannot be locked: {error.strerror}"
            if isinstance(error, BlockingIOError):
                reason = f"in use by another {self.work}, process {self._content().get('process')}"
            self.close()
            raise FileError(
                f"{self.folder}: {reason}: choose another directory with --out"
            ) from None
        return self.lock

    def _write_marker(self, earlier: Sequence[str]) -> None:
        """Overwrite the marker in place, because the lock belongs to this file."""
        content = {
            "made by": f"ultraep {self.work}",
            "process": os.getpid(),
            "made": sorted({*map(str, earlier), *self._names}),
        }
        os.ftruncate(self.lock, 0)
        os.pwrite(self.lock, json.dumps(content).encode() + b"\n", 0)

    def _content(self) -> dict[str, Any]:
        """Return the contents of the marker; empty if it is new."""
        try:
            content = json.loads(os.pread(self.lock, MOST_MARKER, 0) or b"{}")
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise self._invalid_marker()
        return content

    def _invalid_marker(self) -> FileError:
        return FileError(f"{self.marker}: not the marker of a {self.work}: move it away")


def _foreign(trace: Path) -> Iterator[Path]:
    """Yield the files in the folder of a trace that no recorder wrote."""
    if not os.path.lexists(trace):
        return
    if trace.is_symlink() or not trace.is_dir():
        yield trace
        return
    for path in sorted(trace.iterdir()):
        if RANK_FOLDER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            for piece in sorted(path.iterdir()):
                known = PIECE.fullmatch(piece.name) or is_unfinished(piece.name)
                if not known or not _is_file(piece):
                    yield piece
        elif (path.name != HEADER_FILE and not is_unfinished(path.name)) or not _is_file(path):
            yield path


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
