"""What one rank tells of records -> the arrays of a piece. Shapes: see schema.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ultraep.trace.schema import (
    ENDS,
    KEY,
    Array,
    Arrays,
    Field,
    Header,
    fields_in_pieces,
    fields_of_plan,
)

Key = tuple[int, int, int]  # step, layer, microbatch


class Entry(NamedTuple):
    """What a rank tells of one microbatch of one layer: first a record, then what is added."""

    key: Key
    values: dict[str, Any]  # by the name of the field
    shared: tuple[Any, ...] | None  # of the plan, on rank 0; None: this is added to a record
    nbytes: int  # of memory, as long as it waits


def piece(entries: list[Entry], header: Header, rank: int, *, dropped: int) -> Arrays:
    """The arrays of one piece."""
    names = (*KEY, *(field.name for field in fields_of_plan()))
    records = [
        one.values | dict(zip(names, one.key + one.shared, strict=False))
        for one in entries
        if one.shared is not None
    ]
    more = [one.values | {"more": one.key} for one in entries if one.shared is None]
    sizes, arrays = header.sizes(rank), {"dropped": np.array([dropped], dtype=np.int64)}
    for name, field in fields_in_pieces(rank).items():
        told = more if field.shape[0] == "M" else records
        if name not in arrays and (field.since == 1 or any(field.name in one for one in told)):
            arrays[name] = _array(field, told, sizes)
    return arrays


def _array(field: Field, told: list[dict[str, Any]], sizes: dict[str, int]) -> Array:
    """One row per record, also if there are none; copies of all of them behind each other."""
    nothing = field.filled(sizes, field.shape[1:])
    values = [values.get(field.name, nothing) for values in told]
    if field.shape[0] == "C":
        none = np.empty((0, *nothing.shape), dtype=field.kind)
        return np.concatenate([none, *values]).astype(field.kind)
    if field.name == ENDS:
        return np.cumsum([len(copies) for copies in values], dtype=field.kind)
    return np.array(values, dtype=field.kind).reshape(len(values), *nothing.shape)
