"""SingleIndex: a trace in one file, as `ultraep trace export --npz` writes it, read at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from ultraep.tools.view.store import UNKNOWN, finite
from ultraep.tools.view.table import Table, table_of
from ultraep.trace.read import Trace, read_trace
from ultraep.trace.schema import KEY
from ultraep.trace.summary import COST


class SingleIndex:
    """A trace that is in memory; to be looked at like one in a folder."""

    complete = True

    def __init__(self, file: Path) -> None:
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

    def read(self, stop: Callable[[], bool]) -> None:
        """Nothing is left to read."""

    def place(self, step: int, layer: int, microbatch: int) -> int:
        """Where a record stands, or UNKNOWN."""
        return self._places.get((step, layer, microbatch), UNKNOWN)


def table_of_trace(trace: Trace) -> Table:
    """Return the table of a trace."""
    stages = np.array(trace.header.stages)
    seconds = trace.seconds.astype(np.float64)  # [N, R, G]
    experts = seconds[:, :, np.isin(stages, ("experts", "experts back"))]
    cost = seconds[:, :, np.isin(stages, COST)]
    by_rank = seconds.sum(axis=0) / max(1, len(trace))
    return table_of(
        {name: trace.arrays[name].astype(np.int64) for name in KEY},
        before=trace.imbalance_before,
        after=trace.imbalance_after,
        copies=trace.num_copies.astype(np.float64),
        bytes_moved=trace.bytes_moved.sum(axis=1).astype(np.float64),
        experts=experts.max(axis=1, initial=0).sum(axis=1),
        mean=experts.sum(axis=2).mean(axis=1),
        cost=cost.sum(axis=2).max(axis=1, initial=0),
        stages=by_rank.max(axis=0, initial=0),
    )
