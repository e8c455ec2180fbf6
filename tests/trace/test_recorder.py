"""What is recorded is read again, a killed process leaves a trace, and nobody ever waits."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import TOPOLOGY, arrived, plan_for, record

import ultraep
from ultraep import BalanceConfig, ConfigError, FileError, Recorder, Topology, read_trace
from ultraep.trace import files, writer
from ultraep.trace.schema import STAGES

SOURCE = Path(ultraep.__file__).parent.parent
PATIENCE = 60.0


@st.composite
def runs(draw):
    ranks, per_rank = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    homes = None
    if draw(st.booleans()):
        homes = draw(
            st.lists(
                st.integers(0, ranks - 1), min_size=ranks * per_rank, max_size=ranks * per_rank
            )
        )
    slots = draw(st.integers(0, 2).filter(lambda n: n <= ranks * per_rank))
    topology = Topology(ranks=ranks, experts=ranks * per_rank, slots=slots, homes=homes)
    config = BalanceConfig(
        policy=draw(st.sampled_from(["ultraep", "quota", "none"])),
        tolerance=draw(st.sampled_from([0.0, 0.013])),
        locality=draw(st.booleans()),
    )
    seeds = draw(st.lists(st.integers(0, 1000), max_size=4))
    return topology, config, seeds


@settings(max_examples=25)
@given(runs())
def test_what_is_recorded_is_read_again(tmp_path_factory, run):
    topology, config, seeds = run
    folder = tmp_path_factory.mktemp("run") / "trace"
    plans = [plan_for(seed, topology, config) for seed in seeds]
    record(folder, plans, topology=topology, config=config, note="ä note")
    trace = read_trace(folder)
    trace.save(folder / "small.npz")
    for found in (trace, read_trace(folder / "small.npz")):
        assert found.header == trace.header
        assert found.header.note == "ä note"
        assert found.topology == topology
        assert found.header.config == config
        assert (found.dropped, found.left_out, len(found)) == (0, 0, len(plans))
        assert [found.plan(n).digest() for n in range(len(plans))] == [p.digest() for p in plans]
        assert [found.plan(n).config for n in range(len(plans))] == [p.config for p in plans]
        assert found.rank_loads.tolist() == [plan.rank_loads.tolist() for plan in plans]
        assert found.imbalance_after.tolist() == [plan.imbalance for plan in plans]
        assert found.imbalance_before.tolist() == [plan.initial_imbalance for plan in plans]
        assert found.num_copies.tolist() == [plan.num_replicas for plan in plans]
        assert found.by_layer().shape == (len(plans), bool(plans), *topology_shape(topology))


def topology_shape(topology):
    return topology.ranks, topology.experts


def test_all_that_is_told(tmp_path):
    plan = plan_for(1)
    for rank in range(2):
        with Recorder(tmp_path / "run", TOPOLOGY, rank=rank) as recorder:
            for layer in (3, 7):
                name = {"step": 5, "layer": layer, "microbatch": 2}
                recorder.add(
                    **name,
                    plan=plan,
                    slot_rows=[rank, layer, 9],
                    bytes_moved=100 + rank,
                    seconds={"plan": 0.5, "experts": 0.25},
                    began=1000.0 + rank,
                )
                recorder.more(
                    **name, bytes_moved=11, seconds={"reduce": 2.0, "plan": 1.0}, began=2000.5
                )
                recorder.more(**name, bytes_moved=1, seconds={"reduce": 1.0}, began=2000.0)
    trace = read_trace(tmp_path / "run")
    assert trace.step.tolist() == [5, 5]
    assert trace.steps.tolist() == [5]
    assert trace.layers.tolist() == trace.layer.tolist() == [3, 7]
    assert trace.microbatch.tolist() == [2, 2]
    assert trace.slot_rows.tolist() == [[0, 3, 9, 1, 3, 9], [0, 7, 9, 1, 7, 9]]
    assert trace.rank_loads.tolist() == [[12, 13], [16, 17]]
    assert trace.bytes_moved.tolist() == [[112, 113]] * 2
    assert trace.began.tolist() == [[1000.0, 1001.0]] * 2
    assert trace.back_began.tolist() == [[2000.0, 2000.0]] * 2
    by_stage = dict(zip(STAGES, trace.seconds[1, 1].tolist(), strict=True))
    assert {name: s for name, s in by_stage.items() if s} == {
        "plan": 1.5,
        "experts": 0.25,
        "reduce": 3.0,
    }
    assert len(trace.of_layer(7)) == 1
    assert trace.of_layer(7).plan(0) == plan
    assert trace.of_layer(7).slot_rows.tolist() == [[0, 7, 9, 1, 7, 9]]
    assert len(trace.of_layer(0)) == 0
    assert trace.of_layer(0).imbalance_after.shape == (0,)


def test_a_record_without_more_has_no_backward(tmp_path):
    trace = read_trace(record(tmp_path / "run", [plan_for(1)]))
    assert np.isnan(trace.back_began).all()
    assert not trace.seconds.any()
    assert (np.abs(trace.began - time.time()) < 600).all()


def test_records_that_not_all_ranks_have_are_left_out(tmp_path):
    plans = [plan_for(seed) for seed in range(6)]
    trace = read_trace(record(tmp_path / "run", plans, ranks={0: 6, 1: 4}))
    assert (len(trace), trace.left_out) == (4, 2)
    assert [trace.plan(n) for n in range(4)] == plans[:4]
    trace = read_trace(record(tmp_path / "other", plans, ranks={0: 2, 1: 5}))
    assert (len(trace), trace.left_out) == (2, 3)


def test_a_rank_that_wrote_nothing(tmp_path):
    trace = read_trace(record(tmp_path / "run", [plan_for(0)], ranks={0: 1}))
    assert (len(trace), trace.left_out) == (0, 1)
    assert trace.by_layer().shape == (0, 0, 2, 4)


def test_ranks_may_record_in_another_order(tmp_path):
    plans = [plan_for(seed) for seed in range(5)]
    for rank, order in ((0, [3, 0, 4, 1]), (1, [0, 1, 2, 3, 4])):
        with Recorder(tmp_path / "run", TOPOLOGY, rank=rank) as recorder:
            for step in order:
                recorder.add(plan=plans[step], slot_rows=arrived(plans[step], rank), step=step)
                recorder.more(step=step, seconds={"reduce": step})
    trace = read_trace(tmp_path / "run")
    assert trace.step.tolist() == [3, 0, 4, 1]
    assert trace.left_out == 1
    assert trace.rank_loads.tolist() == [plans[n].rank_loads.tolist() for n in (3, 0, 4, 1)]
    reduce = trace.header.stages.index("reduce")
    assert trace.seconds[:, :, reduce].tolist() == [[3, 3], [0, 0], [4, 4], [1, 1]]


def test_of_two_records_with_one_name_the_first_counts(tmp_path):
    plans = [plan_for(0), plan_for(1)]
    for rank in range(2):
        with Recorder(tmp_path / "run", TOPOLOGY, rank=rank) as recorder:
            for plan in plans:
                recorder.add(plan=plan, slot_rows=arrived(plan, rank), step=2**40)
    trace = read_trace(tmp_path / "run")
    assert (len(trace), trace.left_out) == (1, 1)
    assert trace.plan(0) == plans[0]
    assert trace.plan(-1) == plans[0]


def test_names_too_large_to_be_numbered(tmp_path):
    plan = plan_for(0)
    names = [(2**62, 2**31 - 1, 2**31 - 1), (0, 2**31 - 1, 0)]
    for rank in range(2):
        with Recorder(tmp_path / "run", TOPOLOGY, rank=rank) as recorder:
            for step, layer, number in names[: 2 - rank]:
                recorder.add(
                    plan=plan, slot_rows=arrived(plan, rank), step=step, layer=layer,
                    microbatch=number,
                )  # fmt: skip
    trace = read_trace(tmp_path / "run")
    assert (trace.step.tolist(), trace.left_out) == ([2**62], 1)


def test_a_policy_of_one_call_is_kept(tmp_path):
    plans = [plan_for(3, config=BalanceConfig(policy=name)) for name in ("ultraep", "none")]
    trace = read_trace(record(tmp_path / "run", plans))
    assert trace.policy.tolist() == ["ultraep", "none"]
    assert trace.plan(1).config.policy == "none"


WRONG = {
    "topology": ({"plan": plan_for(0, Topology(ranks=2, experts=6))}, "the plan is one for"),
    "config": (
        {"plan": plan_for(0, config=BalanceConfig(tolerance=0.1))},
        "the plan was made with",
    ),
    "rows": ({"slot_rows": [1, 2]}, "rows of each of the 3 slots of rank 0, got .1, 2."),
    "negative rows": ({"slot_rows": [1, 2, -3]}, "slots of rank 0"),
    "no rows": ({"slot_rows": [0.5, 1, 2]}, "slot_rows must be integers"),
    "stage": ({"seconds": {"lunch": 1.0}}, "unknown stage 'lunch'; the trace has loads, plan"),
    "step": ({"step": -1}, "must not be negative: -1, 0, 0"),
    "layer": ({"layer": 2**31}, "must not be negative"),
}


@pytest.mark.parametrize(("given", "message"), WRONG.values(), ids=WRONG)
def test_records_that_are_none(tmp_path, given, message):
    with Recorder(tmp_path / "run", TOPOLOGY) as recorder:
        right = {"plan": plan_for(0), "slot_rows": [1, 2, 3], "step": 0}
        with pytest.raises(ultraep.UltraEPError, match=message):
            recorder.add(**(right | given))
    assert len(read_trace(tmp_path / "run")) == 0


def test_settings_that_cannot_work(tmp_path):
    with pytest.raises(ConfigError, match=r"rank must lie in 0\.\.1, got 2"):
        Recorder(tmp_path, TOPOLOGY, rank=2)
    with pytest.raises(ConfigError, match="memory must be at least 1 byte"):
        Recorder(tmp_path, TOPOLOGY, memory=0)
    with pytest.raises(ConfigError, match="stages must differ"):
        Recorder(tmp_path, TOPOLOGY, stages=["a", "a"])
    assert not list(tmp_path.iterdir())


# -- folders -------------------------------------------------------------------------------------


def test_a_folder_that_holds_a_trace_is_refused(tmp_path):
    record(tmp_path / "run", [plan_for(0)])
    for rank in range(2):
        with pytest.raises(FileError, match="holds a trace already: remove it, or name a new"):
            Recorder(tmp_path / "run", TOPOLOGY, rank=rank)
    assert len(read_trace(tmp_path / "run")) == 1


def test_a_folder_with_other_things_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(FileError, match=r"not empty, it holds thesis\.txt: name a new folder"):
        Recorder(tmp_path, TOPOLOGY)


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="a file, a trace needs a folder"):
        Recorder(tmp_path / "file", TOPOLOGY)
    with pytest.raises(FileError, match="cannot be written to"):
        Recorder(tmp_path / "file" / "run", TOPOLOGY)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(FileError, match="run: cannot be written to: Permission denied"):
        Recorder(tmp_path / "run", TOPOLOGY)


def test_a_trace_that_was_discarded_leaves_nothing(tmp_path):
    for rank in (0, 1):
        recorder = Recorder(tmp_path / "run", TOPOLOGY, rank=rank)
        recorder.discard()
    assert not list((tmp_path / "run").iterdir())


# -- the thread that writes ----------------------------------------------------------------------


@pytest.fixture
def stuck(monkeypatch):
    """Writing waits until the event is set."""
    go, begun = threading.Event(), threading.Event()

    def wait(path, arrays):
        begun.set()
        assert go.wait(PATIENCE)
        files.write_arrays(path, arrays)

    monkeypatch.setattr(writer, "write_arrays", wait)
    go.begun = begun
    yield go
    go.set()


def test_a_full_queue_drops_and_counts_and_never_waits(tmp_path, stuck, caplog):
    plan, memory = plan_for(0), 20_000
    recorder = Recorder(tmp_path / "run", TOPOLOGY, rank=1, memory=memory)
    begin = time.monotonic()
    kept = [recorder.add(plan=plan, slot_rows=arrived(plan, 1), step=step) for step in range(2000)]
    assert time.monotonic() - begin < PATIENCE / 2  # the writer is stuck all the while
    assert sum(kept) < memory / 1000
    assert recorder._writer._held <= memory
    assert recorder.dropped == 2000 - sum(kept) > 0
    stuck.set()
    recorder.close()
    assert f"{recorder.dropped} records were dropped" in caplog.text
    record(tmp_path / "run", [plan] * 2000, ranks={0: 2000})
    trace = read_trace(tmp_path / "run")
    assert trace.dropped == recorder.dropped
    assert len(trace) == sum(kept)
    assert trace.left_out == recorder.dropped


def test_closing_leaves_a_stuck_writer_behind(tmp_path, stuck, monkeypatch, caplog):
    monkeypatch.setattr(writer, "PATIENCE", 0.05)
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


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path, monkeypatch, caplog):
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


def test_pieces_come_by_bytes_and_by_time(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "PIECE_BYTES", 5000)
    plan = plan_for(0)
    with Recorder(tmp_path / "run", TOPOLOGY, memory=1 << 24) as recorder:
        for step in range(50):
            recorder.add(plan=plan, slot_rows=arrived(plan, 0), step=step)
        until = time.monotonic() + PATIENCE
        while not list((tmp_path / "run" / "rank-00000").glob("*.npz")):
            assert time.monotonic() < until
            time.sleep(0.01)
        recorder.add(plan=plan, slot_rows=arrived(plan, 0), step=50)
    pieces = sorted(path.name for path in (tmp_path / "run" / "rank-00000").iterdir())
    assert pieces == ["000000.npz", "000001.npz"]
    record(tmp_path / "run", [plan] * 51, ranks={1: 51})
    trace = read_trace(tmp_path / "run")
    assert trace.step.tolist() == list(range(51))
    assert all(trace.plan(n) == plan for n in range(51))


def test_a_recorder_that_nobody_closes_writes_at_the_end(tmp_path):
    code = """
