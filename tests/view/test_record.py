"""One record: single rows of pieces, the way of its weights, what it was to take."""

import json
import shutil

import numpy as np
import pytest
from traces import arrived

import ultraep
from ultraep import BalanceConfig, FileError, Rates, Recorder
from ultraep.files.reading import archive_of, opened
from ultraep.hops import Relay
from ultraep.tools.view.folder import FolderIndex
from ultraep.tools.view.record import numbers_of, record_of_pieces, record_of_trace
from ultraep.tools.view.store import Store
from ultraep.trace.files import read_piece
from ultraep.trace.read import read_trace
from view.runs import CONFIG, TOPOLOGY, change, plans_of_run, write_pieces


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    return write_pieces(tmp_path_factory.mktemp("long") / "run", odd=True)


@pytest.fixture
def run(long, tmp_path):
    return shutil.copytree(long, tmp_path / "run")


# -- single rows ---------------------------------------------------------------------------------


def test_a_row_is_that_of_the_array(long):
    header, path = read_trace(long).header, long / "rank-00001" / "000001.npz"
    names = ("slot_rows", "seconds", "waited", "began", "more_seconds", "more_began")
    whole = read_piece(path, header, 1, names)
    assert not whole["waited"].any(), "it is not in the file"
    for number in range(len(whole["began"])):
        (found,) = Store().rows(path, header, 1, [dict.fromkeys(names, number)])
        for name in names:
            np.testing.assert_array_equal(found[name], whole[name][number])


def test_a_piece_that_was_cut_off_later_is_told(run):
    header, path = read_trace(run).header, run / "rank-00001" / "000001.npz"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(FileError, match=r"000001\.npz: cannot be read, truncated or damaged"):
        Store().rows(path, header, 1, [{"seconds": 2}])
    path.unlink()
    with pytest.raises(FileError, match="no such file"):
        Store().rows(path, header, 1, [{"seconds": 2}])


def test_arrays_of_another_shape_are_refused_before_a_row_is_read(run):
    header, path = read_trace(run).header, run / "rank-00001" / "000001.npz"
    change(path, began=np.zeros((5, 3)))
    with pytest.raises(FileError, match="began must be float64"):
        Store().rows(path, header, 1, [{"began": 0}])


def test_rows_that_do_not_lie_together_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    with (
        pytest.raises(FileError, match="no rows that lie together"),
        archive_of(tmp_path / "a.npz") as archive,
    ):
        archive.places({"a"})
    np.savez_compressed(tmp_path / "b.npz", b=np.arange(6).reshape(3, 2))
    with archive_of(tmp_path / "b.npz") as archive:
        place = archive.places({"b"})["b"]
    with opened(tmp_path / "b.npz") as file:
        assert place.row(file, 1).tolist() == [2, 3]
        with pytest.raises(ValueError, match="row 3 of 3"):
            place.row(file, 3)


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
    copies = numbers_of(record_of_trace(trace, 0))["copies"]
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
    assert numbers_of(record_of_trace(trace, 0))["copies"]["told"] == ""
    file.write_text(json.dumps(header | {"relay": "pigeon"}))
    with pytest.raises(FileError, match="relay 'pigeon' in 0 chunks is not known"):
        read_trace(tmp_path / "run")


def test_what_a_plan_was_to_take_is_that_of_the_plan(tmp_path):
    config = BalanceConfig(rates=Rates(row=1000, copy=20_000, each=300, layer=5000))
    plan = record_one(tmp_path / "run", config=config)
    index = FolderIndex(tmp_path / "run", Store())
    index.read(lambda: False)
    priced = numbers_of(record_of_pieces(index, 0))["priced"]
    assert priced["time"] == pytest.approx(plan.time / 1e12)
    assert priced["without"] == pytest.approx(plan.time_without_copies / 1e12)
    assert priced["rates"] == str(config.rates)
    record_one(tmp_path / "other")
    assert numbers_of(record_of_trace(read_trace(tmp_path / "other"), 0))["priced"] is None
