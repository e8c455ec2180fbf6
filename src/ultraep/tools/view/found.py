"""What there is to view: traces and reports, in the paths that the user names.

A folder is one of a trace, or of several (`ULTRAEP_TRACE`), or what a demo or an inspection left:
their traces and their report. A report may be named by itself; what lies beside it is shown, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ultraep.errors import FileError
from ultraep.files.reading import names_of_arrays
from ultraep.trace.schema import HEADER_FILE

REPORT_FILE, RESULT_FILE = "report.html", "result.json"
DEPTH = ("", "*/", "*/*/")  # how far below a folder traces are looked for
MOST_ITEMS = 64


@dataclass(frozen=True)
class Item:
    """Something to view. path: a folder or a file, as it is found; name: as it is shown."""

    kind: Literal["trace", "report"]
    path: Path
    name: str


def look(paths: Iterable[Path], *, live: bool = False) -> list[Item]:
    """All that these paths hold; `FileError` for one that is missing or holds nothing.

    live: a folder may still be empty, or not be there.
    """
    found: dict[Path, Item] = {}
    for path in paths:
        items = list(_in_folder(path) if path.is_dir() else _of_file(path, live))
        if not items and not live:
            raise FileError(
                f"{path}: nothing to view, neither a trace ({HEADER_FILE}) nor a {REPORT_FILE}"
            )
        for item in items:
            found.setdefault(item.path.resolve(), item)
    return list(found.values())[:MOST_ITEMS]


def _of_file(path: Path, live: bool) -> Iterator[Item]:
    if not path.exists():
        if not live:
            raise FileError(f"{path}: no such file or folder")
    elif path.suffix.lower() in (".html", ".htm"):
        yield Item("report", path, path.name)
        yield from (item for item in _in_folder(path.parent) if item.kind == "trace")
    elif path.name in (RESULT_FILE, HEADER_FILE):
        yield from _in_folder(path.parent)
    elif "header" in names_of_arrays(path):
        yield Item("trace", path, path.name)
    else:
        raise FileError(f"{path}: not a trace (a folder, or an .npz file) and not a report (.html)")


def _in_folder(folder: Path) -> Iterator[Item]:
    for below in DEPTH:
        for header in sorted(folder.glob(f"{below}{HEADER_FILE}")):
            inside = header.parent.relative_to(folder)
            name = folder.resolve().name if inside == Path() else str(inside)
            yield Item("trace", header.parent, name)
    if (folder / REPORT_FILE).is_file():
        yield Item("report", folder / REPORT_FILE, REPORT_FILE)
