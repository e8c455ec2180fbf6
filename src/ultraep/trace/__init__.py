"""Traces: records of a run, one per microbatch and layer, in plain arrays. See docs/traces.md.

A trace is a folder with `header.json` (ranks, experts, slots, homes, policy, stages, version) and
the pieces of every rank, compressed .npz files `rank-00000/000000.npz`, `000001.npz`, ...:

    rank 0        loads [N, R, E], replicas [C, 3], quotas [C]
    every rank    rows that arrived in its slots [N, L], bytes it moved [N], seconds by stage [N, G]

Step, layer and microbatch identify a record. schema.py defines all fields.

    with Recorder("run", topology) as recorder:       # or Balancer(..., record="run")
        recorder.add(step=0, plan=plan, slot_rows=arrived)
    trace = read_trace("run")
    trace.plan(0), trace.rank_loads, trace.imbalance_after
"""

from ultraep.trace.read import Trace, read_trace
from ultraep.trace.record import Recorder
from ultraep.trace.schema import STAGES, VERSION, Header

__all__ = ["STAGES", "VERSION", "Header", "Recorder", "Trace", "read_trace"]
