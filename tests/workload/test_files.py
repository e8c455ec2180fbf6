"""Load files and recorded routing, valid and damaged; generated loads."""

import numpy as np
import pytest

from ultraep import ConfigError, FileError, workload

MATRIX = np.arange(8).reshape(2, 4)
SEQUENCE = np.stack([MATRIX, MATRIX + 1, MATRIX + 2])


def write(path, matrices):
    sequence = matrices.reshape(-1, 2, 4)
    lines = ["\n".join(",".join(map(str, row)) for row in matrix) for matrix in sequence]
    write_as = {
        ".npy": lambda: np.save(path, matrices),
        ".npz": lambda: np.savez(path, *sequence),
        ".csv": lambda: path.write_text("\n\n".join(lines) + "\n"),
    }
    write_as[path.suffix]()
    return path


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".csv"])
@pytest.mark.parametrize("matrices", [MATRIX, SEQUENCE], ids=["one", "sequence"])
def test_all_formats_hold_one_matrix_or_a_sequence(tmp_path, suffix, matrices):
    read = workload.read_loads(write(tmp_path / f"loads{suffix}", matrices))
    np.testing.assert_array_equal(read, matrices.reshape(-1, 2, 4))


BAD = {
    "loads.txt": (b"1,2", "unknown format '.txt'; choose from .npy, .npz, .csv"),
    "loads": (b"1,2", r"unknown format '\(none\)'"),
    "empty.npy": (b"", "truncated or damaged"),
    "empty.npz": (b"", "truncated or damaged"),
    "empty.csv": (b"", "holds no loads"),
    "ragged.csv": (b"1,2\n3\n", "line 2: 1 columns, the lines before have 2"),
    "float.csv": (b"1,2\n3,4.5\n", "line 2: loads must be integers"),
    "word.csv": (b"a,b\n1,2\n", "line 1: loads must be integers"),
    "shapes.csv": (b"1,2\n\n1,2,3\n", r"different shapes, \(1, 2\) and \(1, 3\)"),
    "binary.csv": (b"\xff\xfe\x00", "codec can't decode"),
}


@pytest.mark.parametrize("name", BAD)
def test_damaged_files_are_named(tmp_path, name):
    content, message = BAD[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(FileError, match=message) as caught:
        workload.read_loads(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_objects_floats_huge_numbers_and_missing_files(tmp_path):
    path = tmp_path / "loads.npy"
    for array, message in (
        (np.array([[None]]), "pickle"),
        (np.array([[np.nan]]), "integers, got float64"),
        (np.array([[2**63]], dtype=np.uint64), "too large"),
    ):
        np.save(path, array)
        with pytest.raises(FileError, match=message):
            workload.read_loads(path)
    with pytest.raises(FileError, match="no such file"):
        workload.read_loads(tmp_path / "missing.npy")


def test_windows_count_every_row(tmp_path):
    ids = np.random.default_rng(0).integers(0, 8, (50, 3, 2))
    np.savez(tmp_path / "routing.npz", first_ids=ids, first_seq_lens=np.array([50]))
    (read,) = workload.read_routing(tmp_path / "routing.npz")
    loads = workload.loads_of_windows(read, ranks=4, experts=8, tokens=20)
    assert loads.shape == (2, 3, 4, 8)
    for window, layer, rank in np.ndindex(2, 3, 4):
        begin = window * 20 + rank * 5
        counts = np.bincount(ids[begin : begin + 5, layer].reshape(-1), minlength=8)
        np.testing.assert_array_equal(loads[window, layer, rank], counts)


def test_recorded_loads_of_every_text(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "r.npz", a_ids=rng.integers(0, 6, (50, 3, 2)), b_ids=np.full((20, 3, 2), 5))
    first, second = workload.recorded_loads(tmp_path / "r.npz", ranks=4, tokens=20)
    assert first.shape == (2, 3, 4, 8)
    assert (second == [0, 0, 0, 0, 0, 10, 0, 0]).all()


def test_invalid_routing(tmp_path):
    path = tmp_path / "routing.npz"
    for content in ({"loads": MATRIX}, {"a_ids": MATRIX}):
        np.savez(path, **content)
        with pytest.raises(FileError, match="_ids of"):
            workload.read_routing(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(FileError, match="as an archive of arrays"):
        workload.read_routing(path)
    ids = np.zeros((10, 1, 1), dtype=np.int64)
    with pytest.raises(ConfigError, match="10 tokens does not divide over 3 ranks"):
        workload.loads_of_windows(ids, ranks=3, experts=2, tokens=10)
    with pytest.raises(ConfigError, match=r"0\.\.1, got 5\.\.5"):
        workload.loads_of_windows(ids + 5, ranks=2, experts=2, tokens=10)
