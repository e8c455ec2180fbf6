"""Catalogue: the open traces by name, and the thread that reads them.

A path is a trace (a folder or an .npz file) or a folder with traces, such as the output of a demo.
If a trace cannot be opened, the page says why and shows the others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ultraep.errors import ConfigError, FileError, UltraEPError
from ultraep.files.reading import names_of_arrays
from ultraep.trace.files import folders_of_traces, read_header
from ultraep.trace.read import read_trace
from ultraep.trace.schema import HEADER_FILE
from ultraep_tools.view.traces import FolderTrace, OpenTrace, WholeTrace

PERIOD = 1.0  # seconds between two checks of a folder that is followed


@dataclass
class Item:
    """A trace. If it cannot be opened, `error` says why."""

    path: Path
    name: str
    trace: OpenTrace | None = None
    error: str = ""


class Catalogue:
    """The open traces."""

    def __init__(self, paths: Sequence[Path], *, live: bool = False) -> None:
        self.paths, self.live, self.items = list(paths), live, list[Item]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ultraep view", daemon=True)
        self._find_items()

    def start(self) -> None:
        """Start the reading thread; idempotent."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def read_all(self) -> None:
        """Read all traces, and return when they are read."""
        for item in self.items:
            if item.trace is not None:
                item.trace.read(self._stop.is_set)

    def trace(self, name: str) -> OpenTrace:
        for item in self.items:
            if item.name == name:
                if item.trace is None:
                    raise FileError(item.error)
                return item.trace
        names = ", ".join(item.name for item in self.items) or "none"
        raise ConfigError(f"trace {name[:80]!r} is not open; open are: {names}")

    def _run(self) -> None:
        self.read_all()
        while self.live and not self._stop.wait(PERIOD):
            self._find_items()
            for item in self.items:
                self._reopen(item)
            self.read_all()

    def _find_items(self) -> None:
        """Open the traces that are new."""
        try:
            paths = paths_of_traces(self.paths, live=self.live)
        except OSError:
            return  # a folder disappeared during the search
        known = {item.path: item.name for item in self.items}
        for path, name in zip(paths, short_names(paths), strict=True):
            if path not in known:
                item = Item(path, str(path) if name in known.values() else name)
                self._open(item)
                self.items.append(item)

    def _open(self, item: Item) -> None:
        item.trace, item.error = None, ""
        try:
            if item.path.is_dir():
                item.trace = FolderTrace(item.path, live=self.live)
            else:
                item.trace = WholeTrace(item.path, read_trace(item.path))
        except (UltraEPError, OSError) as error:
            item.error = str(error)

    def _reopen(self, item: Item) -> None:
        """Open a folder again if it could not be opened, or if it now holds another trace."""
        if item.path.is_dir():
            with suppress(FileError):
                if item.trace is None or item.trace.header != read_header(item.path):
                    self._open(item)


# -- searching -----------------------------------------------------------------------------------


def paths_of_traces(paths: Iterable[Path], *, live: bool = False) -> list[Path]:
    """Return the traces in these paths.

    Raise `FileError` for a path that is missing or has none, unless `live` is set.
    """
    traces: dict[Path, Path] = {}
    for path in paths:
        if path.is_dir():
            inside = folders_of_traces(path)
        elif path.exists() and (path.suffix != ".npz" or "header" not in names_of_arrays(path)):
            raise FileError(f"{path}: not a trace (a folder, or an .npz file)")
        else:
            inside = [path] if path.exists() else []
        if not inside and not live:
            missing = f"there is no {HEADER_FILE}" if path.exists() else "no such file or folder"
            raise FileError(f"{path}: nothing to view, {missing}")
        for trace in inside:
            traces.setdefault(trace.resolve(), trace)
    return list(traces.values())


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest distinct names of different paths, in whole parts.

    >>> short_names([Path("out/none/trace"), Path("out/ultraep/trace")])
    ['none', 'ultraep']
    >>> short_names([Path("runs/first/0000")])
    ['first']
    """
    parts = [path.resolve().parts for path in paths]
    while parts and min(map(len, parts)) > 2 and len({part[-1] for part in parts}) == 1:
        if len(parts) == 1 and parts[0][-1] != "trace" and not parts[0][-1].isdecimal():
            break
        parts = [part[:-1] for part in parts]
    return [_shortest(part, parts) for part in parts]


def _shortest(own: tuple[str, ...], parts: Sequence[tuple[str, ...]]) -> str:
    """Return the last parts of a path that no other path ends with."""
    for length in range(1, len(own)):
        if sum(part[-length:] == own[-length:] for part in parts) == 1:
            return "/".join(own[-length:])
    return str(Path(*own))
