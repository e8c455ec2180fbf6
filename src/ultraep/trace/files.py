"""Arrays in .npz files without pickle, and files that appear whole or not at all."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ultraep.errors import FileError
from ultraep.trace.schema import Array, Arrays
from ultraep.workload.files import DAMAGE

LEVEL = 1  # of compression: counts are mostly zero bytes, more effort hardly helps


def write_whole(path: Path, content: str) -> None:
    """A text file, under another name until it is complete."""
    unfinished = _unfinished(path)
    unfinished.write_text(content, "utf-8")
    os.replace(unfinished, path)


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """A compressed .npz, under another name until it is complete."""
    unfinished = _unfinished(path)
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED, compresslevel=LEVEL) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)
    os.replace(unfinished, path)


def read_arrays(path: Path) -> Arrays:
    """All arrays of an .npz; a damaged one is a `FileError` that names the file."""
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise FileError(f"{path}: truncated, damaged or no archive of arrays")
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
    except FileError:
        raise
    except DAMAGE as error:
        raise FileError(f"{path}: cannot be read, truncated or damaged: {error}") from None


def is_unfinished(name: str) -> bool:
    """Whether a writer was interrupted in this file; what it should have held is lost."""
    return name.startswith(".") and name.endswith(".tmp")


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")
