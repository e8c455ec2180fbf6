"""Generated loads: reproducible, complete, and as uneven as asked for."""

from functools import partial

import numpy as np
import pytest

from ultraep import ConfigError, FileError, workload

EVEN, HOT = workload.Load("random even"), workload.Load("hot rank", 2.0)
SMALL = {"top_k": 4, "tokens": 100}
GENERATORS = {
    "zipf": partial(workload.zipf, 8, 32, ratio=2.0, **SMALL),
    "shuffled": partial(workload.zipf, 8, 32, ratio=2.0, shuffled=True, **SMALL),
    "drifting": partial(workload.drifting, HOT, 8, 32, steps=6, every=2, **SMALL),
    **{load.name: partial(load.draw, 8, 32, **SMALL) for load in workload.sweep(8, 32, top_k=4)},
}


def rank_imbalance(loads):
    per_rank = loads.sum(axis=0).reshape(len(loads), -1).sum(axis=1)
    return per_rank.max() / per_rank.mean()


@pytest.mark.parametrize("name", GENERATORS)
def test_every_token_chooses_top_k_different_experts_by_the_seed(name):
    loads = GENERATORS[name](seed=1)
    assert loads.dtype == np.int64
    assert (loads.sum(axis=-1) == 400).all()
    assert 0 <= loads.min() <= loads.max() <= 100
    np.testing.assert_array_equal(GENERATORS[name](seed=1), loads)
    if name != "even":
        assert (GENERATORS[name](seed=2) != loads).any()


@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0, 3.0, 4.0])
@pytest.mark.parametrize("experts", [64, 128, 256])
def test_zipf_reaches_the_imbalance(experts, ratio):
    loads = workload.zipf(64, experts, ratio=ratio, tokens=4096)
    assert rank_imbalance(loads) == pytest.approx(ratio, rel=0.02)


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("kind", workload.KINDS)
def test_named_loads_reach_their_imbalance(kind, ranks):
    loads = workload.sweep(ranks, 256, kinds=[kind])
    swept = [load for load in loads if load.imbalance is not None]
    assert len(swept) >= (0 if len(loads) == 1 else 2)
    for load in swept:
        drawn = load.draw(ranks, 256, tokens=8192, seed=3)
        assert rank_imbalance(drawn) == pytest.approx(load.imbalance, rel=0.03)


def test_loads_without_a_choice_of_imbalance():
    even = workload.Load("even").draw(8, 128, tokens=100)
    assert np.ptp(even) == 1
    assert (even.sum(axis=0) == 50).all()
    assert rank_imbalance(workload.Load("random even").draw(8, 128)) < 1.01
    for top_k, share in ((1, 1 / 2), (2, 1 / 2), (8, 1 / 8)):
        loads = workload.Load("adversarial").draw(8, 128, top_k=top_k)
        assert loads[:, 0].sum() / loads.sum() == pytest.approx(share, rel=0.01)
    hottest = workload.Load("4 hot").draw(8, 128, tokens=100)
    assert (hottest[:, :4] == 100).all()


def test_drifting_loads_move_their_hot_rank():
    loads = workload.drifting(HOT, 8, 32, steps=12, every=3, top_k=4)
    hot = loads.sum(axis=1).reshape(12, 8, 4).sum(axis=2).argmax(axis=1).reshape(4, 3)
    assert (hot == hot[:, :1]).all()
    assert len(set(hot[:, 0])) > 1
    assert all(rank_imbalance(step) == pytest.approx(2.0, rel=0.03) for step in loads)


def test_ids_have_the_loads():
    loads = workload.Load("log-normal", 2.0).draw(8, 32, top_k=4, tokens=64)
    for rank, own in enumerate(loads):
        ids = workload.ids_with(own, 4, seed=rank)
        assert ids.shape == (64, 4)
        assert (np.bincount(ids.ravel(), minlength=32) == own).all()
        assert all(len(set(row)) == 4 for row in ids.tolist())


@pytest.mark.parametrize(
    ("generate", "message"),
    [
        (lambda: workload.zipf(4, 8, ratio=5.0, top_k=2), "imbalance must lie between 1 and"),
        (lambda: workload.zipf(4, 8, ratio=0.5, top_k=2), "got 0.5"),
        (lambda: workload.zipf(3, 8, ratio=1.5, top_k=2), "8 experts do not divide evenly over 3"),
        (lambda: EVEN.draw(4, 8, top_k=9), "top_k must lie between 1 and 8"),
        (lambda: EVEN.draw(0, 8), "ranks and experts must be at least 1"),
        (lambda: EVEN.draw(4, 8, seed=-1), "seed must not be negative, got -1"),
        (lambda: workload.drifting(HOT, 4, 8, steps=0, every=1), "at least 1, got 0 and 1"),
        (lambda: workload.Load("warm"), "unknown load 'warm'; choose from even, "),
        (lambda: workload.Load("even", 2.0), "'even' has one imbalance, got 2.0"),
        (lambda: workload.Load("1 hot", 2.0).draw(8, 128), "between 1 and 1.83 for 8 ranks"),
        (lambda: HOT.draw(3, 8), "8 experts do not divide evenly over 3"),
    ],
)
def test_invalid_settings(generate, message):
    with pytest.raises(ConfigError, match=message):
        generate()


# Load files and recorded routing, valid and damaged


MATRIX = np.arange(8).reshape(2, 4)
SEQUENCE = np.stack([MATRIX, MATRIX + 1, MATRIX + 2])


def write(path, matrices):
    sequence = matrices.reshape(-1, 2, 4)
    lines = ["\n".join(",".join(map(str, row)) for row in matrix) for matrix in sequence]
    write_as = {
        ".npy": lambda: np.save(path, matrices),
        ".npz": lambda: np.savez(path, *sequence),
        ".csv": lambda: path.write_text(" \n" + "\n \n".join(lines) + "\n "),
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
    "ragged.csv": (b"1,2\n3\n", "columns changed from 2 to 1"),
    "float.csv": (b"1,2\n3,4.5\n", "loads must be integers, .*4.5"),
    "word.csv": (b"a,b\n1,2\n", "loads must be integers, .*a"),
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
