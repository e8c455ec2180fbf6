"""Export a trace as a CSV table."""

from __future__ import annotations

import csv
from io import StringIO
from pathlib import Path

import numpy as np

from ultraep.files.writing import write_text
from ultraep.trace.read import Trace
from ultraep.trace.schema import KEY


def write_csv(trace: Trace, path: str | Path) -> None:
    """Write a table with one line per record; seconds are the maximum over ranks."""
    columns = {name: trace.arrays[name] for name in (*KEY, "policy")} | {
        "tokens": trace.rank_loads.sum(axis=1),
        "copies": trace.num_copies,
        "imbalance before": trace.imbalance_before.round(6),
        "imbalance after": trace.imbalance_after.round(6),
        "bytes moved": trace.bytes_moved.sum(axis=1),
    }
    slowest_NG = np.char.mod("%.7g", trace.seconds.max(axis=1))
    columns |= {f"seconds {stage}": slowest_NG[:, n] for n, stage in enumerate(trace.header.stages)}
    text = StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns)
    table.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
    write_text(path, text.getvalue())
