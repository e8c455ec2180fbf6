"""A recorder's trace can be read, also after a kill, and recording never waits for the disk."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import TOPOLOGY, arrived, plan_for, record

import ultraep
from ultraep import BalanceConfig, FileError, Recorder, Topology, read_trace
from ultraep.trace import files
from ultraep.trace import record as recording
from ultraep.trace.schema import STAGES

SOURCE = Path(ultraep.__file__).parent.parent
PATIENCE = 60.0


@st.composite
def runs(draw):
    ranks, per_rank = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    experts = ranks * per_rank
    homes = draw(
        st.none() | st.lists(st.integers(0, ranks - 1), min_size=experts, max_size=experts)
    )
    slots = draw(st.integers(0, min(2, experts)))
    topology = Topology(ranks=ranks, experts=experts, slots=slots, homes=homes)
    config = BalanceConfig(
        policy=draw(st.sampled_from(["ultraep", "quota", "none"])),
        tolerance=draw(st.sampled_from([0.0, 0.013])),
        locality=draw(st.booleans()),
    )
    return topology, config, draw(st.lists(st.integers(0, 1000), max_size=4))


@settings(max_examples=25)
@given(runs())
def test_a_recording_is_read_again(tmp_path_factory, run):
    topology, config, seeds = run
    folder = tmp_path_factory.mktemp("run") / "trace"
    plans = [plan_for(seed, topology, config) for seed in seeds]
    record(folder, plans, topology=topology, config=config, note="ä note")
    trace = read_trace(folder)
    trace.save(folder.parent / "trace.npz")
    for stored in (trace, read_trace(folder.parent / "trace.npz")):
        assert stored.header == trace.header
        assert stored.header.note == "ä note"
        assert stored.topology == topology
        assert stored.header.config == config
        assert (stored.dropped, stored.left_out, len(stored)) == (0, 0, len(plans))
        assert [stored.plan(n).digest() for n in range(len(plans))] == [p.digest() for p in plans]
        assert [stored.plan(n).config for n in range(len(plans))] == [p.config for p in plans]
        assert stored.rank_loads.tolist() == [plan.rank_loads.tolist() for plan in plans]
        assert stored.imbalance_after.tolist() == [plan.imbalance for plan in plans]
        assert stored.imbalance_before.tolist() == [plan.initial_imbalance for plan in plans]
        assert stored.num_copies.tolist() == [plan.num_replicas for plan in plans]
        shape = (len(plans), bool(plans), topology.ranks, topology.experts)
        assert stored.by_layer().shape == shape


def test_every_argument_is_recorded(tmp_path):
    plan = plan_for(1)
    for rank in range(2):
        with Recorder(tmp_path / "run", TOPOLOGY, rank=rank) as recorder:
            for layer in (3, 7):
                key = {"step": 5, "layer": layer, "microbatch": 2}
                recorder.add(
                    **key,
                    plan=plan,
                    slot_rows=[rank, layer, 9],
                    bytes_moved=100 + rank,
                    seconds={"plan": 0.5, "experts": 0.25},
                    began=1000.0 + rank,
                )
                seconds = {"reduce": 2.0, "plan": 1.0}
                recorder.more(**key, bytes_moved=11, seconds=seconds, began=2000.5)
                recorder.more(**key, bytes_moved=1, seconds={"reduce": 1.0}, began=2000.0)
    trace = read_trace(tmp_path / "run")
    assert (trace.step.tolist(), trace.microbatch.tolist()) == ([5, 5], [2, 2])
    assert trace.steps.tolist() == [5]
    assert trace.layers.tolist() == trace.layer.tolist() == [3, 7]
    assert trace.slot_rows.tolist() == [[0, 3, 9, 1, 3, 9], [0, 7, 9, 1, 7, 9]]
    assert trace.rank_loads.tolist() == [[12, 13], [16, 17]]
    assert trace.bytes_moved.tolist() == [[112, 113]] * 2
    assert trace.began.tolist() == [[1000.0, 1001.0]] * 2
    assert trace.back_began.tolist() == [[2000.0, 2000.0]] * 2
    seconds = dict(zip(STAGES, trace.seconds[1, 1].tolist(), strict=True))
    assert {name: value for name, value in seconds.items() if value} == {
        "plan": 1.5,
        "experts": 0.25,
        "reduce": 3.0,
    }
    assert trace.of_layer(7).plan(0) == plan
    assert trace.of_layer(7).slot_rows.tolist() == [[0, 7, 9, 1, 7, 9]]
    assert trace.of_layer(0).imbalance_after.shape == (0,)


@pytest.mark.parametrize(
    ("ranks", "left_out"), [({0: 6, 1: 4}, 2), ({0: 2, 1: 5}, 3), ({0: 1}, 1)], ids=str
)
def test_records_that_some_ranks_lack_are_left_out(tmp_path, ranks, left_out):
    plans = [plan_for(seed) for seed in range(6)]
    trace = read_trace(record(tmp_path / "run", plans, ranks=ranks))
    assert (len(trace), trace.left_out) == (min(ranks[0], ranks.get(1, 0)), left_out)
    assert [trace.plan(n) for n in range(len(trace))] == plans[: len(trace)]
    assert trace.by_layer().shape == (len(trace), min(1, len(trace)), 2, 4)


WRONG = {
    "topology": ({"plan": plan_for(0, Topology(ranks=2, experts=6))}, "the plan was made for"),
    "config": ({"plan": plan_for(0, config=BalanceConfig(tolerance=0.1))}, "was made with"),
    "rows": ({"slot_rows": [1, 2]}, "rows of each of the 3 slots of rank 0, got .1, 2."),
    "negative rows": ({"slot_rows": [1, 2, -3]}, "slots of rank 0"),
    "fractions": ({"slot_rows": [0.5, 1, 2]}, "slot_rows must be integers"),
    "stage": ({"seconds": {"lunch": 1.0}}, "unknown stage 'lunch'; the trace has loads, plan"),
    "step": ({"step": -1}, "step must be >= 0, .* got -1, 0, 0"),
    "layer": ({"layer": 2**31}, "layer and microbatch must lie in"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_invalid_records_are_refused(tmp_path, changes, message):
    with Recorder(tmp_path / "run", TOPOLOGY) as recorder:
        valid = {"plan": plan_for(0), "slot_rows": [1, 2, 3], "step": 0}
        with pytest.raises(ultraep.UltraEPError, match=message):
            recorder.add(**(valid | changes))
    assert len(read_trace(tmp_path / "run")) == 0


def test_folders_that_cannot_be_used_are_refused(tmp_path, monkeypatch):
    record(tmp_path / "run", [plan_for(0)])
    (tmp_path / "thesis.txt").write_text("years of work")
    for rank, path, message in (
        (0, "run", "already holds a trace: remove it, or choose a new"),
        (1, "run", "already holds a trace"),
        (0, "", r"not empty, it holds run: choose a new folder"),
        (0, "thesis.txt", "is a file, but a trace needs a folder"),
        (0, "thesis.txt/run", "cannot be written to"),
    ):
        with pytest.raises(FileError, match=message):
            Recorder(tmp_path / path, TOPOLOGY, rank=rank)
    assert len(read_trace(tmp_path / "run")) == 1

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(FileError, match="new: cannot be written to: Permission denied"):
        Recorder(tmp_path / "new", TOPOLOGY)


@pytest.fixture
def stuck(monkeypatch):
    """Writing waits until the event is set."""
    go = threading.Event()

    def wait(path, arrays):
        assert go.wait(PATIENCE)
        files.write_arrays(path, arrays)

    monkeypatch.setattr(recording, "write_arrays", wait)
    yield go
    go.set()


def test_a_full_queue_drops_and_counts_and_never_waits(tmp_path, stuck, caplog):
    plan, memory, rows = plan_for(0), 20_000, arrived(plan_for(0), 1)
    recorder = Recorder(tmp_path / "run", TOPOLOGY, rank=1, memory=memory)
    begin = time.monotonic()
    stored = sum(recorder.add(plan=plan, slot_rows=rows, step=step) for step in range(2000))
    assert time.monotonic() - begin < PATIENCE / 2  # the writer is stuck all the while
    assert stored < memory / 1000
    assert recorder.dropped == 2000 - stored > 0
    stuck.set()
    recorder.close()
    assert f"{recorder.dropped} records were dropped" in caplog.text
    trace = read_trace(record(tmp_path / "run", [plan] * 2000, ranks={0: 2000}))
    assert trace.dropped == trace.left_out == recorder.dropped
    assert len(trace) == stored


def test_closing_gives_up_on_a_stuck_writer(tmp_path, stuck, monkeypatch, caplog):
    monkeypatch.setattr(recording, "CLOSE_SECONDS", 0.05)
    recorder = Recorder(tmp_path / "run", TOPOLOGY)
    recorder.add(plan=plan_for(0), slot_rows=[1, 2, 3], step=0)
    begin = time.monotonic()
    recorder.close()
    recorder.close()
    assert time.monotonic() - begin < PATIENCE / 2
    assert "still being written" in caplog.text
    assert not recorder.add(plan=plan_for(0), slot_rows=[1, 2, 3], step=1)  # closed
    stuck.set()
    recorder._writer._thread.join(PATIENCE)


def test_a_full_disk_ends_the_trace_but_not_the_run(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    recorder = Recorder(tmp_path / "run", TOPOLOGY)
    monkeypatch.setattr(os, "replace", full)
    for step in range(3):
        recorder.add(plan=plan_for(0), slot_rows=[1, 2, 3], step=step)
    with caplog.at_level(logging.WARNING):
        recorder.close()
    assert recorder.dropped == 3
    assert "recording ends here: " in caplog.text
    assert "000000.npz: cannot be written: No space left on device" in caplog.text
    assert len(read_trace(tmp_path / "run")) == 0
    assert os.listdir(tmp_path / "run" / "rank-00000") == []


def test_pieces_are_written_by_bytes_and_by_time(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "PIECE_BYTES", 5000)
    plan, folder = plan_for(0), tmp_path / "run" / "rank-00000"
    with Recorder(tmp_path / "run", TOPOLOGY, memory=1 << 24) as recorder:
        for step in range(50):
            recorder.add(plan=plan, slot_rows=arrived(plan, 0), step=step)
        wait_for_pieces(folder, 1)
        recorder.add(plan=plan, slot_rows=arrived(plan, 0), step=50)
    assert sorted(path.name for path in folder.iterdir()) == ["000000.npz", "000001.npz"]
    trace = read_trace(record(tmp_path / "run", [plan] * 51, ranks={1: 51}))
    assert trace.step.tolist() == list(range(51))
    assert all(trace.plan(n) == plan for n in range(51))


def wait_for_pieces(folder, count):
    until = time.monotonic() + PATIENCE
    while len(list(folder.glob("*.npz"))) < count:
        assert time.monotonic() < until
        time.sleep(0.01)


RECORD = """
import itertools, sys, time
for name in ("numba", "torch", "triton", "typer", "rich", "scipy"):
    sys.modules[name] = None
