"""A trace for other programs: a table as CSV, a timeline for Perfetto or chrome://tracing.

In the timeline every rank is a thread. A record is drawn where it began; its stages follow each
other, those of backward where backward began. Imbalance before and after are counters above.

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

from ultraep.outputs import write_text
from ultraep.trace.read import Trace
from ultraep.trace.schema import BACKWARD

TO_MICRO = 1e6
Event = dict[str, Any]


def write_csv(trace: Trace, path: str | Path) -> None:
    """One line per record; seconds are those of the slowest rank."""
    stages = [f"seconds {stage}" for stage in trace.header.stages]
    names = ["step", "layer", "microbatch", "policy", "tokens", "copies"]
    names += ["imbalance before", "imbalance after", "bytes moved", *stages]
    columns = [
        *(trace.step, trace.layer, trace.microbatch, trace.policy),
        *(trace.rank_loads.sum(axis=1), trace.num_copies),
        *(trace.imbalance_before.round(6), trace.imbalance_after.round(6)),
        trace.bytes_moved.sum(axis=1),
        *(np.char.mod("%.7g", trace.seconds.max(axis=1)).T),
    ]
    text = StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(names)
    table.writerows(zip(*(column.tolist() for column in columns), strict=True))
    write_text(path, text.getvalue())


def write_timeline(trace: Trace, path: str | Path) -> None:
    """As JSON, in the format of Chrome's tracing."""
    timeline = {
        "traceEvents": list(_events(trace)),
        "displayTimeUnit": "ms",
        "otherData": {"policy": trace.header.policy, "created": trace.header.created},
    }
    write_text(path, json.dumps(timeline))


def _events(trace: Trace) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "ultraep"}}
    for rank in range(trace.header.ranks):
        name = {"name": f"rank {rank}"}
        yield {"ph": "M", "name": "thread_name", "pid": 1, "tid": rank, "args": name}
    if not len(trace):
        return
    zero, stages = float(trace.began.min()), list(enumerate(trace.header.stages))
    ahead = [(place, stage) for place, stage in stages if stage not in BACKWARD]
    back = [(place, stage) for place, stage in stages if stage in BACKWARD]
    before, after = trace.imbalance_before, trace.imbalance_after
    for record in range(len(trace)):
        begin = float(trace.began[record].min()) - zero
        values = {"before": float(before[record]), "after": float(after[record])}
        yield {"ph": "C", "name": "imbalance", "pid": 1, "ts": begin * TO_MICRO, "args": values}
        for rank in range(trace.header.ranks):
            yield from _stages(trace, record, rank, trace.began[record, rank] - zero, ahead)
            yield from _stages(trace, record, rank, trace.back_began[record, rank] - zero, back)


def _stages(
    trace: Trace, record: int, rank: int, begin: float, stages: list[tuple[int, str]]
) -> Iterator[Event]:
    """Stages that took time, one after the other."""
    place = f"layer {trace.layer[record]}"
    arguments = {"step": int(trace.step[record]), "microbatch": int(trace.microbatch[record])}
    for index, stage in stages:
        seconds = float(trace.seconds[record, rank, index])
        if seconds > 0 and not np.isnan(begin):
            yield {
                "ph": "X",
                "name": stage,
                "cat": place,
                "ts": float(begin) * TO_MICRO,
                "dur": seconds * TO_MICRO,
                "pid": 1,
                "tid": rank,
                "args": arguments | {"layer": int(trace.layer[record])},
            }
            begin += seconds
