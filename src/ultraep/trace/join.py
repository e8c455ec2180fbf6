"""The records of all ranks, matched by step, layer and microbatch.

Shapes: N records, M late additions, R ranks, S slots of all ranks, G stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.trace.schema import Arrays


@dataclass(frozen=True)
class Joined:
    """What ranks know for themselves, of the records that all of them have."""

    first: IntArray  # [N] which records of rank 0 these are
    slot_rows: IntArray  # [N, S]
    bytes_moved: IntArray  # [N, R]
    began: NDArray[np.float64]  # [N, R]
    back_began: NDArray[np.float64]  # [N, R]
    seconds: NDArray[np.float64]  # [N, R, G]
    dropped: int
    left_out: int


def join(ranks: Sequence[Arrays], stages: int) -> Joined:
    """Match the records, and add to them what came late.

    Of records with the same key the first one counts.
    """
    keys = [np.column_stack([rank["step"], rank["layer"], rank["microbatch"]]) for rank in ranks]
    numbers = _numbered([*keys, *(rank["more"] for rank in ranks)])
    own, late = numbers[: len(ranks)], numbers[len(ranks) :]
    found = [np.unique(number, return_index=True) for number in own]
    common = found[0][0]
    for known, _ in found[1:]:
        common = np.intersect1d(common, known, assume_unique=True)
    picked = [index[np.searchsorted(known, common)] for known, index in found]
    order = np.argsort(picked[0], kind="stable")  # as rank 0 recorded them
    picked = [rows[order] for rows in picked]
    began, back_began, seconds, moved = [], [], [], []
    for rank, rows, number in zip(ranks, picked, late, strict=True):
        places = _places(number, common, order)
        bytes_N, began_N, seconds_NG = _late(rank, places, len(common), stages)
        moved.append(rank["bytes_moved"][rows] + bytes_N)
        began.append(rank["began"][rows])
        back_began.append(began_N)
        seconds.append(rank["seconds"][rows] + seconds_NG)
    every = np.unique(np.concatenate(own))
    repeated = max(len(number) - len(known) for number, (known, _) in zip(own, found, strict=True))
    return Joined(
        first=picked[0],
        slot_rows=np.concatenate(
            [rank["slot_rows"][rows] for rank, rows in zip(ranks, picked, strict=True)], axis=1
        ),
        bytes_moved=np.stack(moved, axis=1),
        began=np.stack(began, axis=1),
        back_began=np.stack(back_began, axis=1),
        seconds=np.stack(seconds, axis=1),
        dropped=sum(int(rank["dropped"][0]) for rank in ranks),
        left_out=len(every) - len(common) + repeated,
    )


def _numbered(keys: Sequence[IntArray]) -> list[IntArray]:
    """A number in place of each key; equal keys have equal numbers."""
    every = np.concatenate(keys)
    if not len(every):
        return [key[:, 0] for key in keys]
    spans = [int(end) + 1 for end in every.max(axis=0)]
    if math.prod(spans) < 2**62:
        numbers = (every[:, 0] * spans[1] + every[:, 1]) * spans[2] + every[:, 2]
    else:
        numbers = np.unique(every, axis=0, return_inverse=True)[1].reshape(-1)
    return np.split(numbers, np.cumsum([len(key) for key in keys])[:-1])


def _places(number_M: IntArray, common: IntArray, order: IntArray) -> IntArray:
    """[M] the record that each addition belongs to; -1: one that was left out."""
    if not len(common):
        return np.full(len(number_M), -1)
    near = np.minimum(np.searchsorted(common, number_M), len(common) - 1)
    place_of = np.argsort(order, kind="stable")
    return np.where(common[near] == number_M, place_of[near], -1)


def _late(
    rank: Arrays, places_M: IntArray, records: int, stages: int
) -> tuple[IntArray, NDArray[np.float64], NDArray[np.float64]]:
    """Bytes, begin and seconds that came late, by record."""
    here = places_M >= 0
    places = places_M[here]
    bytes_N = np.zeros(records, dtype=np.int64)
    np.add.at(bytes_N, places, rank["more_bytes"][here])
    began_N = np.full(records, np.inf)
    np.minimum.at(began_N, places, rank["more_began"][here])
    seconds_NG = np.zeros((records, stages))
    np.add.at(seconds_NG, places, rank["more_seconds"][here])
    return bytes_N, np.where(np.isinf(began_N), np.nan, began_N), seconds_NG
