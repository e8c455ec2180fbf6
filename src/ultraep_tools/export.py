"""Export a trace as a CSV table, or as a timeline for Perfetto and chrome://tracing.

In the timeline a rank is a thread. The stages of a record follow each other from the start of its
forward or backward pass. Waiting time is a gap at the end of a stage.

Shapes: N records, R ranks, G stages.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from ultraep.files.writing import write_text
from ultraep.trace.read import Trace
from ultraep.trace.schema import KEY, of_backward

TO_MICRO, PROCESS = 1e6, 1
Event = dict[str, Any]


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


# -- timelines -----------------------------------------------------------------------------------


def write_timeline(trace: Trace, path: str | Path) -> None:
    """Write a timeline in Chrome's format, with imbalance before and after as counters."""
    first = trace.began.min(initial=np.inf)
    ranks = range(trace.header.ranks)
    events = [_name("process_name", "ultraep", 0)]
    events += [_name("thread_name", f"rank {rank}", rank) for rank in ranks]
    events += [*_counters(trace, first), *_stages(trace, first)]
    others = {"policy": trace.header.policy, "created": trace.header.created}
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": others}
    write_text(path, json.dumps(content))


def _name(kind: str, name: str, thread: int) -> Event:
    """Return the event that names the process or a thread."""
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": thread, "args": {"name": name}}


def _counters(trace: Trace, first: float) -> Iterator[Event]:
    values = trace.began.min(axis=1) - first, trace.imbalance_before, trace.imbalance_after
    for begin, before, after in zip(*(value.tolist() for value in values), strict=True):
        event = {"ph": "C", "name": "imbalance", "pid": PROCESS, "ts": begin * TO_MICRO}
        yield event | {"args": {"before": before, "after": after}}


def _stages(trace: Trace, first: float) -> Iterator[Event]:
    """Yield the stages of all records, without waiting time."""
    back_G = of_backward(trace.header.stages)
    begin_NRG = np.empty(trace.seconds.shape)
    for began_NR, pass_G in ((trace.began, ~back_G), (trace.back_began, back_G)):
        seconds = trace.seconds[:, :, pass_G].astype(np.float64)
        before = np.cumsum(seconds, axis=2) - seconds
        begin_NRG[:, :, pass_G] = (began_NR - first)[:, :, None] + before
    busy_NRG = trace.seconds - trace.waited
    for record, rank, stage in np.argwhere((busy_NRG > 0) & ~np.isnan(begin_NRG)).tolist():
        key = {name: int(trace.arrays[name][record]) for name in KEY}
        yield {
            "ph": "X",
            "name": trace.header.stages[stage],
            "cat": f"layer {key['layer']} {'backward' if back_G[stage] else 'forward'}",
            "ts": float(begin_NRG[record, rank, stage]) * TO_MICRO,
            "dur": float(busy_NRG[record, rank, stage]) * TO_MICRO,
            "pid": PROCESS,
            "tid": rank,
            "args": key,
        }
