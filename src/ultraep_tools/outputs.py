"""Outputs of a command: files that the user names, and directories of several outputs."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ultraep.errors import FileError
from ultraep.files.writing import resolved_target


def check_targets(*targets: Path | None, force: bool = False) -> None:
    """Refuse files that exist or cannot be written, before their content is computed.

    force: existing files will be overwritten.
    """
    for path in targets:
        if path is None:
            continue
        try:
            tempfile.TemporaryFile(dir=resolved_target(path).parent).close()
        except OSError as error:
            raise FileError(f"{path}: cannot be written: {error.strerror}") from None
        if path.exists() and not force:
            raise FileError(f"{path}: exists; choose another name, or overwrite it with --force")


def prepare_folder(folder: Path, work: str, outputs: Sequence[str]) -> None:
    """Create a directory for these outputs, or remove the outputs of an earlier run.

    A marker file shows that a directory was written by an earlier run. All other files stay.
    """
    marker = folder / f".ultraep-{work}"
    earlier = [path for path in (folder / name for name in outputs) if os.path.lexists(path)]
    if earlier and not marker.is_file():
        raise FileError(
            f"{earlier[0]}: exists, but not as output of an earlier {work}: move it away, or "
            "choose another directory with --out"
        )
    try:
        for name in outputs:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
        for path in earlier:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    except OSError as error:
        raise FileError(
            f"{error.filename or folder}: cannot be written to: {error.strerror}"
        ) from None
