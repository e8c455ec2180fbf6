"""The viewer reads a trace piece by piece, names damaged pieces, and shows the rest."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from traces import arrived, plan_for

import ultraep
from ultraep import BalanceConfig, ConfigError, FileError, Rates, Recorder, Topology
from ultraep.files.reading import read_arrays
from ultraep.trace.read import read_trace
from ultraep.trace.schema import IGNORED, KEY
from ultraep_tools.view import table
from ultraep_tools.view.catalogue import Catalogue
from ultraep_tools.view.table import numbers_of, stages_of
from ultraep_tools.view.traces import FolderTrace, WholeTrace
from view.runs import (
    CONFIG,
    LAYERS,
    MOMENTS,
    TOPOLOGY,
    change,
    plans_of_run,
    write_piece,
    write_pieces,
    write_run,
)

EXPERTS = ("experts", "experts back")
COST = ("plan", "verify", "replicate", "weights again", "reduce")


def read(folder):
    trace = FolderTrace(folder)
    trace.read()
    return trace


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    return write_pieces(tmp_path_factory.mktemp("pieces") / "run", odd=True)


def check_equal(shown, trace):
    for name in KEY:
        np.testing.assert_array_equal(getattr(shown, name), trace.arrays[name])
    np.testing.assert_array_equal(shown.before, trace.imbalance_before)
    np.testing.assert_array_equal(shown.after, trace.imbalance_after)
    np.testing.assert_array_equal(shown.copies, trace.num_copies)
    np.testing.assert_array_equal(shown.bytes, trace.bytes_moved.sum(axis=1))
    own = trace.seconds[:, :, np.isin(trace.header.stages, EXPERTS)]
    slowest, mean = own.max(axis=1).sum(axis=1), own.sum(axis=2).mean(axis=1)
    np.testing.assert_allclose(shown.lost, slowest - mean, rtol=1e-5, atol=1e-9)
    saved = np.where(trace.num_copies > 0, mean * trace.imbalance_before - slowest, 0)
    np.testing.assert_allclose(shown.saved, saved, rtol=1e-5, atol=1e-9)
    cost = trace.seconds[:, :, np.isin(trace.header.stages, COST)].sum(axis=2).max(axis=1)
    np.testing.assert_allclose(shown.cost, cost, rtol=1e-5)
    np.testing.assert_allclose(shown.stages, trace.seconds.mean(axis=0).max(axis=0), rtol=1e-6)
    assert shown.layer_seconds == pytest.approx(trace.seconds.sum(axis=2).mean(), rel=1e-6)
    np.testing.assert_array_equal(shown.rows, trace.loads.sum(axis=(1, 2)))
    np.testing.assert_array_equal(shown.balanced, trace.policy != "none")


def check_records(shown, trace):
    for n in range(len(trace)):
        alone, own = trace.take(np.array([n])), shown.record(shown.table.key(n))
        assert numbers_of(own) == numbers_of(alone)
        assert stages_of(own) == stages_of(alone)


@pytest.mark.parametrize("source", ["one piece", "pieces", "pieces of version 4", "file"])
def test_table_and_records_equal_the_trace(source, run, pieces, trace, tmp_path):
    if source == "file":
        trace.save(tmp_path / "run.npz")
        trace = ultraep.read_trace(tmp_path / "run.npz")  # with rounded times
        shown = WholeTrace(tmp_path, trace)
    else:
        if source == "pieces of version 4":
            pieces = write_pieces(tmp_path / "run")
            for path in pieces.rglob("*.npz"):  # with a summary
                change(path, **dict.fromkeys(IGNORED, np.zeros(1)))
        folder = run if source == "one piece" else pieces
        shown, trace = read(folder), ultraep.read_trace(folder)
    check_equal(shown.table, trace)
    check_records(shown, trace)
    assert (shown.notes, shown.left_out, shown.dropped) == ([], 0, 0)


def test_records_in_another_order_or_twice(tmp_path):
    """The first record of a key counts; records that a rank lacks are left out."""
    topology = Topology(ranks=2, experts=4, slots=1)
    plans = [plan_for(seed, topology) for seed in range(8)]
    orders = {0: [0, 1, 2, 3, 4, 4, 5], 1: [5, 3, 3, 2, 0, 7, 1]}
    for rank, order in orders.items():
        with ultraep.Recorder(tmp_path / "run", topology, rank=rank) as recorder:
            for n in order:
                recorder.add(plan=plans[n], slot_rows=arrived(plans[n], rank), step=n)
            for n in reversed(order):
                recorder.more(step=n, bytes_moved=n, seconds={"reduce": 0.5})
    trace, shown = ultraep.read_trace(tmp_path / "run"), read(tmp_path / "run")
    np.testing.assert_array_equal(shown.table.step, trace.step)
    np.testing.assert_array_equal(shown.table.after, trace.imbalance_after)
    np.testing.assert_array_equal(shown.table.bytes, trace.bytes_moved.sum(axis=1))
    with pytest.raises(ConfigError, match="no such record, or not all ranks have it yet"):
        shown.record((4, 0, 0))


@pytest.mark.parametrize("piece", [0, 1])
def test_additions_in_other_pieces_are_added_up_before_ranks_are_compared(tmp_path, piece):
    """The last pieces of a run often hold only the backward pass of earlier records.

    piece: the piece with the records.
    """
    run, plans, shown = tmp_path / "run", plans_of_run().items(), None
    for number in range(3):
        for rank in range(TOPOLOGY.ranks):
            write_piece(
                run, rank, number, records=plans if number == piece else (), additions=plans
            )
        shown = shown or FolderTrace(run)
        shown.read()
    trace = ultraep.read_trace(run)
    check_equal(shown.table, trace)
    check_records(shown, trace)
    assert shown.notes == []


def test_a_run_is_followed_piece_by_piece(pieces, tmp_path):
    """In any order in which ranks may write, the table ends up equal to the trace."""
    grown = tmp_path / "run"
    grown.mkdir()
    shutil.copy(pieces / "header.json", grown)
    shown, sizes = read(grown), [0]
    written = sorted(path.relative_to(pieces) for path in pieces.rglob("*.npz"))
    written.sort(key=lambda path: (path.name, -int(str(path.parent)[-1])))  # rank 0 comes last
    for path in written:
        (grown / path).parent.mkdir(exist_ok=True)
        shutil.copy(pieces / path, grown / path)
        shown.read()
        sizes.append(len(shown.table))
    assert sizes == sorted(sizes)
    check_equal(shown.table, ultraep.read_trace(pieces))
    assert shown.notes == []


def test_a_folder_that_disappears_and_holds_another_trace(tmp_path):
    write_run(tmp_path / "run", moments=2)
    catalogue = Catalogue([tmp_path / "run"])
    (item,) = catalogue.items
    shutil.rmtree(tmp_path / "run")
    catalogue.refresh()
    with pytest.raises(FileError):
        catalogue.trace("run").record((0, 0, 0))
    assert len(item.trace.table) == 2 * LAYERS
    record_one(tmp_path / "run", note="another trace")
    catalogue.refresh()
    assert item.trace.header.note == "another trace"
    assert len(item.trace.table) == 1


def test_a_damaged_piece_is_named_and_the_rest_is_shown(pieces, tmp_path):
    run = shutil.copytree(pieces, tmp_path / "run")
    path = run / "rank-00001/000001.npz"
    path.write_bytes(path.read_bytes()[:200])
    shown, trace = read(run), ultraep.read_trace(pieces)
    assert len(shown.notes) == 1
    assert "000001.npz: cannot be read" in shown.notes[0]
    assert 0 < len(shown.table) < MOMENTS * LAYERS
    keys = list(zip(*(trace.arrays[name].tolist() for name in KEY), strict=True))
    rows = [keys.index(shown.table.key(n)) for n in range(len(shown.table))]
    np.testing.assert_array_equal(shown.table.before, trace.imbalance_before[rows])
    np.testing.assert_array_equal(shown.table.bytes, trace.bytes_moved.sum(axis=1)[rows])


def test_any_number_becomes_valid_json(run, tmp_path):
    path = shutil.copytree(run, tmp_path / "run") / "rank-00001/000000.npz"
    seconds = read_arrays(path)["seconds"].copy()
    seconds[:5] = [[np.nan], [np.inf], [-np.inf], [3e38], [-1]]
    began = np.where(np.arange(len(seconds)) % 2, np.inf, np.nan)
    change(path, seconds=seconds, began=began, bytes_moved=np.full(len(seconds), 2**62))
    whole = WholeTrace(tmp_path, ultraep.read_trace(tmp_path / "run"))
    for shown in (read(tmp_path / "run"), whole):
        json.dumps(table.overview(shown.table), allow_nan=False)
        for place in range(3):
            json.dumps(stages_of(shown.record(shown.table.key(place))), allow_nan=False)


def test_points_stand_for_several_moments(trace, run):
    shown = read(run).table
    numbers = table.overview(shown, most=4)
    assert (numbers["steps_per_point"], numbers["step"]) == (3, [0, 3, 6, 9])
    moment, lines = trace.step * 2 + trace.microbatch, numbers["lines"]
    for at, begin in enumerate(numbers["step"]):
        own = (moment >= begin) & (moment < begin + 3)
        before = trace.imbalance_before[own]
        assert lines["before"]["mean"][at] == pytest.approx(before.mean(), abs=1e-6)
        assert lines["before"]["max"][at] == pytest.approx(before.max(), abs=1e-6)
        moments = len(np.unique(moment[own]))
        assert lines["bytes"][at] == pytest.approx(trace.bytes_moved[own].sum() / moments)
    worst = trace.imbalance_before.argmax()
    assert shown.worst(np.arange(len(trace))) == tuple(trace.arrays[name][worst] for name in KEY)


def test_totals_are_those_of_the_balanced_records(tmp_path):
    """A run may measure the policy `none` for comparison."""
    loads = plans_of_run(1, 1)[0, 0].loads
    plans = [ultraep.plan(loads, TOPOLOGY, replace(CONFIG, policy=n)) for n in ("none", "ultraep")]
    for rank in range(TOPOLOGY.ranks):
        with Recorder(tmp_path, TOPOLOGY, CONFIG, rank=rank) as recorder:
            for step, plan in enumerate(plans):
                recorder.add(plan=plan, slot_rows=arrived(plan, rank), step=step)
    numbers = table.overview(read(tmp_path).table)
    totals = numbers["totals"]
    assert (totals["records"], numbers["unbalanced"], totals["moments"]) == (1, 1, 1)
    assert totals["before"] == pytest.approx(plans[0].imbalance, abs=1e-6)
    assert totals["after"] == pytest.approx(plans[1].imbalance, abs=1e-6)
    assert numbers["layers"]["after"] == [totals["after"]]
    lines = [round(plan.imbalance, 6) for plan in plans]
    assert numbers["lines"]["after"]["mean"] == pytest.approx(lines)


def test_names_are_short_and_distinct(run, tmp_path):
    for name in ("demo/none/trace", "demo/ultraep/trace", "other/ultraep/trace"):
        shutil.copytree(run, tmp_path / name)
    names = {
        ("demo",): ["none", "ultraep"],
        ("demo", "other"): ["none", "demo/ultraep", "other/ultraep"],
        ("demo/none/trace", "demo/none"): ["none"],
        ("other",): ["ultraep"],
    }
    for paths, expected in names.items():
        catalogue = Catalogue([tmp_path / path for path in paths])
        assert [item.name for item in catalogue.items] == expected


@pytest.mark.parametrize(
    ("name", "words"),
    [("gone", "no such file or folder"), ("empty", "nothing to view"), ("a.txt", "not a trace")],
)
def test_paths_without_traces_are_refused(name, words, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(FileError, match=words):
        Catalogue([tmp_path / name])


def record_one(folder, *, config=CONFIG, **options):
    plan = ultraep.plan(plans_of_run(1, 1)[0, 0].loads, TOPOLOGY, config)
    for rank in range(TOPOLOGY.ranks):
        with Recorder(folder, TOPOLOGY, config, rank=rank, **options) as recorder:
            recorder.add(plan=plan, slot_rows=arrived(plan, rank), step=0)
    return plan


def test_the_predicted_time_is_the_time_of_the_plan(tmp_path):
    config = BalanceConfig(rates=Rates(row=1000, copy=20_000, each=300, layer=5000))
    plan = record_one(tmp_path / "run", config=config)
    times = [plan.time / 1e12, plan.time_without_replicas / 1e12]
    assert numbers_of(read_trace(tmp_path / "run"))["predicted"] == pytest.approx(times)
    record_one(tmp_path / "other")
    assert numbers_of(read_trace(tmp_path / "other"))["predicted"] == []
