"""Loads that are drawn, fitted, or read from traces."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultraep.errors import ConfigError
from ultraep.topology import Topology
from ultraep_tools.sim.workload import (
    Recorded,
    Skew,
    fit_skew,
    mean_imbalance,
    read_workload,
    share_out,
)

ROWS = 8 * 4096
reproducibly = settings(derandomize=True, database=None, deadline=None, max_examples=200)


def skew(**changes: Any) -> Skew:
    return Skew(**{"experts": 16, "top_k": 4, "spread": 1.0, "noise": 0.3} | changes)


def draw(workload: Skew, microbatches: Sequence[int], layer: int = 0) -> Any:
    return workload.expert_loads(layer, np.array(microbatches), ROWS)


@given(
    experts=st.integers(1, 12),
    tokens=st.integers(1, 50),
    data=st.data(),
    scale=st.sampled_from([1.0, 1e-30, 1e30]),
)
@reproducibly
def test_shares_are_whole_and_exact(experts: int, tokens: int, data: Any, scale: float) -> None:
    top_k = data.draw(st.integers(1, experts))
    weight = st.one_of(st.integers(0, 8), st.floats(1e-6, 1e6))
    weights = st.lists(weight, min_size=experts, max_size=experts).filter(any)
    weights_SE = np.array(data.draw(st.lists(weights, min_size=1, max_size=3)), dtype=float) * scale
    shares_SE = share_out(weights_SE, tokens * top_k, top_k)
    assert shares_SE.dtype == np.int64
    assert (shares_SE.sum(axis=1) == tokens * top_k).all()
    assert 0 <= shares_SE.min() <= shares_SE.max() <= tokens


def test_a_microbatch_depends_on_its_number_layer_and_seed() -> None:
    loads = draw(skew(), range(20), layer=5)
    assert (draw(skew(), [17, 3, 3, 0], layer=5) == loads[[17, 3, 3, 0]]).all()
    assert (loads[0] != loads[1]).any()
    assert (loads[0] != draw(skew(), [0], layer=1)).any()
    assert (loads[0] != draw(skew(seed=1), [0], layer=5)).any()


@pytest.mark.parametrize(
    ("ranks", "experts", "top_k", "imbalance", "noise"),
    [
        (8, 32, 4, 1.6, 0.4),
        (64, 128, 8, 2.86, 0.25),
        (64, 256, 8, 4.0, 0.8),
        (40, 160, 8, 1.05, 0.4),  # less than the noise alone
        (4, 8, 2, 1.0, 0.4),
    ],
)
def test_fitted_loads_have_the_imbalance(
    ranks: int, experts: int, top_k: int, imbalance: float, noise: float
) -> None:
    topology, layers = Topology(ranks=ranks, experts=experts), range(2, 26)
    workload = fit_skew(imbalance, topology, top_k, layers, noise=noise)
    assert mean_imbalance(workload, topology, layers) == pytest.approx(imbalance, rel=0.02)
    assert (workload.noise == noise) == (workload.spread > 0)


@pytest.mark.parametrize("imbalance", [0.9, 8.5, float("nan")])
def test_an_imbalance_beyond_the_ranks_is_refused(imbalance: float) -> None:
    with pytest.raises(ConfigError, match=f"between 1 and the 8 ranks, got {imbalance}"):
        fit_skew(imbalance, Topology(ranks=8, experts=16), 2, range(4))


def test_recorded_loads_are_scaled_and_repeat() -> None:
    workload = Recorded(np.array([[[1, 1, 2], [4, 0, 0]], [[0, 2, 2], [1, 3, 0]]]), top_k=1)
    assert workload.experts == 3
    first = workload.expert_loads(0, np.arange(4), 8)
    assert first.tolist() == [[2, 2, 4], [0, 4, 4], [2, 2, 4], [0, 4, 4]]
    for layer in (1, 3):
        assert workload.expert_loads(layer, np.array([1]), 8).tolist() == [[2, 6, 0]]


def test_read_recorded_routing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = {
        name: rng.integers(0, 8, (n, 3, 2)) for name, n in (("a", 8292), ("b", 4096), ("c", 5))
    }
    path = tmp_path / "routing.npz"
    np.savez(path, other=np.zeros(3), **{f"{name}_ids": ids for name, ids in texts.items()})
    loads = read_workload(path, experts=8, top_k=2).loads
    assert loads.shape == (3, 3, 8)
    assert loads[1, 2].tolist() == np.bincount(texts["a"][4096:8192, 2].ravel()).tolist()
    assert loads[2, 0].tolist() == np.bincount(texts["b"][:, 0].ravel()).tolist()
