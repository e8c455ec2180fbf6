"""What is read piece by piece is what the trace holds; damage is told, and the rest is there."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from traces import arrived, plan_for, record

import ultraep
from ultraep import ConfigError, FileError, Topology
from ultraep.files.reading import read_arrays
from ultraep.tools.view import catalogue as catalogue_module
from ultraep.tools.view import table, traces
from ultraep.tools.view.catalogue import Catalogue, look
from ultraep.tools.view.record import numbers_of, stages_of
from ultraep.tools.view.traces import SERVED, TIMED, FileTrace, FolderTrace
from ultraep.trace import files
from ultraep.trace.files import read_piece, write_arrays
from ultraep.trace.schema import KEY, Column, fields_in_pieces
from ultraep.trace.summary import summary_of
from view.runs import (
    CONFIG,
    LAYERS,
    MOMENTS,
    TOPOLOGY,
    change,
    key_of,
    plans_of_run,
    wait_for,
    write_pieces,
    write_run,
)

EXPERTS = ("experts", "experts back")
COST = ("plan", "verify", "replicate", "weights again", "reduce")


def never():
    return False


def read(folder, **options):
    index = FolderTrace(folder, **options)
    index.read(never)
    return index


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    return write_pieces(tmp_path_factory.mktemp("pieces") / "run", odd=True)


def check_equal(found, trace):
    """All that a table holds, beside the trace."""
    np.testing.assert_array_equal(found.step, trace.step)
    np.testing.assert_array_equal(found.layer, trace.layer)
    np.testing.assert_array_equal(found.microbatch, trace.microbatch)
    np.testing.assert_array_equal(found.before, trace.imbalance_before)
    np.testing.assert_array_equal(found.after, trace.imbalance_after)
    np.testing.assert_array_equal(found.copies, trace.num_copies)
    np.testing.assert_array_equal(found.bytes, trace.bytes_moved.sum(axis=1))
    own = trace.seconds[:, :, np.isin(trace.header.stages, EXPERTS)]
    slowest, mean = own.max(axis=1).sum(axis=1), own.sum(axis=2).mean(axis=1)
    np.testing.assert_allclose(found.lost, slowest - mean, rtol=1e-5, atol=1e-9)
    saved = np.where(trace.num_copies > 0, mean * trace.imbalance_before - slowest, 0)
    np.testing.assert_allclose(found.saved, saved, rtol=1e-5, atol=1e-9)
    cost = trace.seconds[:, :, np.isin(trace.header.stages, COST)].sum(axis=2).max(axis=1)
    np.testing.assert_allclose(found.cost, cost, rtol=1e-5)
    np.testing.assert_allclose(found.stages, trace.seconds.mean(axis=0).max(axis=0), rtol=1e-6)


def places_in(trace, found):
    """Where the records of a table stand in the trace."""
    keys = zip(*(trace.arrays[name].tolist() for name in KEY), strict=True)
    place = {key: n for n, key in enumerate(keys)}
    return [place[tuple(found.key(n))] for n in range(len(found))]


@pytest.mark.parametrize("kind", ["one piece", "pieces", "file"])
def test_a_table_holds_what_the_trace_holds(kind, run, pieces, trace, tmp_path):
    if kind == "file":
        trace.save(tmp_path / "run.npz")
        found = FileTrace(tmp_path / "run.npz")
    else:
        found = read(run if kind == "one piece" else pieces)
    check_equal(found.table, trace if kind != "pieces" else ultraep.read_trace(pieces))
    assert (found.finished, found.notes, found.left_out, found.dropped) == (True, [], 0, 0)


def check_records(index, trace):
    """Every record, beside that of the trace."""
    for n in range(len(trace)):
        alone = trace.take(np.array([n]))
        key = tuple(int(trace.arrays[name][n]) for name in KEY)
        assert numbers_of(index.record(key, SERVED)) == numbers_of(alone)
        assert stages_of(index.record(key, TIMED)) == stages_of(alone)


def test_a_record_is_that_of_the_trace(pieces):
    trace = ultraep.read_trace(pieces)
    check_records(read(pieces), trace)
    for n in range(len(trace)):
        found = numbers_of(trace.take(np.array([n])))
        assert found["before"] == pytest.approx(trace.imbalance_before[n], abs=1e-6)
        assert found["after"] == pytest.approx(trace.imbalance_after[n], abs=1e-6)
        plan, copies = trace.plan(n), found["copies"]["list"]
        assert sorted((c["expert"], c["host"], c["slot"], c["tokens"]) for c in copies) == sorted(
            (*copy, quota)
            for copy, quota in zip(plan.replicas.tolist(), plan.quotas.tolist(), strict=True)
        )
        for copy in copies:
            assert copy["way"][0] == TOPOLOGY.home_of_expert[copy["expert"]]
            assert copy["way"][-1] == copy["host"]


def test_times_that_were_told_at_another_time(tmp_path):
    """A stage of forward told late, one of backward told at once: as `read_trace` has them."""
    plan = plan_for(0)
    for rank in range(2):
        with ultraep.Recorder(tmp_path / "run", plan.topology, rank=rank) as recorder:
            seconds = {"experts": 1.0, "reduce": 0.25}
            recorder.add(plan=plan, slot_rows=arrived(plan, rank), step=0, seconds=seconds)
            recorder.more(step=0, seconds={"experts": 0.5, "reduce": 0.5})
    check_records(read(tmp_path / "run"), ultraep.read_trace(tmp_path / "run"))


@pytest.mark.parametrize("version", [3, 4])
def test_records_of_rank_0_are_shown_before_the_other_ranks_were_read(tmp_path, version):
    """Also of a trace without summaries, which are computed then."""
    run = write_pieces(tmp_path / "run", version=version)
    index, trace = FolderTrace(run), ultraep.read_trace(run)
    index.read(lambda: index.version > 0)
    assert not index.complete
    assert not index.finished
    early = index.table
    np.testing.assert_array_equal(early.before, trace.imbalance_before)
    np.testing.assert_array_equal(early.copies, trace.num_copies)
    for name in ("after", "bytes", "lost", "saved", "cost"):
        assert np.isnan(getattr(early, name)).all()
    assert table.overview(early)["totals"]["after"] is None
    with pytest.raises(ConfigError, match="not all ranks were read yet"):
        index.record(early.key(0), SERVED)
    index.read(never)
    assert index.complete
    assert index.notes == []
    check_equal(index.table, trace)
    check_records(index, trace)


def test_a_summary_is_read_in_place_of_the_loads(pieces, monkeypatch):
    asked = []

    def noting(path, header, rank, names=None, **more):
        asked.append(names)
        return read_piece(path, header, rank, names, **more)

    monkeypatch.setattr(traces, "read_piece", noting)
    check_equal(read(pieces).table, ultraep.read_trace(pieces))
    assert set(asked) == {("summary", "stage_sums", "dropped")}


@pytest.mark.parametrize("first", [True, False])
def test_a_piece_without_a_record_of_its_own(tmp_path, first):
    """The last piece of a run often holds only the backward pass of earlier records."""
    run = write_run(tmp_path / "run", moments=2)
    for rank in range(TOPOLOGY.ranks):
        with ultraep.Recorder(tmp_path / "late", TOPOLOGY, rank=rank) as recorder:
            recorder.more(step=0, seconds={"reduce": 1.0})
        late = tmp_path / f"late/rank-{rank:05d}/000000.npz"
        assert len(read_arrays(late)["step"]) == 0
        whole, behind = (run / f"rank-{rank:05d}/00000{number}.npz" for number in (0, 1))
        if first:
            whole = whole.rename(behind)
        shutil.copy(late, whole.with_name("000000.npz") if first else behind)
    index, trace = read(run), ultraep.read_trace(run)
    assert index.notes == []
    check_equal(index.table, trace)
    check_records(index, trace)


def test_an_exception_ends_the_reading_of_one_trace_only(run, tmp_path, monkeypatch):
    for name in ("bad", "good"):
        shutil.copytree(run, tmp_path / name)
    read_rightly = FolderTrace.read

    def read_or_fail(self, stop):
        if self.path.name == "bad":
            raise IndexError("arrays used as indices must be of integer type")
        return read_rightly(self, stop)

    monkeypatch.setattr(FolderTrace, "read", read_or_fail)
    told = []
    catalogue = Catalogue([tmp_path], warn=told.append)
    catalogue.start()
    try:
        bad, good = catalogue.shown
        wait_for(lambda: bad.trace.finished and good.trace.finished)
        assert len(good.trace.table) == MOMENTS * LAYERS
        assert good.trace.notes == []
        (note,) = bad.trace.notes
        assert "only a part is shown" in note
        assert "IndexError: arrays used as indices" in note
        wait_for(lambda: told == [note])
    finally:
        catalogue.close()


def test_records_in_another_order_or_twice(tmp_path):
    """The first of a kind counts, and those that a rank lacks are left out, as in `read_trace`."""
    topology = Topology(ranks=2, experts=4, slots=1)
    plans = [plan_for(seed, topology) for seed in range(8)]
    orders = {0: [0, 1, 2, 3, 4, 4, 5], 1: [5, 3, 3, 2, 0, 7, 1]}
    for rank, order in orders.items():
        with ultraep.Recorder(tmp_path / "run", topology, rank=rank) as recorder:
            for n in order:
                recorder.add(plan=plans[n], slot_rows=arrived(plans[n], rank), step=n)
            for n in reversed(order):
                recorder.more(step=n, bytes_moved=n, seconds={"reduce": 0.5})
    trace, index = ultraep.read_trace(tmp_path / "run"), read(tmp_path / "run")
    found = index.table
    np.testing.assert_array_equal(found.step, trace.step)
    np.testing.assert_array_equal(found.after, trace.imbalance_after)
    np.testing.assert_array_equal(found.bytes, trace.bytes_moved.sum(axis=1))
    assert index.left_out == trace.left_out


def test_ranks_that_write_less_are_waited_for(tmp_path):
    plans = [plan_for(seed) for seed in range(6)]
    record(tmp_path / "run", plans, ranks={0: 6, 1: 4})
    index = read(tmp_path / "run")
    assert len(index.table) == 4
    assert index.left_out == 2
    with pytest.raises(ConfigError, match="no such record, or not all ranks have it"):
        index.record((5, 0, 0), SERVED)


def write_parts(folder):
    """A run whose ranks tell of backward in three parts, of the same stages."""
    for rank in range(TOPOLOGY.ranks):
        rng = np.random.default_rng(rank)
        with ultraep.Recorder(folder, TOPOLOGY, CONFIG, rank=rank) as recorder:
            for place, plan in plans_of_run().items():
                key, rows = key_of(*place), arrived(plan, rank)
                seconds = {"experts": rng.random(), "plan": rng.random()}
                assert recorder.add(plan=plan, slot_rows=rows, seconds=seconds, **key)
                for _ in range(3):
                    seconds = {"experts back": rng.random(), "reduce": rng.random()}
                    assert recorder.more(seconds=seconds, **key)
    return folder


def test_parts_of_a_stage_are_added_up_before_ranks_are_compared(tmp_path):
    """At once, and with each part of backward in a piece of its own, read one after the other."""
    parts = write_parts(tmp_path / "parts")
    trace = ultraep.read_trace(parts)
    check_equal(read(parts).table, trace)
    header = trace.header
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "header.json").write_text((parts / "header.json").read_text())
    rows = [slice(place, None, 3) for place in range(3)]
    index = FolderTrace(folder, live=True)
    for number, late in enumerate(rows):
        for rank in range(header.ranks):
            own, fields = folder / f"rank-{rank:05d}", fields_in_pieces(rank)
            own.mkdir(exist_ok=True)
            with np.load(parts / own.name / "000000.npz") as whole:
                piece = {name: whole[name] for name in whole.files if name in fields}
            for name, array in piece.items():
                if fields[name].shape[0] == "M":
                    piece[name] = array[late]
                elif number and fields[name].shape[0] in "NC":
                    piece[name] = array[:0]
            write_arrays(own / f"{number:06d}.npz", piece | summary_of(header, piece))
        index.read(never)
    check_equal(index.table, trace)


# -- while it is written -------------------------------------------------------------------------


def test_a_run_is_followed_piece_by_piece(pieces, tmp_path):
    """In any order in which ranks may write: the end is what the trace holds."""
    grown = tmp_path / "run"
    grown.mkdir()
    shutil.copy(pieces / "header.json", grown)
    index = FolderTrace(grown, live=True)
    index.read(never)
    assert len(index.table) == 0
    files = sorted(path.relative_to(pieces) for path in pieces.rglob("*.npz"))
    files.sort(key=lambda path: (path.name, -int(str(path.parent)[-1])))  # rank 0 comes last
    seen = [0]
    for path in files:
        (grown / path).parent.mkdir(exist_ok=True)
        shutil.copy(pieces / path, grown / path)
        index.read(never)
        seen.append(len(index.table))
    assert seen == sorted(seen)
    check_equal(index.table, ultraep.read_trace(pieces))
    assert index.finished
    assert index.notes == []


def test_a_folder_that_vanishes_and_comes_back(run, tmp_path, monkeypatch):
    monkeypatch.setattr(catalogue_module, "PERIOD", 0.02)
    catalogue = Catalogue([tmp_path / "run"], live=True)
    assert catalogue.shown == []
    catalogue.start()
    try:
        write_run(tmp_path / "run", moments=2)
        wait_for(lambda: catalogue.shown and catalogue.shown[0].trace is not None)
        shown = catalogue.shown[0]
        wait_for(lambda: len(shown.trace.table) == 2 * LAYERS)
        shutil.rmtree(tmp_path / "run")
        wait_for(lambda: shown.gone)
        assert len(shown.trace.table) == 2 * LAYERS
        with pytest.raises(FileError):
            catalogue.trace(0).record((0, 0, 0), SERVED)
        shutil.copytree(run, tmp_path / "run")
        wait_for(lambda: not shown.gone and len(shown.trace.table) == MOMENTS * LAYERS)
    finally:
        catalogue.close()


# -- damage --------------------------------------------------------------------------------------


def test_a_damaged_piece_is_told_and_the_rest_is_there(pieces, tmp_path):
    shutil.copytree(pieces, tmp_path / "run")
    path = tmp_path / "run/rank-00001/000001.npz"
    path.write_bytes(path.read_bytes()[:200])
    index = read(tmp_path / "run")
    assert len(index.notes) == 1
    assert "000001.npz: cannot be read" in index.notes[0]
    assert 0 < len(index.table) < MOMENTS * LAYERS
    trace = ultraep.read_trace(pieces)
    wanted = places_in(trace, index.table)
    np.testing.assert_array_equal(index.table.before, trace.imbalance_before[wanted])
    np.testing.assert_array_equal(index.table.bytes, trace.bytes_moved.sum(axis=1)[wanted])


def test_a_piece_that_is_missing_is_told(pieces, tmp_path):
    shutil.copytree(pieces, tmp_path / "run")
    (tmp_path / "run/rank-00002/000002.npz").unlink()
    (tmp_path / "run/rank-00009").mkdir()
    notes = " ".join(read(tmp_path / "run").notes)
    assert "000003.npz: not read, 000002.npz before it is missing" in notes
    assert "rank-00009: a rank too many, the trace is one of 4" in notes


def change_header(folder, **changes):
    path = folder / "header.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


HEADERS = {
    "newer": ({"version": 99}, "a trace of version 99, this program reads versions 1 to"),
    "foreign": ({"format": "other"}, "not the header of a trace"),
    "hostile": ({"ranks": 10**9}, "ranks must lie between"),
    "unknown": ({"more": 1}, "missing or unknown: more"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_trace_that_cannot_be_opened_leaves_the_others(name, run, tmp_path):
    changes, words = HEADERS[name]
    shutil.copytree(run, tmp_path / "bad")
    shutil.copytree(run, tmp_path / "good")
    change_header(tmp_path / "bad", **changes)
    catalogue = Catalogue([tmp_path])
    assert [bool(one.error) for one in catalogue.shown] == [True, False]
    assert words in catalogue.errors[0]
    catalogue.read_all()
    assert len(catalogue.trace(1).table) == MOMENTS * LAYERS
    with pytest.raises(FileError, match=words.split(",")[0]):
        catalogue.trace(0)
    catalogue.close()


def test_copies_that_make_no_sense_are_counted(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run/rank-00000/000000.npz"
    arrays = read_arrays(path)
    change(path, copies=np.full_like(arrays["copies"], 10**6))
    index = read(tmp_path / "run")
    found = numbers_of(index.record(index.table.key(0), SERVED))
    assert found["unusable"] == index.table.copies[0] > 0
    assert found["copies"]["list"] == []


def test_numbers_that_are_none_do_no_harm(run, trace, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run/rank-00001/000000.npz"
    arrays = {name: array.copy() for name, array in read_arrays(path).items()}
    arrays["seconds"][:5] = [[np.nan], [np.inf], [-np.inf], [3e38], [-1]]
    arrays["began"] = np.where(np.arange(len(arrays["began"])) % 2, np.inf, np.nan)
    arrays["bytes_moved"][:] = 2**62
    change(path, **{name: arrays[name] for name in ("seconds", "began", "bytes_moved")})
    ultraep.read_trace(tmp_path / "run").save(tmp_path / "run.npz")
    for index in (read(tmp_path / "run"), FileTrace(tmp_path / "run.npz")):
        json.dumps(table.overview(index.table), allow_nan=False)
        json.dumps(table.heat(index.table, "lost"), allow_nan=False)
    index = read(tmp_path / "run")
    for place in range(3):
        json.dumps(stages_of(index.record(index.table.key(place), TIMED)), allow_nan=False)


def test_a_piece_that_claims_too_much_is_told(run, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SMALL", 100)
    monkeypatch.setattr(files, "RATIO", 0.01)
    index = read(run)
    assert len(index.table) == 0
    assert "bytes that claim to unpack to" in index.notes[0]


def test_a_summary_that_does_not_fit_is_told(run, tmp_path):
    """Records behind additions; rows that the arrays do not have."""
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run/rank-00000/000000.npz"
    arrays = read_arrays(path)
    swapped = arrays["summary"].copy()
    swapped[0, Column.LATE] = 1
    write_arrays(path, arrays | {"summary": swapped})
    assert "the summary has records behind additions" in read(tmp_path / "run").notes[0]
    arrays |= {name: arrays[name][:1] for name in ("loads", "policy", "rates", "copy_ends")}
    write_arrays(path, arrays)
    catalogue = Catalogue([tmp_path / "run"])
    catalogue.read_all()
    with pytest.raises(FileError, match=r"000000\.npz"):
        catalogue.trace(0).record(catalogue.trace(0).table.key(5), SERVED)
    catalogue.close()


def test_too_many_layers_are_refused(run, monkeypatch):
    monkeypatch.setattr(table, "MOST_LAYERS", 2)
    for draw in (table.overview, lambda one: table.heat(one, "before")):
        with pytest.raises(ConfigError, match="3 layers, at most 2 are shown"):
            draw(read(run).table)


# -- what is drawn -------------------------------------------------------------------------------


def test_points_stand_for_several_moments(trace, run):
    found = table.overview(read(run).table, most=4)
    assert (found["steps_per_point"], found["step"]) == (3, [0, 3, 6, 9])
    moment = trace.step * 2 + trace.microbatch
    for at, begin in enumerate(found["step"]):
        own = (moment >= begin) & (moment < begin + 3)
        spans = found["lines"]["before"]
        assert spans["mean"][at] == pytest.approx(trace.imbalance_before[own].mean(), abs=1e-6)
        assert spans["max"][at] == pytest.approx(trace.imbalance_before[own].max(), abs=1e-6)
        moments = len(np.unique(moment[own]))
        assert found["lines"]["bytes"][at] == pytest.approx(trace.bytes_moved[own].sum() / moments)
    worst = trace.imbalance_before.argmax()
    assert found["worst"] == (trace.step[worst], trace.layer[worst], trace.microbatch[worst])


def test_cells_of_the_map_are_means(trace, run):
    found = table.heat(read(run).table, "after", 2, 8, most=3)
    moment = trace.step * 2 + trace.microbatch
    for layer in range(LAYERS):
        for column, begin in enumerate(found["starts"]):
            own = (moment >= begin) & (moment < begin + 2) & (trace.layer == layer)
            mean = trace.imbalance_after[own].mean()
            assert found["z"][layer][column] == pytest.approx(mean, abs=1e-6)


def test_nothing_is_drawn_of_nothing(tmp_path):
    record(tmp_path / "run", [])
    found = read(tmp_path / "run").table
    assert table.overview(found)["totals"]["records"] == 0
    assert table.heat(found, "before")["z"] == []


# -- what is found -------------------------------------------------------------------------------


def test_what_a_folder_holds(run, tmp_path):
    shutil.copytree(run, tmp_path / "demo/none/trace")
    shutil.copytree(run, tmp_path / "demo/ultraep/trace")
    (tmp_path / "demo/report.html").write_text("<p>")
    (tmp_path / "demo/result.json").write_text("{}")
    names = [(item.kind, item.name) for item in look([tmp_path / "demo"])]
    traces = [("trace", "none/trace"), ("trace", "ultraep/trace")]
    assert names == [*traces, ("report", "report.html")]
    assert look([tmp_path / "demo/result.json"]) == look([tmp_path / "demo"])
    by_report = look([tmp_path / "demo/report.html"])
    assert sorted(item.name for item in by_report) == sorted(name for _, name in names)
    assert len(look([run, run])) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [("gone", "no such file or folder"), ("empty", "nothing to view"), ("a.txt", "not a trace")],
)
def test_what_holds_nothing_is_refused(name, words, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(FileError, match=words):
        look([Path(tmp_path, name)])
