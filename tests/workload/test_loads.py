"""Generated loads: reproducible, complete, and as uneven as asked for."""

from functools import partial

import numpy as np
import pytest

from ultraep import ConfigError, workload

HOT = workload.Load("hot rank", 2.0)
SMALL = {"top_k": 4, "tokens": 100}
GENERATORS = {
    "uniform": partial(workload.uniform, 8, 32, **SMALL),
    "lognormal": partial(workload.lognormal, 8, 32, **SMALL),
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
        (lambda: workload.uniform(4, 8, top_k=9), "top_k must lie between 1 and 8"),
        (lambda: workload.uniform(0, 8), "ranks and experts must be at least 1"),
        (lambda: workload.lognormal(4, 8, sigma=-1.0), "sigma must lie"),
        (lambda: workload.uniform(4, 8, seed=-1), "seed must not be negative, got -1"),
        (lambda: workload.one_hot(4, 8, expert=8), r"0\.\.7, got 8"),
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
