"""The summary of a piece: a few integers per record, enough for the overview of a whole run.

The recorder stores it in every piece, so the viewer need not unpack loads, rows and times. Pieces
of version 3 and older have none; `summary_of` computes it from their arrays.

Shapes: N records and M late additions of a piece, T = N + M lines, K columns, G stages.
"""

from __future__ import annotations

import numpy as np

from ultraep.arrays import IntArray
from ultraep.trace.schema import ENDS, KEY, Array, Arrays, Column, Header

COST = ("plan", "verify", "replicate", "weights again", "reduce")  # stages that balancing adds
NANOSECONDS = 1e9
LONGEST = 1e6  # seconds; longer times are cut to it
TIMES = slice(Column.EXPERTS, Column.COST + 1)


def summary_of(header: Header, arrays: Arrays) -> Arrays:
    """Return the arrays of `SUMMARIES` for the arrays of a piece."""
    late = arrays["more"]
    lines = np.zeros((len(arrays["step"]) + len(late), len(Column)), dtype=np.int64)
    first, more = lines[: len(arrays["step"])], lines[len(arrays["step"]) :]
    for column, name in enumerate(KEY):
        first[:, column] = arrays[name]
    more[:, : len(KEY)], more[:, Column.LATE] = late, 1
    first[:, Column.BYTES], more[:, Column.BYTES] = arrays["bytes_moved"], arrays["more_bytes"]
    first[:, Column.ROWS] = arrays["slot_rows"].sum(axis=1, dtype=np.int64)
    seconds = np.concatenate([arrays["seconds"], arrays["more_seconds"]])
    seconds = np.clip(np.nan_to_num(seconds.astype(np.float64)), 0, LONGEST)
    for place, stages in enumerate((("experts",), ("experts back",), COST), start=TIMES.start):
        own = seconds[:, np.isin(header.stages, stages)].sum(axis=1)
        lines[:, place] = np.rint(own * NANOSECONDS)
    if ENDS in arrays:
        by_rank = routed_rows(header, arrays["loads"])
        first[:, Column.ROUTED], first[:, Column.PEAK] = by_rank.sum(axis=1), by_rank.max(axis=1)
        first[:, Column.REPLICAS] = np.diff(arrays[ENDS], prepend=0)
    return {"summary": lines, "stage_sums": seconds.sum(axis=0)}


def routed_rows(header: Header, loads_NRE: Array) -> IntArray:
    """[N, R] rows of every rank if every row stayed at the home of its expert."""
    topology = header.topology
    by_home = loads_NRE.sum(axis=1, dtype=np.int64)[:, topology.experts_by_rank]
    return sums_between(by_home, topology.first_of_rank)


def sums_between(values: Array, ends: IntArray) -> IntArray:
    """[N, len(ends) - 1] sums of neighbouring columns, also of none."""
    upto = np.zeros((len(values), values.shape[1] + 1), dtype=np.int64)
    np.cumsum(values, axis=1, out=upto[:, 1:])
    return np.diff(upto[:, ends], axis=1)