import ultraep
from ultraep.trace import record
record.FIRST_WAIT = record.LONGEST_WAIT = record.POLL_SECONDS = 0.01
topology = ultraep.Topology(ranks=1, experts=2, slots=0)
plan = ultraep.plan([[3, 4]], topology, backend="reference")
recorder = ultraep.Recorder(sys.argv[1], topology)
for step in itertools.count() if len(sys.argv) > 2 else range(3):
    recorder.add(plan=plan, slot_rows=[3, 4], step=step)
    time.sleep(0.0005)
"""


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "not closed"])
def test_a_process_without_torch_that_does_not_close_leaves_a_readable_trace(tmp_path, killed):
    command = [sys.executable, "-c", RECORD, str(tmp_path / "run"), *(["endless"] * killed)]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(SOURCE)})
    try:
        wait_for_pieces(tmp_path / "run/rank-00000", 5 if killed else 1)
    finally:
        if killed:
            os.kill(process.pid, signal.SIGKILL)
        assert process.wait(PATIENCE) == (-signal.SIGKILL if killed else 0)
    trace = read_trace(tmp_path / "run")
    assert trace.step.tolist() == list(range(len(trace)))
    assert len(trace) > 3 if killed else len(trace) == 3
    assert (trace.slot_rows == [3, 4]).all()
