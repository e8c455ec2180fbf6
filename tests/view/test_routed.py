"""Imbalance as routed without reading the loads, and single rows of pieces."""

import json
import shutil

import numpy as np
import pytest
from traces import arrived

import ultraep
from ultraep import BalanceConfig, FileError, Rates, Recorder
from ultraep.hops import Relay
from ultraep.inputs import archive_of, opened
from ultraep.trace.files import write_arrays
from ultraep.trace.read import read_trace
from ultraep.view import columns as columns_module
from ultraep.view.index import FEW_PIECES, FolderIndex, ahead
from ultraep.view.record import numbers_of, record_of_pieces, record_of_trace
from ultraep.view.routed import moved_rows
from ultraep.view.store import Rows, Store, piece_arrays
from view.runs import CONFIG, TOPOLOGY, plans_of_run, write_pieces

PER_PIECE, PIECES = 4, 15


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A run in so many pieces that a sample is read before all of it."""
    assert PIECES > FEW_PIECES
    folder = tmp_path_factory.mktemp("long") / "run"
    return write_pieces(folder, moments=20, per_piece=PER_PIECE, odd=True)


@pytest.fixture
def run(long, tmp_path):
    return shutil.copytree(long, tmp_path / "run")


def read(folder, *, loads=True):
    """An index that has read all; `loads`: whether it may look at the loads of pieces."""
    index = FolderIndex(folder, Store())
    if not loads:
        index._before = lambda _: pytest.fail("the loads were read")
    index.read(lambda: False)
    assert index.finished
    assert index.done == index.total
    return index


def edit(path, **changes):
    with np.load(path) as found:
        write_arrays(path, {name: found[name] for name in found.files} | changes)


# -- what was routed -----------------------------------------------------------------------------


def test_rows_and_plans_tell_what_was_routed(long):
    index, trace = read(long, loads=False), read_trace(long)
    assert len(index.table) == len(trace) == PER_PIECE * PIECES
    assert index.table.before.tolist() == trace.imbalance_before.tolist()
    assert index.notes == []


def test_moved_rows_are_those_between_home_and_host(long):
    trace = read_trace(long)
    moved = moved_rows(trace.header, trace.arrays)
    assert (trace.initial_rank_loads - moved).tolist() == trace.rank_loads.tolist()


def test_copies_that_make_no_sense_move_nothing(long):
    trace = read_trace(long)
    copies = np.full_like(trace.copies, 99)
    assert not moved_rows(trace.header, trace.arrays | {"copies": copies}).any()


def test_rows_that_did_not_arrive_as_planned_are_found_out(run):
    for path in run.glob("rank-00001/*.npz"):
        rows = piece_arrays(path, read_trace(run).header, 1, ("slot_rows",))["slot_rows"]
        edit(path, slot_rows=rows + 7)
    index, trace = read(run), read_trace(run)
    assert index.notes == ["rows did not arrive as planned: all loads are read"]
    assert index.table.before.tolist() == trace.imbalance_before.tolist()


def test_what_is_too_large_to_be_derived_is_read(long, monkeypatch):
    monkeypatch.setattr(columns_module, "MOST_MOVED", 100)
    index = read(long)
    assert index.table.before.tolist() == read_trace(long).imbalance_before.tolist()
    assert index.notes == []


def test_records_that_a_rank_has_not_told_of_yet_come_later(run):
    own = run / "rank-00002"
    last = sorted(own.iterdir())[-1]
    late = last.rename(run.parent / last.name)
    index = FolderIndex(run, Store(), live=True)
    index.read(lambda: False)
    early = len(index.table)
    assert 0 < early < PER_PIECE * PIECES
    assert not np.isnan(index.table.before).any()
    shutil.move(late, last)
    index.read(lambda: False)
    trace = read_trace(run)
    assert index.table.before.tolist() == trace.imbalance_before.tolist()


def test_a_damaged_piece_of_loads_costs_its_records_only(run):
    path = run / "rank-00000" / "000003.npz"
    path.write_bytes(path.read_bytes()[:300])
    index = read(run)
    assert len(index.table) == PER_PIECE * (PIECES - 1)
    assert not np.isnan(index.table.before).any()
    assert any("000003.npz" in note for note in index.notes)


def test_jobs_are_worked_on_ahead_and_answered_in_order():
    begun = []

    def work(job):
        begun.append(job)
        return job * job

    found = ahead(work, range(40))
    assert next(found) == 0
    assert len(begun) < 12
    assert list(found) == [job * job for job in range(1, 40)]


# -- single rows ---------------------------------------------------------------------------------


def test_a_row_is_that_of_the_array(long):
    header, path = read_trace(long).header, long / "rank-00001" / "000001.npz"
    rows = Rows(header)
    names = ("slot_rows", "seconds", "waited", "began", "more_seconds", "more_began")
    whole = rows.learn(path, 1, names)
    for number in range(len(whole["began"])):
        (found,) = rows.told(path, [dict.fromkeys(names, number)])
        for name in names:
            np.testing.assert_array_equal(found[name], whole[name][number])


def test_a_piece_that_was_cut_off_later_is_told(run):
    header, path = read_trace(run).header, run / "rank-00001" / "000001.npz"
    rows = Rows(header)
    rows.learn(path, 1, ("step",))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(FileError, match=r"000001\.npz: cannot be read, truncated or damaged"):
        rows.told(path, [{"seconds": 2}])
    path.unlink()
    with pytest.raises(FileError, match="no such file"):
        rows.told(path, [{"seconds": 2}])


def test_arrays_of_another_shape_are_refused_before_a_row_is_read(run):
    header, path = read_trace(run).header, run / "rank-00001" / "000001.npz"
    edit(path, began=np.zeros((5, 3)))
    with pytest.raises(FileError, match="began must be float64"):
        Rows(header).learn(path, 1, ("step",))


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
