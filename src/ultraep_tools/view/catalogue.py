"""Catalogue: the open traces by name.

A path is a trace (a folder or an .npz file) or a folder with traces, such as the output of a demo.
If a trace cannot be opened, the page says why and shows the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from ultraep.errors import ConfigError, FileError, UltraEPError
from ultraep.files.reading import names_of_arrays
from ultraep.trace.files import folders_of_traces, read_header
from ultraep.trace.read import read_trace
from ultraep.trace.schema import HEADER_FILE
from ultraep_tools.view.traces import FolderTrace, OpenTrace, WholeTrace


@dataclass
class Item:
    """A trace. If it cannot be opened, `error` says why."""

    path: Path
    name: str
    trace: OpenTrace | None = None
    error: str = ""


class Catalogue:
    """The open traces."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths, self.items, self._refreshing = list(paths), list[Item](), Lock()
        self._find_items()
        self.refresh()

    def trace(self, name: str) -> OpenTrace:
        for item in self.items:
            if item.name == name:
                if item.trace is None:
                    raise FileError(item.error)
                return item.trace
        names = ", ".join(item.name for item in self.items) or "none"
        raise ConfigError(f"trace {name[:80]!r} is not open; open are: {names}")

    def refresh(self) -> None:
        """Read what running jobs have written since the last call."""
        with self._refreshing:
            with suppress(OSError, FileError):  # a folder disappeared
                self._find_items()
            for item in self.items:
                self._reopen(item)
                if item.trace is not None:
                    item.trace.read()

    def _find_items(self) -> None:
        """Open the traces that are new."""
        paths = paths_of_traces(self.paths)
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
                item.trace = FolderTrace(item.path)
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


def paths_of_traces(paths: Iterable[Path]) -> list[Path]:
    """Return the traces in these paths; raise `FileError` for a path that has none."""
    traces: dict[Path, Path] = {}
    for path in paths:
        if path.is_dir():
            inside = folders_of_traces(path)
        elif path.exists() and (path.suffix != ".npz" or "header" not in names_of_arrays(path)):
            raise FileError(f"{path}: not a trace (a folder, or an .npz file)")
        else:
            inside = [path] if path.exists() else []
        if not inside:
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
