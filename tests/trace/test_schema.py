"""The schema is consistent, and old traces are read."""

import json

import numpy as np
from traces import TOPOLOGY, plan_for, record

from ultraep import Recorder, read_trace
from ultraep.trace import schema
from ultraep.trace.export import timeline_of

PLANS = [plan_for(seed) for seed in range(3)]


def test_a_trace_of_the_first_version_is_read(tmp_path):
    """It had no `waited`; nothing else has changed since."""
    run = record(tmp_path / "run", PLANS)
    header = json.loads((run / "header.json").read_text())
    (run / "header.json").write_text(json.dumps(header | {"version": 1}))
    for piece in run.glob("rank-*/*.npz"):
        with np.load(piece) as stored:
            assert not any("waited" in name for name in stored)  # optional, not recorded here
    trace = read_trace(run)
    assert trace.header.version == 1
    assert trace.waited.shape == trace.seconds.shape
    assert not trace.waited.any()
    assert len(timeline_of(trace)["traceEvents"]) > 0
    trace.save(tmp_path / "small.npz")
    assert read_trace(tmp_path / "small.npz").header.version == schema.VERSION


def test_waiting_is_a_gap_at_the_end_of_a_stage(tmp_path):
    for rank in range(2):
        with Recorder(tmp_path / "run", TOPOLOGY, rank=rank) as recorder:
            recorder.add(
                plan=PLANS[0],
                slot_rows=[1, 2, 3],
                step=0,
                began=50.0,
                seconds={"dispatch": 1.0, "experts": 4.0, "combine": 2.0},
                waited={"experts": 3.0, "combine": 2.0} if rank else {},
            )
    trace = read_trace(tmp_path / "run")
    drawn = [e for e in timeline_of(trace)["traceEvents"] if e["ph"] == "X" and e["tid"] == 1]
    assert [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in drawn] == [
        ("dispatch", 0.0, 1.0),
        ("experts", 1.0, 1.0),
    ]
    assert {e["cat"] for e in drawn} == {"layer 0 forward"}


def test_the_schema_is_consistent():
    for field in schema.FIELDS:
        assert field.since == 1 or field.default is not None  # old traces do not have it
        assert not field.late or field.join in ("ranks", "slots")
    names = [name for field in schema.FIELDS for name in (field.name, field.late) if name]
    assert len(set(names)) == len(names)
