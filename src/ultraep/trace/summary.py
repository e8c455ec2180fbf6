"""The summary of a piece: a few integers per record, enough for the overview of a whole run.

The recorder stores it in every piece, so that the viewer does not unpack loads, rows and times.
Pieces of versions 1 to 3 have no summary; `summary_of` computes it from their arrays.

Shapes: N records, M late additions and T lines of a piece, K columns, G stages.
"""

from __future__ import annotations

import numpy as np

from ultraep.arrays import IntArray
from ultraep.trace.schema import ENDS, KEY, Array, Arrays, Column, Header

COST = ("plan", "verify", "replicate", "weights again", "reduce")  # stages that balancing adds
NANOSECONDS = 1e9
LONGEST = 1e6  # seconds; longer times are clipped
TIMES = slice(Column.EXPERTS, Column.COST + 1)


def summary_of(header: Header, arrays: Arrays) -> Arrays:
    """Return the arrays of `SUMMARIES` for the arrays of a piece."""
    count = len(arrays["step"])
    late, more_lines = lines_of_additions(arrays)
    lines = np.zeros((count + len(late), len(Column)), dtype=np.int64)
    records = lines[:count]
    for column, name in enumerate(KEY):
        records[:, column] = arrays[name]
    lines[count:, : len(KEY)], lines[count:, Column.LATE] = arrays["more"][late], 1
    records[:, Column.ROWS] = arrays["slot_rows"].sum(axis=1, dtype=np.int64)
    records[:, Column.BYTES] = arrays["bytes_moved"]
    np.add.at(lines[:, Column.BYTES], more_lines, arrays["more_bytes"])
    seconds, more_seconds = (_finite(arrays[name]) for name in ("seconds", "more_seconds"))
    for place, stages in enumerate((("experts",), ("experts back",), COST), start=TIMES.start):
        own = np.isin(header.stages, stages)
        records[:, place] = _nanoseconds(seconds[:, own])
        np.add.at(lines[:, place], more_lines, _nanoseconds(more_seconds[:, own]))
    if ENDS in arrays:
        by_rank = routed_rows(header, arrays["loads"])
        records[:, Column.ROUTED] = by_rank.sum(axis=1)
        records[:, Column.PEAK] = peaks(by_rank, arrays.get("speeds"))
        records[:, Column.REPLICAS] = np.diff(arrays[ENDS], prepend=0)
    stage_sums = seconds.sum(axis=0) + more_seconds.sum(axis=0)
    return {"summary": lines, "more_lines": more_lines, "stage_sums": stage_sums}


def lines_of_additions(arrays: Arrays) -> tuple[IntArray, IntArray]:
    """Return the additions that start a line, and [M] the line of each addition.

    Additions to a record of the piece belong to the line of that record. Additions to one record of
    an earlier piece share a line after all records.
    """
    count = len(arrays["step"])
    keys = np.concatenate([np.column_stack([arrays[name] for name in KEY]), arrays["more"]])
    _, first, number = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    first_M = first[number.reshape(-1)[count:]]
    late = np.unique(first_M[first_M >= count])
    lines = np.where(first_M < count, first_M, count + np.searchsorted(late, first_M))
    return late - count, lines.astype(np.int32)


def stage_means(sums_RG: Array, records_R: Array) -> Array:
    """[G] mean seconds of a stage per record, on the rank with the largest mean.

    sums_RG: seconds of all records of a rank.   records_R: how many there are.
    """
    means_RG = sums_RG / np.maximum(records_R, 1)[:, None]
    largest: Array = means_RG.max(axis=0)
    return largest


def _finite(seconds: Array) -> Array:
    return np.clip(np.nan_to_num(seconds.astype(np.float64)), 0, LONGEST)


def _nanoseconds(seconds: Array) -> IntArray:
    """[N] the sum over stages."""
    nanoseconds: IntArray = np.rint(seconds.sum(axis=1) * NANOSECONDS).astype(np.int64)
    return nanoseconds


def routed_rows(header: Header, loads_NRE: Array) -> IntArray:
    """[N, R] rows of every rank without replicas."""
    topology = header.topology
    by_home = loads_NRE.sum(axis=1, dtype=np.int64)[:, topology.experts_by_rank]
    return sums_between(by_home, topology.first_of_rank)


def peaks(rows_NR: IntArray, speeds_NR: Array | None) -> IntArray:
    """[N] rows of the busiest rank. With speeds, the rows that take as long at the mean speed."""
    if speeds_NR is None:
        largest: IntArray = rows_NR.max(axis=1, initial=0)
        return largest
    speeds = np.where(speeds_NR > 0, speeds_NR, 1).astype(np.float64)
    slowest = (rows_NR / speeds).max(axis=1, initial=0) * speeds.mean(axis=1)
    rounded: IntArray = np.rint(slowest).astype(np.int64)
    return rounded


def sums_between(values: Array, ends: IntArray) -> IntArray:
    """[N, len(ends) - 1] sums of the columns between neighbouring ends."""
    upto = np.zeros((len(values), values.shape[1] + 1), dtype=np.int64)
    np.cumsum(values, axis=1, out=upto[:, 1:])
    return np.diff(upto[:, ends], axis=1)
