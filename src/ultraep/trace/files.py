"""Arrays in .npz files without pickle."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ultraep.outputs import whole_file
from ultraep.trace.schema import Array

LEVEL = 1  # of compression: counts are mostly zero bytes, more effort hardly helps


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """A compressed .npz, whole or not at all."""
    with (
        whole_file(path) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=LEVEL) as archive,
    ):
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
