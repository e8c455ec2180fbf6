"""Recorded routing -> loads: runs of consecutive tokens become microbatches.

Shapes: T tokens, H layers, K experts per token, S microbatches, R ranks, E experts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ultraep.arrays import IntArray
from ultraep.errors import ConfigError, FileError, LoadError
from ultraep.inputs import names_of_arrays, read_arrays
from ultraep.loads import MAX_TOTAL, as_integers

IDS = "_ids"  # ending of the names of arrays with expert ids


def holds_routing(path: str | Path) -> bool:
    """Whether `read_routing` is the one to read it: an .npz file with arrays `*_ids`."""
    return any(name.endswith(IDS) for name in names_of_arrays(path))


def read_routing(path: str | Path) -> list[IntArray]:
    """Expert ids `[T, H, K]` of every recorded text: the arrays `*_ids` of an .npz file."""
    found = [ids for name, ids in read_arrays(path).items() if name.endswith(IDS)]
    if not found or any(ids.ndim != 3 for ids in found):
        raise FileError(f"{path}: want arrays *_ids of [tokens, layers, top_k]")
    try:
        return [as_integers(ids, "ids").astype(np.int64) for ids in found]
    except LoadError as error:
        raise FileError(f"{path}: {error}") from None


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
    return counts.astype(np.int64).reshape(windows, layers, ranks, experts)
