"""Counting ids, and refusing invalid loads."""

import numpy as np
import pytest
import torch

import ultraep
from ultraep import LoadError, Topology, count_loads

TOPOLOGY = Topology(ranks=2, experts=4, slots=1)


def test_ids_are_counted():
    assert count_loads([[0, 3], [3, 1]], experts=4).tolist() == [1, 1, 0, 2]
    assert count_loads(torch.tensor([[0, 3], [3, 1]]), experts=4).tolist() == [1, 1, 0, 2]
    assert count_loads(np.empty((0, 2), dtype=int), experts=3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("backend", ultraep.backend_names())
def test_padding_is_not_counted(backend):
    ids = torch.tensor([[0, -1], [3, 3], [-1, -1]])
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        counts = count_loads(ids.to(dtype), experts=4, backend=backend)
        assert counts.tolist() == [1, 0, 0, 2]
    assert count_loads([[-1, -1]], experts=4, backend=backend).tolist() == [0] * 4


@pytest.mark.parametrize("ids", [[[4]], [[-2]]])
def test_ids_out_of_range_are_refused(ids):
    with pytest.raises(LoadError, match=r"0\.\.3"):
        count_loads(ids, experts=4)


def test_errors_do_not_count_padding():
    with pytest.raises(LoadError, match=r"0\.\.3, got 2\.\.9 \(1 of 4 are out of range\)"):
        count_loads([[-1, 2], [-1, 9]], experts=4)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_unsigned_ids_have_no_padding(dtype):
    largest = np.array([[np.iinfo(dtype).max]], dtype=dtype)
    with pytest.raises(LoadError, match=r"0\.\.3"):
        count_loads(largest, experts=4)


@pytest.mark.parametrize(
    ("loads", "message"),
    [
        (np.zeros((2, 3), dtype=int), r"\[2, 4\], got \[2, 3\]"),
        (np.zeros(4, dtype=int), r"\[2, 4\], got \[4\]"),
        (np.zeros((1, 2, 4), dtype=int), r"got \[1, 2, 4\]"),
        (np.zeros((2, 4)), "integers, got float64"),
        (np.full((2, 4), np.nan), "integers, got float64"),
        (np.zeros((2, 4), dtype=bool), "integers, got bool"),
        (torch.zeros(2, 4), "integers, got float32"),
        ([[1, 2, 3, 4], [1, 2]], "rectangular"),
        ([["a"] * 4] * 2, "integers"),
        (np.array([[0, 0, 0, 0], [0, -7, 0, 0]]), "got -7 for source rank 1, expert 1"),
        (np.full((2, 4), 2**31), "at most 2147483647"),
        (np.full((2, 4), 2**29), "at most 2147483647"),
        (np.full((2, 4), 2**63, dtype=np.uint64), "at most 2147483647"),
        (np.full((2, 4), np.iinfo(np.int64).max), "at most 2147483647"),
    ],
)
def test_bad_loads_are_refused(loads, message):
    with pytest.raises(LoadError, match=message):
        ultraep.plan(loads, TOPOLOGY)


def test_the_largest_total_is_counted_exactly():
    loads = np.zeros((2, 4), dtype=np.int64)
    loads[0, 0] = 2**31 - 1
    plan = ultraep.plan(loads, TOPOLOGY)
    assert plan.rank_loads.tolist() == [2**30 - 1, 2**30]
    plan.check(loads)
