"""Loads that are drawn, fitted, or read from traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultraep.errors import ConfigError, FileError
from ultraep.tools.sim.workload import (
    PROBE_ROWS,
    Recorded,
    Skew,
    fit_skew,
    mean_imbalance,
    rank_imbalance,
    read_workload,
    share_out,
)
from ultraep.topology import Topology

ROWS = 8 * 4096
reproducibly = settings(derandomize=True, database=None, deadline=None, max_examples=200)


def skew(**changes: Any) -> Skew:
    return Skew(**{"experts": 16, "top_k": 4, "spread": 1.0, "noise": 0.3, **changes})


def drawn(workload: Skew, microbatches: Sequence[int], layer: int = 0) -> Any:
    return workload.expert_loads(layer, np.array(microbatches), ROWS)


# Sharing out


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
    one = st.lists(weight, min_size=experts, max_size=experts).filter(any)
    weights_SE = np.array(data.draw(st.lists(one, min_size=1, max_size=3)), dtype=float) * scale
    shares_SE = share_out(weights_SE, tokens * top_k, top_k)
    assert shares_SE.dtype == np.int64
    assert (shares_SE.sum(axis=1) == tokens * top_k).all()
    assert shares_SE.min() >= 0
    assert shares_SE.max() <= tokens


@given(weights=st.lists(st.floats(0.5, 2.0), min_size=4, max_size=12), tokens=st.integers(1, 10**6))
@reproducibly
def test_shares_are_proportional_to_a_row(weights: list[float], tokens: int) -> None:
    weights_E = np.array(weights)  # none is wanted by more than all tokens
    exact_E = weights_E / weights_E.sum() * tokens
    assert np.abs(share_out(weights_E[None], tokens, 1)[0] - exact_E).max() <= 1 + 1e-6


def test_what_an_expert_cannot_take_goes_to_the_others_in_proportion() -> None:
    # Of 30 rows the first would get 25 but there are 10 tokens; 20 are left for weights of 1 and 3.
    shares = share_out(np.array([[20.0, 1.0, 3.0]]), 30, 3)
    assert shares.tolist() == [[10, 10, 10]]
    shares = share_out(np.array([[95.0, 1.0, 3.0, 1.0]]), 20, 2)
    assert shares.tolist() == [[10, 2, 6, 2]]


# Drawn loads


def test_rows_add_up_and_no_expert_has_more_than_one_of_a_token() -> None:
    loads = drawn(skew(spread=4.0), range(50))
    assert (loads.sum(axis=1) == ROWS).all()
    assert loads.max() == ROWS // 4
    assert loads.min() >= 0


def test_a_microbatch_does_not_depend_on_which_others_are_asked_for() -> None:
    for changes in ({}, {"topic_length": 3}, {"drift_length": 4}):
        workload = skew(**changes)
        everything = drawn(workload, range(20), layer=5)
        assert (drawn(workload, [17, 3, 3, 0], layer=5) == everything[[17, 3, 3, 0]]).all()
        assert (drawn(workload, [9], layer=5)[0] == everything[9]).all()


def test_layers_seeds_and_microbatches_differ() -> None:
    assert (drawn(skew(), [0]) == drawn(skew(), [0])).all()
    assert (drawn(skew(), [0]) != drawn(skew(), [0], layer=1)).any()
    assert (drawn(skew(), [0]) != drawn(skew(seed=1), [0])).any()
    assert (drawn(skew(), [0]) != drawn(skew(), [1])).any()
    assert (drawn(skew(noise=0.0), [0]) == drawn(skew(noise=0.0), [1])).all()


def test_topics_change_when_they_should() -> None:
    loads = drawn(skew(noise=0.0, topic_length=4), range(12))
    changed = (loads[1:] != loads[:-1]).any(axis=1)
    assert np.flatnonzero(changed).tolist() == [3, 7]


def test_drift_turns_one_topic_into_the_next() -> None:
    workload = skew(noise=0.0, drift_length=10)
    logits = np.log(np.maximum(drawn(workload, range(31)), 1))
    logits -= logits.mean(axis=1, keepdims=True)
    near = [np.corrcoef(logits[0], logits[number])[0, 1] for number in (1, 3, 6, 10)]
    assert near == sorted(near, reverse=True)
    assert near[0] > 0.95
    assert abs(near[-1]) < 0.6
    steps = [np.corrcoef(logits[number : number + 2])[0, 1] for number in range(30)]
    assert min(steps) > 0.95
    # As strong in the middle as at the ends: cosine and sine, not a straight line.
    topics = drawn(skew(noise=0.0, topic_length=1), range(31))  # the same topics, at once
    assert (drawn(workload, [0, 10, 20]) == topics[[0, 1, 2]]).all()
    middle = drawn(skew(noise=0.0, drift_length=10, experts=64), np.arange(5, 500, 10))
    ends = drawn(skew(noise=0.0, drift_length=10, experts=64), np.arange(0, 500, 10))
    assert np.log(middle).std() == pytest.approx(np.log(ends).std(), rel=0.05)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"spread": -1}, "spread must be at least 0, got -1"),
        ({"noise": float("nan")}, "noise must be at least 0, got nan"),
        ({"spread": 9.0}, "spread must be at most 8, got 9"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"topic_length": 3, "drift_length": 5}, "3 and drift_length 5 exclude each other"),
    ],
)
def test_skews_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        skew(**changes)


# Fitting


@pytest.mark.parametrize(
    ("ranks", "experts", "top_k", "imbalance", "noise"),
    [
        (8, 32, 4, 1.6, 0.4),
        (16, 128, 8, 2.5, 0.4),
        (64, 128, 8, 2.86, 0.25),
        (64, 256, 8, 4.0, 0.8),
        (40, 160, 8, 1.05, 0.4),  # less than the noise alone
        (4, 8, 2, 1.0, 0.4),
    ],
)
def test_the_imbalance_is_as_wanted(
    ranks: int, experts: int, top_k: int, imbalance: float, noise: float
) -> None:
    topology = Topology(ranks=ranks, experts=experts)
    workload = fit_skew(imbalance, topology, top_k, range(2, 26), noise=noise)
    rows = PROBE_ROWS * ranks
    loads = [workload.expert_loads(layer, np.arange(43), rows) for layer in range(2, 26)]
    by_rank = np.array(loads).reshape(-1, ranks, experts // ranks).sum(axis=2)
    found = (by_rank.max(axis=1) / by_rank.mean(axis=1)).mean()
    assert found == pytest.approx(imbalance, rel=0.02)
    assert found == pytest.approx(mean_imbalance(workload, topology, range(2, 26)))
    assert (workload.noise == noise) == (workload.spread > 0)


@pytest.mark.parametrize("imbalance", [0.9, 8.5, float("nan")])
def test_an_imbalance_beyond_the_ranks_is_refused(imbalance: float) -> None:
    words = f"must lie between 1 and the 8 ranks, got {imbalance}"
    with pytest.raises(ConfigError, match=words):
        fit_skew(imbalance, Topology(ranks=8, experts=16), 2, range(4))


def test_an_imbalance_that_top_k_forbids_is_refused() -> None:
    # A token goes to 8 of 16 experts; a rank with two of them has at most a quarter of all rows.
    with pytest.raises(ConfigError, match=r"imbalance of 4.* 16 experts, top-8, on 8 ranks: at mo"):
        fit_skew(4.0, Topology(ranks=8, experts=16), 8, range(4))


def test_imbalance_by_hand() -> None:
    topology = Topology(ranks=2, experts=4)
    found = rank_imbalance(np.array([[3, 3, 1, 1], [2, 2, 2, 2], [0, 0, 0, 4]]), topology)
    assert found.tolist() == [1.5, 1.0, 2.0]


# Traces


def test_recorded_loads_are_scaled_and_start_again() -> None:
    workload = Recorded(np.array([[[1, 1, 2], [4, 0, 0]], [[0, 2, 2], [1, 3, 0]]]), top_k=1)
    assert workload.experts == 3
    assert workload.expert_loads(0, np.array([0, 1, 2, 3]), 8).tolist() == [
        [2, 2, 4],
        [0, 4, 4],
        [2, 2, 4],
        [0, 4, 4],
    ]
    assert workload.expert_loads(1, np.array([1]), 8).tolist() == [[2, 6, 0]]
    assert workload.expert_loads(3, np.array([1]), 8).tolist() == [[2, 6, 0]]  # layer 1 again


def test_a_trace_of_routing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    first = rng.integers(0, 8, (2 * 4096 + 100, 3, 2))
    second = rng.integers(0, 8, (4096, 3, 2))
    short = rng.integers(0, 8, (50, 3, 2))
    path = tmp_path / "routing.npz"
    np.savez(path, first_ids=first, short_ids=short, second_ids=second, other=np.zeros(3))
    trace = read_workload(path, experts=8, top_k=2)
    assert trace.loads.shape == (3, 3, 8)
    assert trace.loads[1, 2].tolist() == np.bincount(first[4096:8192, 2].ravel()).tolist()
    assert trace.loads[2, 0].tolist() == np.bincount(second[:, 0].ravel()).tolist()


def test_a_trace_of_loads(tmp_path: Path) -> None:
    matrices = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    np.save(tmp_path / "loads.npy", matrices)
    trace = read_workload(tmp_path / "loads.npy", experts=4, top_k=2)
    assert trace.loads.tolist() == matrices.sum(axis=1)[:, None].tolist()
    with pytest.raises(ConfigError, match="has loads of 4 experts, the model has 8"):
        read_workload(tmp_path / "loads.npy", experts=8, top_k=2)


def test_traces_that_cannot_be_used(tmp_path: Path) -> None:
    np.savez(tmp_path / "short.npz", text_ids=np.zeros((4095, 1, 1), dtype=int))
    with pytest.raises(ConfigError, match="no text has 4096 tokens, the longest has 4095"):
        read_workload(tmp_path / "short.npz", experts=8, top_k=1)
    texts = {f"{layers}_ids": np.zeros((4096, layers, 1), dtype=int) for layers in (3, 2)}
    np.savez(tmp_path / "layers.npz", **texts)
    with pytest.raises(FileError, match="texts of different numbers of layers, 2 and 3"):
        read_workload(tmp_path / "layers.npz", experts=8, top_k=1)
    np.save(tmp_path / "empty.npy", np.array([[[1, 2]], [[0, 0]]]))
    with pytest.raises(FileError, match="a microbatch without any row"):
        read_workload(tmp_path / "empty.npy", experts=2, top_k=1)
    with pytest.raises(FileError, match="no such file"):
        read_workload(tmp_path / "none.npy", experts=2, top_k=1)
