"""Loads from files: one matrix `[source rank, expert]` or a sequence, and recorded routing.

.npy   an integer array with two or three dimensions
.npz   any number of these arrays, in file order
.csv   one line per source rank, one column per expert; empty lines between matrices

Recorded routing is an .npz file with expert ids `[token, layer, choice]` in arrays `*_ids`. Windows
of consecutive tokens become microbatches.

Shapes: T tokens, H layers, K experts per token, S microbatches, R ranks, E experts.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.errors import ConfigError, FileError, LoadError
from ultraep.files.reading import names_of_arrays, read_array, read_arrays, read_text
from ultraep.loads import MAX_TOTAL, as_integers

IDS = "_ids"  # suffix of arrays with expert ids

MOST_NUMBERS = 1 << 25  # loads or ids in a file: 256 MiB as int64
MOST_BYTES = 1 << 28
MOST_LINES = 1 << 20  # of a .csv file, whose lines take more memory than their text


def read_loads(path: str | Path) -> IntArray:
    """[S, R, E] all load matrices of a file, in order."""
    path = Path(path)
    if not os.path.exists(path):
        raise FileError(f"{path}: no such file")
    suffix = path.suffix.lower()
    if suffix not in READERS:
        raise FileError(
            f"{path}: unknown format {path.suffix or '(none)'!r}; choose from {', '.join(READERS)}"
        )
    try:
        arrays = [_as_sequence(values) for values in READERS[suffix](path)]
        _check_count(arrays)
    except LoadError as error:
        raise FileError(f"{path}: {error}") from None
    shapes = sorted({array.shape[1:] for array in arrays})
    if not shapes:
        raise FileError(f"{path}: holds no loads")
    if len(shapes) > 1:
        raise FileError(f"{path}: matrices of different shapes, {shapes[0]} and {shapes[1]}")
    return np.concatenate([array.astype(np.int64, copy=False) for array in arrays])


def _as_sequence(values: Any) -> IntArray:
    array = as_integers(values, "loads")
    if array.ndim not in (2, 3):
        raise LoadError(
            f"need [source rank, expert] or a sequence of matrices, got shape {list(array.shape)}"
        )
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise LoadError(f"a load of {array.max()} is too large to count")
    if 0 in array.shape:
        raise LoadError(f"no source rank, no expert or no matrix in shape {list(array.shape)}")
    return array.reshape(-1, *array.shape[-2:])


def _read_npy(path: Path) -> Iterable[Any]:
    return [read_array(path, most=MOST_BYTES)]


def _read_npz(path: Path) -> Iterable[Any]:
    arrays = read_arrays(path, most=MOST_BYTES)
    if "header" in arrays:
        raise LoadError("a trace, not loads; read it with ultraep.read_trace")
    ids = next((name for name in arrays if name.endswith(IDS)), None)
    if ids is not None:
        raise LoadError(
            f"recorded routing, not loads: {ids} holds expert ids; read them with "
            "ultraep.workload.read_routing and count them with loads_of_windows"
        )
    return arrays.values()


def _read_csv(path: Path) -> Iterable[IntArray]:
    text = read_text(path)
    if max(text.count("\n"), text.count("\r")) > MOST_LINES:
        raise LoadError(f"more than {MOST_LINES:,} lines: save the loads as .npy")
    options: Any = {"delimiter": ",", "comments": None, "dtype": np.int64, "ndmin": 2}
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    parts = re.split(r"\n\s*\n", f"\n{lines}\n")
    try:
        return [np.loadtxt(io.StringIO(part), **options) for part in parts if part.strip()]
    except ValueError as error:
        raise LoadError(f"loads must be integers, a line for each source rank: {error}") from None


READERS = {".npy": _read_npy, ".npz": _read_npz, ".csv": _read_csv}


def _check_count(arrays: Sequence[NDArray[Any]]) -> None:
    """Raise `LoadError` if a file has more numbers than may be read."""
    count = sum(array.size for array in arrays)
    if count > MOST_NUMBERS:
        raise LoadError(f"holds {count:,} numbers, but at most {MOST_NUMBERS:,} are read: split it")


# -- recorded routing ----------------------------------------------------------------------------


def holds_routing(path: str | Path) -> bool:
    """Return whether a file holds recorded routing: an .npz file with arrays `*_ids`."""
    return any(name.endswith(IDS) for name in names_of_arrays(path))


def read_routing(path: str | Path) -> list[IntArray]:
    """Return expert ids `[T, H, K]` of every recorded text: the arrays `*_ids` of an .npz file."""
    names = [name for name in names_of_arrays(path) if name.endswith(IDS)]
    arrays = list(read_arrays(path, names, most=MOST_BYTES).values())
    if not arrays or any(ids.ndim != 3 or 0 in ids.shape for ids in arrays):
        raise FileError(f"{path}: routing needs arrays *_ids of shape [tokens, layers, top_k]")
    try:
        _check_count(arrays)
        return [as_integers(ids, "ids").astype(np.int64, copy=False) for ids in arrays]
    except LoadError as error:
        raise FileError(f"{path}: {error}") from None


def loads_of_windows(ids: IntArray, *, ranks: int, experts: int, tokens: int) -> IntArray:
    """[S, H, R, E] loads of every full window of `tokens` tokens, divided evenly over the ranks.

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


def recorded_loads(path: str | Path, *, ranks: int, tokens: int) -> list[IntArray]:
    """[S, H, R, E] loads of the full windows of every recorded text.

    E is the power of two that holds the largest recorded id.
    """
    texts = read_routing(path)
    experts = 1 << max(int(ids.max()) for ids in texts).bit_length()
    return [loads_of_windows(ids, ranks=ranks, experts=experts, tokens=tokens) for ids in texts]
