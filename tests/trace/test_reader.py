"""Old, damaged and foreign traces."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from traces import plan_for, record

import ultraep
from ultraep import FileError, read_trace
from ultraep.trace.schema import VERSION
from ultraep_tools.replay import differing
from ultraep_tools.sim.workload import read_workload


@pytest.fixture
def run(tmp_path):
    return record(tmp_path / "run", [plan_for(seed) for seed in range(4)])


def edit(path, **changes):
    """Replace arrays of a file; None removes one."""
    with np.load(path) as stored:
        arrays = dict(stored) | changes
    np.savez_compressed(path, **{k: v for k, v in arrays.items() if v is not None})


def edit_header(folder, **changes):
    path = folder / "header.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v != "gone"}))


def cut(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])


PIECE = "rank-00000/000000.npz"
BAD = {
    "cut piece": (lambda d: cut(d / PIECE), "000000.npz: .*truncated"),
    "foreign file": (
        lambda d: (d / "rank-00000/a.npz").write_bytes(b""),
        "a.npz: expected piece 000001",
    ),
    "missing piece": (
        lambda d: (d / PIECE).rename(d / "rank-00000/000001.npz"),
        "000001.npz: expected piece 000000",
    ),
    "foreign arrays": (lambda d: np.savez(d / PIECE, a=np.zeros(3)), "missing or unknown: a, "),
    "an array less": (lambda d: edit(d / PIECE, loads=None), "missing or unknown: loads"),
    "shape": (
        lambda d: edit(d / PIECE, loads=np.zeros((4, 2, 5), np.int32)),
        r"loads must be int32 \[4, 2, 4\], got int32 \[4, 2, 5\]",
    ),
    "type": (lambda d: edit(d / PIECE, step=np.zeros(4)), "step must be int64"),
    "dimensions": (lambda d: edit(d / PIECE, quotas=np.zeros((1, 1), np.int32)), "quotas must be"),
    "ends": (lambda d: edit(d / PIECE, copy_ends=np.full(4, 99, np.int32)), "replicas, got 99"),
    "pickle": (lambda d: edit(d / PIECE, policy=np.array([{}] * 4, object)), "cannot be read"),
    "rank too many": (
        lambda d: shutil.copytree(d / "rank-00000", d / "rank-00002"),
        "rank-00002: unexpected, the trace has only 2 ranks",
    ),
    "no header": (lambda d: (d / "header.json").unlink(), "holds no trace, there is no header"),
    "cut header": (lambda d: cut(d / "header.json"), "header.json: truncated or damaged"),
    "foreign header": (lambda d: (d / "header.json").write_text("[]"), "not the header of a trace"),
    "version": (
        lambda d: edit_header(d, version=7),
        f"version 7 of the trace format, but this ultraep reads 1 to {VERSION}",
    ),
    "entry less": (lambda d: edit_header(d, slots="gone"), "missing or unknown: slots"),
    "topology": (lambda d: edit_header(d, experts=5), "header.json: 5 experts do not divide"),
    "config": (lambda d: edit_header(d, tolerance=-1), "header.json: tolerance must lie"),
    "stages": (lambda d: edit_header(d, stages=["a", "a"]), "stages must differ"),
    "many stages": (
        lambda d: edit_header(d, stages=[str(number) for number in range(300)]),
        "300 stages, but a trace has at most 256",
    ),
    "many ranks": (
        lambda d: edit_header(d, ranks=1 << 16, experts=1 << 20, domain=1 << 16),
        "65,536 ranks, but a trace has at most 4,096",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), BAD.values(), ids=BAD)
def test_a_bad_trace_is_one_clear_line(run, spoil, message):
    spoil(run)
    with pytest.raises(FileError, match=message) as caught:
        read_trace(run)
    assert "\n" not in str(caught.value)


def test_a_trace_of_version_1_is_read(run, tmp_path):
    """Version 1 had no `rates` and `speeds`."""
    edit_header(run, version=1)
    trace = read_trace(run)
    assert trace.header.version == 1
    assert not trace.rates.any()
    trace.save(tmp_path / "small.npz")
    assert read_trace(tmp_path / "small.npz").header.version == VERSION


def test_paths_without_a_trace(tmp_path):
    with pytest.raises(FileError, match="none: no such file or folder"):
        read_trace(tmp_path / "none")
    with pytest.raises(FileError, match="holds no trace"):
        read_trace(tmp_path)
    (tmp_path / "text.npz").write_text("text")
    with pytest.raises(FileError, match=r"text.npz: .*as an archive of arrays"):
        read_trace(tmp_path / "text.npz")
    np.savez(tmp_path / "loads.npz", loads=np.ones((2, 2)))
    with pytest.raises(FileError, match=r"loads.npz: not a trace, its header is not one text"):
        read_trace(tmp_path / "loads.npz")


def test_the_only_trace_in_a_folder_is_read(run, tmp_path):
    assert len(read_trace(tmp_path)) == 4
    record(tmp_path / "again", [plan_for(0)])
    with pytest.raises(FileError, match=r"holds 2 traces; pass one of them: .*again, .*run$"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loads": None}, "missing or unknown: loads"),
        ({"header": np.array("{}")}, "not the header"),
        ({"header": np.zeros(3)}, "its header is not one text"),
        ({"slot_rows": np.zeros((4, 5), np.int32)}, r"slot_rows must be int32 \[4, 6\]"),
    ],
)
def test_a_bad_file_is_one_clear_line(run, tmp_path, changes, message):
    path = tmp_path / "small.npz"
    read_trace(run).save(path)
    assert len(read_trace(path)) == 4
    edit(path, **changes)
    with pytest.raises(FileError, match=message):
        read_trace(path)


PATH = Path(__file__).parents[2] / "benchmarks/results/trace_train_ep8_h200_202611.npz"


@pytest.fixture(scope="module")
def trace():
    return ultraep.read_trace(PATH)


def test_the_documented_numbers(trace):
    assert trace.loads.shape == (1800, 8, 64)
    assert (trace.loads.sum(axis=(1, 2)) == 8 * 4096 * 4).all()
    assert trace.imbalance_before.mean() == pytest.approx(1.482, abs=5e-4)
    assert trace.imbalance_before.max() == pytest.approx(4.318, abs=5e-4)
    assert trace.imbalance_after.mean() == pytest.approx(1.003, abs=5e-4)
    assert trace.imbalance_after.max() == pytest.approx(1.046, abs=5e-4)


@pytest.mark.parametrize("number", range(0, 1800, 150))
def test_rows_arrived_as_planned_and_a_new_plan_has_the_same_peak(trace, number):
    recorded = trace.plan(number)
    assert (trace.rank_loads[number] == recorded.rank_loads).all()
    again = ultraep.plan(trace.loads[number], recorded.topology, recorded.config)
    assert again.imbalance == recorded.imbalance
    assert again.num_replicas <= recorded.num_replicas


def test_most_plans_equal_the_recorded_plans(trace):
    assert len(differing(trace)) == 25  # the search has changed where the mean is out of reach


def test_the_simulator_reads_it(trace):
    workload = read_workload(PATH, experts=64, top_k=4)
    loads = workload.expert_loads(2, np.arange(3), 8 * 4096 * 4)
    expected = trace.of_layer(2).loads[:3].sum(axis=1)
    assert (loads == expected).all()
