"""The folder of a demo: what an earlier demo made there is replaced, anything else is left alone.

A marker file lists what demos have made. The demo that runs holds a lock on it, and so do its
ranks: the folder is free when the last of them is gone, however they end.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ultraep.demo.result import REPORT_FILE, RESULT_FILE, trace_folder
from ultraep.errors import FileError
from ultraep.trace.remove import check_only_trace, remove_trace

MARKER = ".ultraep-demo"
FILES = (RESULT_FILE, REPORT_FILE)


class Claim:
    """A folder that one demo works in until it closes this.

    lock: a descriptor; a process that has it keeps the folder.
    """

    def __init__(self, folder: str | Path, policies: Sequence[str]) -> None:
        self.folder = Path(folder)
        self.files = [self.folder / name for name in FILES]
        self.traces = [trace_folder(folder, policy) for policy in policies]
        self._check_parents()
        if not (self.folder / MARKER).exists():
            self._check([])  # before anything is made
        self.lock = _locked(self.folder)
        try:
            made = _read_marker(self.folder / MARKER, self.lock)
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
                    f"{path}: no demo has marked it as its own, and this one would write there: "
                    "move it away, or name another folder with --out"
                )
        for path in self.files:
            if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
                raise FileError(f"{path}: no file that a demo made: move it away")
        for path in self.traces:
            if os.path.lexists(path):
                check_only_trace(path)

    def _mark(self, made: Sequence[str]) -> None:
        """Written in place, for the lock is on this very file."""
        known = sorted({*made, *self._names()})
        content = json.dumps({"made by": "ultraep demo", "process": os.getpid(), "made": known})
        os.ftruncate(self.lock, 0)
        os.pwrite(self.lock, content.encode() + b"\n", 0)

    def _clear(self) -> None:
        for path in self.files:
            path.unlink(missing_ok=True)
        for path in self.traces:
            if path.exists():
                remove_trace(path)


def _locked(folder: Path) -> int:
    """The marker, opened and locked."""
    marker = folder / MARKER
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
            words = f"in use by another demo, process {process}"
        else:
            words = f"cannot be locked: {error.strerror}"
        raise FileError(f"{folder}: {words}: name another folder with --out") from None
    return descriptor


def _read_marker(path: Path, descriptor: int) -> list[str]:
    """What demos have made in this folder; nothing yet if the marker is new."""
    content = _content(path, descriptor)
    made = content.get("made", [])
    if not isinstance(made, list):
        raise FileError(f"{path}: not the marker of a demo: move it away")
    return [str(name) for name in made]


def _content(path: Path, descriptor: int) -> dict[str, Any]:
    text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    try:
        content = json.loads(text or b"{}")
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise FileError(f"{path}: not the marker of a demo: move it away")
    return content
