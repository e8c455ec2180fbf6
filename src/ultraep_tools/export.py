"""Export a trace as a CSV table, or as a timeline for Perfetto and chrome://tracing.

In the timeline a rank is a thread. The stages of a record follow each other from the start of its
forward or backward pass. Waiting time is a gap at the end of a stage. The simulator uses the same
functions.

Shapes: N records, R ranks, G stages.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from ultraep.files.writing import write_text
from ultraep.trace.read import Trace
from ultraep.trace.schema import KEY, of_backward

TO_MICRO = 1e6
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


def timeline(events: Iterable[Event], **others: Any) -> dict[str, Any]:
    """Return the content of a timeline file in Chrome's format, with other facts about the run."""
    return {"traceEvents": list(events), "displayTimeUnit": "ms", "otherData": others}


def write_timeline(path: str | Path, content: dict[str, Any]) -> None:
    """Write a timeline as JSON."""
    write_text(path, json.dumps(content))


def timeline_of(trace: Trace) -> dict[str, Any]:
    """Return the timeline of all ranks, with imbalance before and after as counters."""
    events = [named("process_name", "ultraep", 1)]
    events += [*threads(range(trace.header.ranks), 1), *_counters(trace)]
    events += stages(trace, range(trace.header.ranks), 1)
    return timeline(events, policy=trace.header.policy, created=trace.header.created)


def _counters(trace: Trace) -> Iterator[Event]:
    begins = trace.began.min(axis=1)
    values = begins - begins.min(initial=np.inf), trace.imbalance_before, trace.imbalance_after
    for begin, before, after in zip(*(value.tolist() for value in values), strict=True):
        arguments = {"before": before, "after": after}
        begin *= TO_MICRO
        yield {"ph": "C", "name": "imbalance", "pid": 1, "ts": begin, "args": arguments}


def stages(
    trace: Trace, ranks: Collection[int], process: int, first_thread: int = 0
) -> Iterator[Event]:
    """Yield the stages of these ranks in all records, without waiting time."""
    back_G = of_backward(trace.header.stages)
    begin_NRG = np.empty(trace.seconds.shape)
    for began_NR, pass_G in ((trace.began, ~back_G), (trace.back_began, back_G)):
        seconds = trace.seconds[:, :, pass_G].astype(np.float64)
        before = np.cumsum(seconds, axis=2) - seconds
        begin_NRG[:, :, pass_G] = (began_NR - trace.began.min(initial=np.inf))[:, :, None] + before
    busy_NRG = trace.seconds - trace.waited
    for record, rank, stage in np.argwhere((busy_NRG > 0) & ~np.isnan(begin_NRG)).tolist():
        if rank in ranks:
            key = {name: int(trace.arrays[name][record]) for name in KEY}
            category = f"layer {key['layer']} {'backward' if back_G[stage] else 'forward'}"
            times = begin_NRG[record, rank, stage], busy_NRG[record, rank, stage]
            thread = process, first_thread + rank
            yield span(trace.header.stages[stage], category, *times, *thread) | {"args": key}


def span(
    name: str, category: str, begin: float, seconds: float, process: int, thread: int
) -> Event:
    """Return an event with a duration."""
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": float(begin) * TO_MICRO,
        "dur": float(seconds) * TO_MICRO,
        "pid": process,
        "tid": thread,
    }


def threads(ranks: Iterable[int], process: int, first_thread: int = 0) -> Iterator[Event]:
    """Yield the names of the threads of these ranks."""
    for rank in ranks:
        yield named("thread_name", f"rank {rank}", process, first_thread + rank)


def named(kind: str, name: str, process: int, thread: int = 0) -> Event:
    """Return the event that names a process or a thread."""
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
