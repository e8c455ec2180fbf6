"""SingleIndex: a trace in one file, as `ultraep trace export --npz` writes it, read at once."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from ultraep.errors import FileError
from ultraep.inputs import reading
from ultraep.trace.read import Trace, read_trace
from ultraep.trace.schema import KEY
from ultraep.view.columns import COST, EXPERTS, UNKNOWN
from ultraep.view.store import finite
from ultraep.view.table import Table

MOST_BYTES = 2 << 30  # unpacked; of a folder only pieces are read, this is read whole


class SingleIndex:
    """A trace that is in memory; to be looked at like one in a folder."""

    live = sampled = False

    def __init__(self, file: Path) -> None:
        size = unpacked_size(file)
        if size > MOST_BYTES:
            raise FileError(
                f"{file}: {size / 1e9:.1f} GB when unpacked, at most {MOST_BYTES / 1e9:.1f} are "
                f"read at once: view the folder that it was exported from"
            )
        self.file = file
        found = read_trace(file)
        self.trace = replace(found, arrays=finite(dict(found.arrays)))
        self.header, self.table = self.trace.header, table_of_trace(self.trace)
        self.dropped, self.left_out = self.trace.dropped, self.trace.left_out
        self.notes: list[str] = []
        self.version = self.done = self.total = 1
        self.finished = True
        keys = zip(*(self.trace.arrays[name].tolist() for name in KEY), strict=True)
        self._places = {key: place for place, key in enumerate(keys)}

    def look(self) -> None:
        """Nothing is left to read."""

    def read(self, stop: Callable[[], bool]) -> None:
        """Nothing is left to read."""

    def place(self, step: int, layer: int, microbatch: int) -> int:
        """Where a record stands, or UNKNOWN."""
        return self._places.get((step, layer, microbatch), UNKNOWN)


def unpacked_size(file: Path) -> int:
    """Bytes that a file claims to hold."""
    with reading(file), zipfile.ZipFile(file) as archive:
        return sum(member.file_size for member in archive.infolist())


def table_of_trace(trace: Trace) -> Table:
    """The records of a trace."""
    stages = trace.header.stages
    own = trace.seconds[:, :, np.isin(stages, EXPERTS)].astype(np.float64)
    slowest = trace.seconds.max(axis=1, initial=0).astype(np.float64)
    experts, mean = own.max(axis=1, initial=0).sum(axis=1), own.sum(axis=2).mean(axis=1)
    timed, before = mean > 0, trace.imbalance_before
    cost = slowest[:, np.isin(stages, COST)].sum(axis=1)
    return Table(
        **{name: trace.arrays[name].astype(np.int64) for name in KEY},
        before=before,
        after=trace.imbalance_after,
        copies=trace.num_copies.astype(np.float64),
        bytes=trace.bytes_moved.sum(axis=1).astype(np.float64),
        lost=np.where(timed, experts - mean, np.nan),
        saved=np.where(timed, mean * before - experts, np.nan),
        cost=np.where(timed, cost, np.nan),
        slowest=slowest.mean(axis=0) if len(trace) else np.zeros(len(stages)),
    )
