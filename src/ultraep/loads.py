"""Stage 1: gating ids -> loads, the exact tokens per source rank and expert.

Shapes: T tokens, K experts per token, R ranks, E experts.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from ultraep.arrays import PADDING, IntArray
from ultraep.backends import select
from ultraep.errors import LoadError
from ultraep.topology import Topology

MAX_TOTAL = 2**31 - 1  # so that 32-bit devices count the same microbatch exactly


def count_loads(ids: Any, experts: int, *, backend: str | None = None) -> IntArray:
    """[E] tokens routed to every expert by the `[T, K]` ids of one rank; -1 is padding.

    >>> count_loads([[0, 1], [1, 3]], experts=4)
    array([1, 2, 0, 1])
    """
    engine = select(backend, device_of(ids))
    flat = flat_ids(ids, engine.DEVICE)
    counts: IntArray
    counts, unknown = engine.count(flat, experts)
    if unknown:
        named = flat[flat != PADDING]
        raise LoadError(
            f"ids must lie in 0..{experts - 1}, got {named.min()}..{named.max()} "
            f"({unknown} of {len(flat)} are out of range)"
        )
    return counts


def device_of(values: Any) -> str:
    """The type of the device that values are on."""
    return str(getattr(getattr(values, "device", None), "type", "cpu"))


def flat_ids(ids: Any, device: str = "cpu") -> Any:
    """[N] ids of any integer type, as int64; a tensor where a backend works on its device."""
    if device_of(ids) == device != "cpu":
        if not str(ids.dtype).startswith(("torch.int", "torch.uint")):
            raise LoadError(f"ids must be integers, got {ids.dtype}")
        return ids.reshape(-1).long()
    flat = as_integers(ids, "ids").reshape(-1)
    if flat.dtype == np.uint64:  # its largest numbers must not turn into padding
        flat = np.minimum(flat, np.uint64(np.iinfo(np.int64).max))
    return flat.astype(np.int64, copy=False)


def as_loads(loads: Any, topology: Topology) -> IntArray:
    """A checked copy of `[R, E]` loads as int64, from an array, a tensor or nested lists."""
    array = as_integers(loads, "loads")
    expected = (topology.ranks, topology.experts)
    if array.shape != expected:
        raise LoadError(
            f"loads must be [ranks, experts] = {list(expected)}, got {list(array.shape)}"
        )
    counts = np.array(array, dtype=np.int64, order="C")
    # As unsigned numbers, negative ones are the largest: one pass finds both kinds of nonsense.
    largest = int(counts.view(np.uint64).max(initial=0))
    if largest * counts.size > MAX_TOTAL and (largest > MAX_TOTAL or counts.sum() > MAX_TOTAL):
        _refuse(array)
    return counts


def _refuse(array: np.ndarray[Any, np.dtype[Any]]) -> NoReturn:
    for source, expert in np.argwhere(array < 0)[:1]:
        raise LoadError(
            f"loads must not be negative, got {array[source, expert]} "
            f"for source rank {source}, expert {expert}"
        )
    raise LoadError(
        f"loads add up to more than {MAX_TOTAL} tokens, the most that is counted exactly"
    )


def as_integers(values: Any, name: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Any array, tensor or nested lists as an integer array; `name` is for the error message."""
    if hasattr(values, "detach"):  # a torch tensor, without importing torch to find out
        values = values.detach().cpu().numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise LoadError(f"{name} must be a rectangular array: {error}") from None
    if array.dtype == object or not np.issubdtype(array.dtype, np.integer):
        raise LoadError(f"{name} must be integers, got {array.dtype}")
    return array
