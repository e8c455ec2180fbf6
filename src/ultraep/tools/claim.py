"""The folder that a command works in: what it made there earlier is replaced, the rest left alone.

A marker file lists what runs of that command have made. The one that runs holds a lock on it, and
so do its processes: the folder is free when the last of them is gone, however they end.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ultraep.errors import FileError
from ultraep.trace.remove import check_only_trace, remove_trace

MOST_MARKER = 1 << 16  # bytes


class Claim:
    """A folder that one run of a command works in until it closes this.

    work: what such a run is called: "demo" of `ultraep demo`.
    files, traces: what it makes, by name in the folder.
    lock: a descriptor; a process that has it keeps the folder.
    """

    def __init__(
        self, folder: str | Path, *, work: str, files: Sequence[str], traces: Sequence[str]
    ) -> None:
        self.folder, self.work = Path(folder), work
        self.files = [self.folder / name for name in files]
        self.traces = [self.folder / name for name in traces]
        self._check_parents()
        if not self.marker.exists():
            self._check([])  # before anything is made
        self.lock = self._locked()
        try:
            made = _read_marker(self.marker, self.lock)
            self._check(made)
            self._mark(made)
            self._clear()
        except OSError as error:
            self.close()
            raise FileError(f"{folder}: cannot be written to: {error.strerror}") from None
        except FileError:
            self.close()
            raise

    @property
    def marker(self) -> Path:
        """The file that lists what was made, and is locked."""
        return self.folder / f".ultraep-{self.work}"

    def close(self) -> None:
        """Let others have the folder."""
        os.close(self.lock)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _names(self) -> list[str]:
        return [str(path.relative_to(self.folder)) for path in (*self.files, *self.traces)]

    def _check_parents(self) -> None:
        for path in (self.folder, *(trace.parent for trace in self.traces)):
            if os.path.lexists(path) and not path.is_dir():
                raise FileError(f"{path}: cannot be written to: it is no folder")

    def _check(self, made: Sequence[str]) -> None:
        """Refuse a folder where something foreign stands in the way."""
        for path, name in zip((*self.files, *self.traces), self._names(), strict=True):
            if os.path.lexists(path) and name not in made:
                raise FileError(
                    f"{path}: no {self.work} has marked it as its own, and this one would write "
                    "there: move it away, or name another folder with --out"
                )
        for path in self.files:
            if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
                raise FileError(f"{path}: no file that a run made: move it away")
        for path in self.traces:
            if os.path.lexists(path):
                check_only_trace(path)

    def _mark(self, made: Sequence[str]) -> None:
        """Written in place, for the lock is on this very file."""
        known = sorted({*made, *self._names()})
        content = json.dumps(
            {"made by": f"ultraep {self.work}", "process": os.getpid(), "made": known}
        )
        os.ftruncate(self.lock, 0)
        os.pwrite(self.lock, content.encode() + b"\n", 0)

    def _locked(self) -> int:
        """The marker, opened and locked."""
        folder, marker = self.folder, self.marker
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(marker, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise FileError(f"{folder}: cannot be written to: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            process = _content(marker, descriptor).get("process")
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                words = f"in use by another {self.work}, process {process}"
            else:
                words = f"cannot be locked: {error.strerror}"
            raise FileError(f"{folder}: {words}: name another folder with --out") from None
        return descriptor

    def _clear(self) -> None:
        for path in self.files:
            path.unlink(missing_ok=True)
        for path in self.traces:
            if path.exists():
                remove_trace(path)


def _read_marker(path: Path, descriptor: int) -> list[str]:
    """What runs have made in this folder; nothing yet if the marker is new."""
    content = _content(path, descriptor)
    made = content.get("made", [])
    if not isinstance(made, list):
        raise FileError(f"{path}: not the marker of a run: move it away")
    return [str(name) for name in made]


def _content(path: Path, descriptor: int) -> dict[str, Any]:
    text = os.pread(descriptor, MOST_MARKER, 0)
    try:
        content = json.loads(text or b"{}")
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise FileError(f"{path}: not the marker of a run: move it away")
    return content
