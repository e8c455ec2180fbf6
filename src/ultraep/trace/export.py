"""A trace as a table for other programs. Shapes: N records, R ranks, G stages."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import numpy as np

from ultraep.files.writing import write_text
from ultraep.trace.read import Trace
from ultraep.trace.schema import Array, fields_in_file


def write_csv(trace: Trace, path: str | Path) -> None:
    """One line per record; seconds are those of the slowest rank."""
    columns = dict(_columns(trace))
    text = StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns)
    table.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
    write_text(path, text.getvalue())


def _columns(trace: Trace) -> Iterator[tuple[str, Array]]:
    """First what is told as it is, then what follows from it, then what ranks make together."""
    shown = {name: field.table for name, field in fields_in_file().items() if field.table}
    yield from ((name, trace.arrays[name]) for name, how in shown.items() if how == "plain")
    yield "tokens", trace.rank_loads.sum(axis=1)
    yield "copies", trace.num_copies
    yield "imbalance before", trace.imbalance_before.round(6)
    yield "imbalance after", trace.imbalance_after.round(6)
    for name, how in shown.items():
        if how != "plain":
            values = trace.arrays[name]
            over_ranks = values.sum(axis=1) if how == "sum" else values.max(axis=1)
            yield from _by_stage(name.replace("_", " "), over_ranks, trace.header.stages)


def _by_stage(name: str, values: Array, stages: tuple[str, ...]) -> Iterator[tuple[str, Array]]:
    """One column, or one for every stage."""
    if values.ndim == 1:
        yield name, values
    else:
        columns = np.char.mod("%.7g", values).T
        yield from zip((f"{name} {stage}" for stage in stages), columns, strict=True)
