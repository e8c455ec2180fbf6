"""Join the records of all ranks, matched by step, layer and microbatch, as the schema defines.

Shapes: N records, M late additions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ultraep.arrays import IntArray
from ultraep.trace.schema import KEY, Array, Arrays, Field, fields_in_file, take_records


def join(ranks: Sequence[Arrays]) -> Arrays:
    """Match the records and add their late additions. The first record of a key counts."""
    keys = [np.column_stack([rank[name] for name in KEY]) for rank in ranks]
    numbers = _numbered([*keys, *(rank["more"] for rank in ranks)])
    own, late = numbers[: len(ranks)], numbers[len(ranks) :]
    unique = [np.unique(number, return_index=True) for number in own]
    common = unique[0][0]
    for known, _ in unique[1:]:
        common = np.intersect1d(common, known, assume_unique=True)
    picked = [index[np.searchsorted(known, common)] for known, index in unique]
    order = np.argsort(picked[0], kind="stable")  # the order of rank 0
    rows = [index[order] for index in picked]
    places = [_places(number, common, order) for number in late]
    repeated = max(len(number) - len(known) for number, (known, _) in zip(own, unique, strict=True))
    left_out = len(np.unique(np.concatenate(own))) - len(common) + repeated
    fields = fields_in_file()
    same = {name: ranks[0][name] for name, f in fields.items() if f.join in ("key", "same")}
    joined = take_records(same, rows[0])
    for name, field in fields.items():
        if field.join == "sum":
            joined[name] = np.sum([rank[name] for rank in ranks], axis=0)
        elif field.join in ("ranks", "slots"):
            inputs = zip(ranks, rows, places, strict=True)
            parts = [_of_rank(field, *arguments) for arguments in inputs]
            stack = np.stack if field.join == "ranks" else np.concatenate
            joined[name] = stack(parts, axis=1)
    return joined | {"left_out": np.array([left_out])}


def _of_rank(field: Field, rank: Arrays, rows_N: IntArray, places_M: IntArray) -> Array:
    """[N, ...] a field of one rank, with its late additions.

    rows_N: the row of each record.   places_M: the record of each addition; -1: left out.
    """
    if not field.late:
        return rank[field.name][rows_N]
    here, late = places_M >= 0, rank[field.late]
    wide = np.float64 if late.dtype.kind == "f" else np.int64
    if field.name in rank:
        whole = rank[field.name][rows_N].astype(wide)
    else:
        whole = np.full((len(rows_N), *late.shape[1:]), field.default, dtype=wide)
    if (late != field.default).any():
        field.fold.at(whole, places_M[here], late[here])
    return whole


def _numbered(keys: Sequence[IntArray]) -> list[IntArray]:
    """Replace each key by a number; equal keys have equal numbers."""
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
    """[M] the record of each addition; -1: a record that was left out."""
    if not len(common):
        return np.full(len(number_M), -1)
    near = np.minimum(np.searchsorted(common, number_M), len(common) - 1)
    place_of = np.argsort(order, kind="stable")
    return np.where(common[near] == number_M, place_of[near], -1)
