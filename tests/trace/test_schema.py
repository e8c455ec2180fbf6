"""The schema alone says what a trace holds: a field more goes all the way, old traces are read."""

import csv
import json

import numpy as np
import pytest
from traces import TOPOLOGY, arrived, plan_for, record

from ultraep import ConfigError, FileError, Recorder, read_trace
from ultraep.trace import schema
from ultraep.trace.chrome import timeline_of
from ultraep.trace.export import write_csv
from ultraep.trace.schema import Field

NEXT = schema.VERSION + 1
QUEUED = Field(
    *("queued", "int32", "N", "ranks"), default=0, late="more_queued", table="sum", since=NEXT
)
WARMTH = Field(
    *("warmth", "float32", "NG", "ranks"), default=0, late="more_warmth", table="max", since=NEXT
)
HELD = Field("held", "int32", "NL", "slots", default=-1, since=NEXT)
FANOUT = Field(
    *("fanout", "int32", "N", "same"), plan="max_fanout", default=0, table="plain", since=NEXT
)
EXTRA = (QUEUED, WARMTH, HELD, FANOUT)
PLANS = [plan_for(seed) for seed in range(3)]


@pytest.fixture
def extended(monkeypatch):
    """New fields of a rank, of its stages, of its slots and of the plan; nothing else changes."""
    monkeypatch.setattr(schema, "FIELDS", schema.FIELDS + EXTRA)
    monkeypatch.setattr(schema, "VERSION", NEXT)


def tell(folder):
    """A trace in which steps 1 and 2 tell the new fields, and step 0 does not."""
    for rank in range(2):
        with Recorder(folder, TOPOLOGY, rank=rank) as recorder:
            for step, plan in enumerate(PLANS):
                new = {"queued": 10 * rank + step, "warmth": {"plan": step}, "held": [step] * 3}
                told = new if step else {}
                recorder.add(plan=plan, slot_rows=arrived(plan, rank), step=step, **told)
            recorder.more(step=2, queued=100, warmth={"plan": 1.5})
    return folder


@pytest.mark.usefixtures("extended")
def test_new_fields_travel_from_the_recorder_to_the_table(tmp_path):
    trace = read_trace(tell(tmp_path / "run"))
    trace.save(tmp_path / "small.npz")
    for found in (trace, read_trace(tmp_path / "small.npz")):
        assert found.header.version == NEXT
        assert found.queued.tolist() == [[0, 0], [1, 11], [102, 112]]
        plan = found.header.stages.index("plan")
        assert found.warmth[:, 1, plan].tolist() == [0, 1, 3.5]
        assert found.warmth.sum() == 2 * 4.5
        assert found.held.tolist() == [[-1] * 6, [1] * 6, [2] * 6]
        assert found.fanout.tolist() == [plan.max_fanout for plan in PLANS]
        assert found.take(np.array([2, 1])).queued.tolist() == [[102, 112], [1, 11]]
        write_csv(found, tmp_path / "run.csv")
        with (tmp_path / "run.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [int(row["queued"]) for row in rows] == [0, 12, 214]
        assert [float(row["warmth plan"]) for row in rows] == [0, 1, 3.5]
        assert [int(row["fanout"]) for row in rows] == found.fanout.tolist()
        assert "seconds plan" in rows[0]


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"queue": 1}, "unknown field 'queue'; a rank tells bytes_moved, seconds, waited, queued"),
        ({"queued": [1, 2]}, r"queued must be int32 \[\], got int64 \[2\]"),
        ({"queued": "many"}, r"queued must be int32 \[\], got <U4 \[\]"),
        ({"held": [1, 2]}, r"held must be int32 \[3\], got int64 \[2\]"),
        ({"warmth": {"lunch": 1}}, "unknown stage 'lunch'"),
    ],
)
def test_what_does_not_fit_the_schema_is_refused_where_it_is_told(tmp_path, told, message):
    with Recorder(tmp_path / "run", TOPOLOGY) as recorder:
        with pytest.raises(ConfigError, match=message):
            recorder.add(plan=PLANS[0], slot_rows=[1, 2, 3], step=0, **told)
        with pytest.raises(ConfigError, match="unknown field 'held'"):
            recorder.more(step=0, held=[1, 2, 3])  # has no array for what is told later


def test_a_field_that_came_later_reads_as_its_default(tmp_path, monkeypatch):
    record(tmp_path / "run", PLANS)
    read_trace(tmp_path / "run").save(tmp_path / "small.npz")
    monkeypatch.setattr(schema, "FIELDS", schema.FIELDS + EXTRA)
    monkeypatch.setattr(schema, "VERSION", NEXT)
    for name in ("run", "small.npz"):
        trace = read_trace(tmp_path / name)
        assert trace.header.version == NEXT - 1
        assert trace.queued.tolist() == [[0, 0]] * 3
        assert (trace.held == -1).all()
        assert trace.fanout.tolist() == [0, 0, 0]
        assert trace.held.shape == (3, 6)
        assert [trace.plan(n) for n in range(3)] == PLANS


def test_a_trace_of_the_first_version_is_read(tmp_path):
    """It had no `waited`; nothing else has changed since."""
    run = record(tmp_path / "run", PLANS)
    header = json.loads((run / "header.json").read_text())
    (run / "header.json").write_text(json.dumps(header | {"version": 1}))
    for piece in run.glob("rank-*/*.npz"):
        with np.load(piece) as found:
            assert not any("waited" in name for name in found)  # nobody told, nothing is written
    trace = read_trace(run)
    assert trace.header.version == 1
    assert trace.waited.shape == trace.seconds.shape
    assert not trace.waited.any()
    assert len(timeline_of(trace)["traceEvents"]) > 0
    trace.save(tmp_path / "small.npz")
    assert read_trace(tmp_path / "small.npz").header.version == schema.VERSION


def test_a_newer_trace_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as newer:
        newer.setattr(schema, "FIELDS", schema.FIELDS + EXTRA)
        newer.setattr(schema, "VERSION", NEXT)
        tell(tmp_path / "run")
    message = f"a trace of version {NEXT}, this program reads versions 1 to {schema.VERSION}$"
    with pytest.raises(FileError, match=message):
        read_trace(tmp_path / "run")


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
