"""Discard compiled functions whose sources have changed.

Numba compiles a function again when its own file changes, but keeps it when a function that it
calls, or a constant that it uses, changes in another file.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

BACKENDS = Path(__file__).parents[1]
SOURCES = ("cpu/*.py", "reference/*.py", "limits.py", "../config.py", "../arrays.py")
STAMP = "ultraep-sources"


def discard_stale(folder: Path) -> None:
    """Remove numba's indices from its cache if they were written for other sources."""
    paths = sorted(path for pattern in SOURCES for path in BACKENDS.glob(pattern))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
    with suppress(OSError):  # a folder that cannot be written keeps what it has
        if not (folder / STAMP).exists() or (folder / STAMP).read_text() != digest:
            for index in folder.glob("*.nbi"):
                index.unlink(missing_ok=True)
            (folder / STAMP).write_text(digest)
