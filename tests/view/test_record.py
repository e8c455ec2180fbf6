"""One record: single rows of pieces, the way of its weights, what it was to take."""

import json
import shutil

import numpy as np
import pytest
from traces import arrived

import ultraep
from ultraep import BalanceConfig, FileError, Rates, Recorder
from ultraep.files.reading import archive_of, reading
from ultraep.hops import Relay
from ultraep.tools.view.record import numbers_of
from ultraep.tools.view.traces import SERVED, TIMED, FolderTrace
from ultraep.trace.read import read_trace
from view.runs import CONFIG, TOPOLOGY, change, plans_of_run, write_pieces


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    return write_pieces(tmp_path_factory.mktemp("long") / "run", odd=True)


@pytest.fixture
def run(long, tmp_path):
    return shutil.copytree(long, tmp_path / "run")


# -- rows of pieces ------------------------------------------------------------------------------


def opened_trace(folder):
    trace = FolderTrace(folder)
    trace.read(lambda: False)
    return trace


def test_a_piece_that_was_cut_off_later_is_told(run):
    trace, path = opened_trace(run), run / "rank-00001" / "000001.npz"
    key = trace.table.key(6)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(FileError, match=r"000001\.npz: cannot be read, truncated or damaged"):
        trace.record(key, TIMED)
    path.unlink()
    with pytest.raises(FileError, match="no such file"):
        trace.record(key, TIMED)


def test_arrays_of_another_shape_are_refused(run):
    trace, path = opened_trace(run), run / "rank-00001" / "000001.npz"
    change(path, began=np.zeros((5, 3)))
    with pytest.raises(FileError, match="began must be float64"):
        trace.record(trace.table.key(6), TIMED)


def test_a_row_is_that_of_the_array(tmp_path):
    array = np.arange(6).reshape(3, 2)
    np.savez_compressed(tmp_path / "a.npz", a=array)
    np.savez(tmp_path / "b.npz", a=array)
    for name in ("a.npz", "b.npz"):
        with archive_of(tmp_path / name) as archive:
            rows = archive.rows({"a"})["a"]
            assert [rows.row(archive.file, n).tolist() for n in range(3)] == array.tolist()
            with pytest.raises(FileError, match="row 3 of 3"), reading(tmp_path / name):
                rows.row(archive.file, 3)
    np.savez(tmp_path / "c.npz", c=np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    with (
        pytest.raises(FileError, match="no rows that lie together"),
        archive_of(tmp_path / "c.npz") as archive,
    ):
        archive.rows({"c"})


# -- how weights were sent, and what a plan was to take ------------------------------------------


def record_one(folder, *, relay=None, config=CONFIG):
    plan = next(iter(plans_of_run(1, 1).values()))
    plan = ultraep.plan(plan.loads, TOPOLOGY, config)
    told = {} if relay is None else {"relay": relay}
    for rank in range(TOPOLOGY.ranks):
        with Recorder(folder, TOPOLOGY, config, rank=rank, **told) as recorder:
            recorder.add(plan=plan, slot_rows=arrived(plan, rank), step=0)
    return plan


@pytest.mark.parametrize("mode", ["direct", "chain", "auto"])
def test_a_trace_tells_how_weights_were_sent(tmp_path, mode):
    record_one(tmp_path / "run", relay=Relay(mode, 8))
    trace = read_trace(tmp_path / "run")
    assert (trace.header.relay, trace.header.chunks) == (mode, 8)
    copies = numbers_of(trace)["copies"]
    assert copies["told"] == mode
    if mode != "auto":
        longest = max(len(one["way"]) for one in copies["list"])
        assert copies["relay"] == ("chain" if longest > 2 else "direct")
        assert mode == "chain" or longest == 2


def test_a_balancer_tells_how_it_sends(tmp_path):
    pytest.importorskip("torch")
    told = {"relay": "direct", "chunks": 2}
    ultraep.Balancer("alone", experts=4, slots=1, record=tmp_path / "run", **told).close()
    header = read_trace(tmp_path / "run").header
    assert (header.relay, header.chunks) == ("direct", 2)


def test_a_trace_that_does_not_tell_is_read(tmp_path):
    record_one(tmp_path / "run")
    file = tmp_path / "run" / "header.json"
    header = json.loads(file.read_text())
    assert (header.pop("relay"), header.pop("chunks")) == ("", 0)
    file.write_text(json.dumps(header))
    trace = read_trace(tmp_path / "run")
    assert (trace.header.relay, trace.header.chunks) == ("", 0)
    assert numbers_of(trace)["copies"]["told"] == ""
    file.write_text(json.dumps(header | {"relay": "pigeon"}))
    with pytest.raises(FileError, match="relay 'pigeon' in 0 chunks is not known"):
        read_trace(tmp_path / "run")


def test_what_a_plan_was_to_take_is_that_of_the_plan(tmp_path):
    config = BalanceConfig(rates=Rates(row=1000, copy=20_000, each=300, layer=5000))
    plan = record_one(tmp_path / "run", config=config)
    trace = opened_trace(tmp_path / "run")
    priced = numbers_of(trace.record((0, 0, 0), SERVED))["priced"]
    assert priced["time"] == pytest.approx(plan.time / 1e12)
    assert priced["without"] == pytest.approx(plan.time_without_replicas / 1e12)
    assert priced["rates"] == str(config.rates)
    record_one(tmp_path / "other")
    assert numbers_of(read_trace(tmp_path / "other"))["priced"] is None
