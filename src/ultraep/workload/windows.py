"""Recorded routing -> loads: runs of consecutive tokens become microbatches.

Shapes: T tokens, H layers, K experts per token, S microbatches, R ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.errors import ConfigError, FileError, LoadError
from ultraep.files.reading import names_of_arrays, read_arrays
from ultraep.loads import MAX_TOTAL, as_integers

IDS = "_ids"  # ending of the names of arrays with expert ids
MOST_NUMBERS = 1 << 25  # of loads or ids in a file: 256 MiB as int64
MOST_BYTES = 1 << 28


def holds_routing(path: str | Path) -> bool:
    """Whether `read_routing` is the one to read it: an .npz file with arrays `*_ids`."""
    return any(name.endswith(IDS) for name in names_of_arrays(path))


def read_routing(path: str | Path) -> list[IntArray]:
    """Expert ids `[T, H, K]` of every recorded text: the arrays `*_ids` of an .npz file."""
    wanted = [name for name in names_of_arrays(path) if name.endswith(IDS)]
    arrays = list(read_arrays(path, wanted, most=MOST_BYTES).values())
    if not arrays or any(ids.ndim != 3 or 0 in ids.shape for ids in arrays):
        raise FileError(f"{path}: routing needs arrays *_ids of shape [tokens, layers, top_k]")
    try:
        check_count(arrays)
        return [as_integers(ids, "ids").astype(np.int64, copy=False) for ids in arrays]
    except LoadError as error:
        raise FileError(f"{path}: {error}") from None


def check_count(arrays: Sequence[NDArray[Any]]) -> None:
    """Refuse more numbers than fit into the memory that reading a file may take."""
    count = sum(array.size for array in arrays)
    if count > MOST_NUMBERS:
        raise LoadError(f"holds {count:,} numbers, but at most {MOST_NUMBERS:,} are read: split it")


def loads_of_windows(ids: IntArray, *, ranks: int, experts: int, tokens: int) -> IntArray:
    """[S, H, R, E] loads of every full run of `tokens` tokens, shared out evenly over the ranks.

    Four tokens with one expert each, as one microbatch of two ranks:

    >>> ids = np.array([0, 0, 1, 0]).reshape(4, 1, 1)
    >>> loads_of_windows(ids, ranks=2, experts=2, tokens=4)
    array([[[[2, 0],
             [1, 1]]]])
    """
    if not 1 <= tokens <= MAX_TOTAL or tokens % ranks:
        raise ConfigError(f"a window of {tokens} tokens does not divide over {ranks} ranks")
    if ids.size and not 0 <= ids.min() <= ids.max() < experts:
        raise ConfigError(f"ids must lie in 0..{experts - 1}, got {ids.min()}..{ids.max()}")
    windows, (layers, top_k), own = len(ids) // tokens, ids.shape[1:], tokens // ranks
    cut = ids[: windows * tokens].reshape(windows, ranks, own, layers, top_k)
    rows = cut.transpose(0, 3, 1, 2, 4).reshape(windows * layers * ranks, own * top_k)
    places = np.arange(len(rows))[:, None] * experts + rows
    counts = np.bincount(places.reshape(-1), minlength=len(rows) * experts)
    return counts.astype(np.int64, copy=False).reshape(windows, layers, ranks, experts)