import sys, ultraep
topology = ultraep.Topology(ranks=1, experts=2, slots=0)
plan = ultraep.plan([[3, 4]], topology, backend="reference")
recorder = ultraep.Recorder(sys.argv[1], topology)
recorder.add(plan=plan, slot_rows=[3, 4], step=0)
"""
    run_python(code, tmp_path / "run")
    assert len(read_trace(tmp_path / "run")) == 1


def run_python(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr


ENDLESS = """
import itertools, sys, time, ultraep
from ultraep.trace import writer
writer.FIRST_WAIT = writer.LONGEST_WAIT = writer.LOOK = 0.01
topology = ultraep.Topology(ranks=1, experts=2, slots=0)
plan = ultraep.plan([[3, 4]], topology, backend="reference")
recorder = ultraep.Recorder(sys.argv[1], topology)
for step in itertools.count():
    recorder.add(plan=plan, slot_rows=[3, 4], step=step)
    time.sleep(0.0005)
"""


def test_a_killed_process_leaves_a_readable_trace(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )
    try:
        until = time.monotonic() + PATIENCE
        while len(list((tmp_path / "run").glob("rank-00000/*.npz"))) < 5:
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(PATIENCE)
    trace = read_trace(tmp_path / "run")
    assert len(trace) > 0
    assert trace.step.tolist() == list(range(len(trace)))
    assert trace.plan(len(trace) - 1).quotas.tolist() == []
    assert (trace.slot_rows == [3, 4]).all()


def test_recording_needs_nothing_but_numpy(tmp_path):
    code = """
import sys
for name in ("numba", "torch", "triton", "typer", "rich", "scipy"):
    sys.modules[name] = None
import ultraep
topology = ultraep.Topology(ranks=1, experts=2, slots=0)
plan = ultraep.plan([[3, 4]], topology, backend="reference")
with ultraep.Recorder(sys.argv[1], topology) as recorder:
    recorder.add(plan=plan, slot_rows=[3, 4], step=0)
assert ultraep.read_trace(sys.argv[1]).plan(0) == plan
"""
    run_python(code, tmp_path / "run")
