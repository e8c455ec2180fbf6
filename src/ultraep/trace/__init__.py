"""Traces: what a run did, microbatch by microbatch, in plain arrays. See docs/traces.md.

A trace is a folder with `header.json` (ranks, experts, slots, homes, policy, stages, version) and
the pieces of every rank, compressed .npz files. Rank 0 keeps what all ranks know alike, and every
rank what it alone knows:

    all      loads [N, R, E], copies [C, 3], quotas [C]
    a rank   rows that arrived in its slots [N, L], bytes it moved [N], seconds of its stages [N, G]

Records are known by step, layer and microbatch. All of this stands in schema.py, and only there.

    with Recorder("run", topology) as recorder:       # or Balancer(..., record="run")
        recorder.add(step=0, plan=plan, slot_rows=arrived)
    trace = read_trace("run")
    trace.plan(0), trace.rank_loads, trace.imbalance_after
"""

from ultraep.trace.read import Trace, read_trace
from ultraep.trace.record import Recorder
from ultraep.trace.schema import STAGES, VERSION, Header

__all__ = ["STAGES", "VERSION", "Header", "Recorder", "Trace", "read_trace"]
