"""Generated loads: skew, sums and seeds."""

from functools import partial

import numpy as np
import pytest

from ultraep import ConfigError, workload

SMALL = {"top_k": 4, "tokens": 100}
GENERATORS = {
    "uniform": partial(workload.uniform, 8, 32, **SMALL),
    "lognormal": partial(workload.lognormal, 8, 32, **SMALL),
    "zipf": partial(workload.zipf, 8, 32, ratio=2.0, **SMALL),
    "shuffled": partial(workload.zipf, 8, 32, ratio=2.0, shuffled=True, **SMALL),
    "topics": partial(workload.topic_shift, 8, 32, steps=6, **SMALL),
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
    assert (GENERATORS[name](seed=2) != loads).any()


@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0, 3.0, 4.0])
@pytest.mark.parametrize("experts", [64, 128, 256])
def test_zipf_reaches_the_imbalance(experts, ratio):
    loads = workload.zipf(64, experts, ratio=ratio, tokens=4096)
    assert rank_imbalance(loads) == pytest.approx(ratio, rel=0.02)


@pytest.mark.parametrize(
    ("generate", "message"),
    [
        (lambda: workload.zipf(4, 8, ratio=5.0, top_k=2), "ratio must lie between 1 and"),
        (lambda: workload.zipf(4, 8, ratio=0.5, top_k=2), "got 0.5"),
        (lambda: workload.zipf(3, 8, ratio=1.5, top_k=2), "8 experts do not divide evenly over 3"),
        (lambda: workload.uniform(4, 8, top_k=9), "top_k must lie between 1 and 8"),
        (lambda: workload.uniform(0, 8), "ranks and experts must be at least 1"),
        (lambda: workload.lognormal(4, 8, sigma=-1.0), "sigma must lie"),
        (lambda: workload.uniform(4, 8, seed=-1), "seed must not be negative, got -1"),
        (lambda: workload.one_hot(4, 8, expert=8), r"0\.\.7, got 8"),
        (lambda: workload.topic_shift(4, 8, steps=0), "at least 1, got 0"),
        (lambda: workload.topic_shift(4, 8, steps=3, blend=2.0), "blend must lie in"),
    ],
)
def test_invalid_settings(generate, message):
    with pytest.raises(ConfigError, match=message):
        generate()
