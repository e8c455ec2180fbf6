"""Stage 1: count the tokens that every source rank routes to every expert.

Shapes: T tokens, K experts per token, R ranks, E experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ultraep.arrays import PADDING, IntArray
from ultraep.backends import select
from ultraep.config import check_integer
from ultraep.errors import LoadError
from ultraep.topology import MAX_EXPERTS, Topology

MAX_TOTAL = 2**31 - 1  # so that devices count the same microbatch exactly in 32 bits


def count_loads(ids: Any, experts: int, *, backend: str | None = None) -> IntArray:
    """Count the tokens of one rank for every expert: `[T, K]` ids -> `[E]`. -1 is padding.

    >>> count_loads([[0, 1], [1, 3]], experts=4)
    array([1, 2, 0, 1])
    """
    check_integer("experts", experts, least=1, most=MAX_EXPERTS)
    flat = flat_ids(ids)
    counts: IntArray
    counts, out_of_range = select(backend).count(flat, experts)
    if out_of_range:
        real = flat[flat != PADDING]
        raise LoadError(
            f"ids must lie in 0..{experts - 1}, got {real.min()}..{real.max()} "
            f"({out_of_range} of {len(flat)} are out of range)"
        )
    return counts


def invalid_ids(ids: Any) -> LoadError | None:
    """Return the error for a tensor that is not integers `[T, K]`; None if it is.

    Whether ids are in range is checked where they are counted.
    """
    name = str(ids.dtype)
    if not name.startswith(("torch.int", "torch.uint")):
        return LoadError(f"ids must be integers, got {name}")
    if name == "torch.uint64":
        return LoadError(f"ids of {name} may not fit into int64; convert them to int64")
    if ids.ndim != 2:
        return LoadError(f"ids must be [tokens, choices], got {list(ids.shape)}")
    return None


def flat_ids(ids: Any) -> IntArray:
    """Return the ids as int64 `[N]`."""
    flat = as_integers(ids, "ids").reshape(-1)
    if flat.dtype == np.uint64:  # the largest values must not wrap around to padding
        flat = np.minimum(flat, np.uint64(np.iinfo(np.int64).max))
    return flat.astype(np.int64, copy=False)


def as_loads(loads: Any, topology: Topology) -> IntArray:
    """Check `[R, E]` loads (array, tensor or nested lists) and return a copy as int64."""
    array = as_integers(loads, "loads")
    expected = (topology.ranks, topology.experts)
    if array.shape != expected:
        raise LoadError(
            f"loads must be [ranks, experts] = {list(expected)}, got {list(array.shape)}"
        )
    counts = np.array(array, dtype=np.int64, order="C")
    # Viewed as unsigned, negative numbers are the largest: one pass detects both errors.
    largest = int(counts.view(np.uint64).max(initial=0))
    if largest * counts.size > MAX_TOTAL and (largest > MAX_TOTAL or counts.sum() > MAX_TOTAL):
        for source, expert in np.argwhere(array < 0)[:1]:
            raise LoadError(
                f"loads must not be negative, got {array[source, expert]} "
                f"for source rank {source}, expert {expert}"
            )
        raise LoadError(f"loads must add up to at most {MAX_TOTAL} rows to be counted exactly")
    return counts


def as_integers(values: Any, name: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Convert an array, tensor or nested lists to an integer array; errors call it `name`."""
    if hasattr(values, "detach"):  # a tensor, recognised without importing torch
        values = values.detach().cpu().numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise LoadError(f"{name} must be a rectangular array: {error}") from None
    if array.dtype.kind not in "iu":
        raise LoadError(f"{name} must be integers, got {array.dtype}")
    return array
