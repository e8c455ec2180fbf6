"""remove_trace: takes a trace away, and nothing but a trace."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ultraep.errors import FileError
from ultraep.files.writing import is_unfinished
from ultraep.trace.schema import HEADER_FILE

RANK = re.compile(r"rank-\d{5}")
PIECE = re.compile(r"\d{6}\.npz")


def remove_trace(folder: Path) -> None:
    """Remove the folder if all that is in it belongs to a trace."""
    check_only_trace(folder)
    shutil.rmtree(folder)


def check_only_trace(folder: Path) -> None:
    """Refuse a folder with anything in it that no recorder writes; the first is named."""
    foreign = next(_foreign(folder), None)
    if foreign is not None:
        raise FileError(f"{foreign}: not part of a trace, it would be removed: move it away")


def _foreign(folder: Path) -> Iterator[Path]:
    if folder.is_symlink() or not folder.is_dir():
        yield folder
        return
    for path in sorted(folder.iterdir()):
        if RANK.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            yield from (piece for piece in sorted(path.iterdir()) if not _is_file(piece, PIECE))
        elif not _is_file(path, re.compile(re.escape(HEADER_FILE))):
            yield path


def _is_file(path: Path, name: re.Pattern[str]) -> bool:
    known = name.fullmatch(path.name) or is_unfinished(path.name)
    return bool(known) and path.is_file() and not path.is_symlink()
