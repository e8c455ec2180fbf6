"""What one rank tells of records -> the arrays of a piece. Shapes: see schema.py."""

from __future__ import annotations

from collections.abc import Sequence
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
from ultraep.trace.summary import summary_of

Key = tuple[int, int, int]  # step, layer, microbatch


class Entry(NamedTuple):
    """What a rank tells of one microbatch of one layer: first a record, then what is added."""

    key: Key
    values: dict[str, Any]  # by the name of the field
    shared: tuple[Any, ...] | None  # of the plan, on rank 0; None: this is added to a record
    nbytes: int  # of memory, as long as it waits


def piece(entries: list[Entry], header: Header, rank: int, *, dropped: int) -> Arrays:
    """Return the arrays of one piece, with its summary."""
    records, more = ([one for one in entries if (one.shared is None) == late] for late in (0, 1))
    names = (*KEY, *(field.name for field in fields_of_plan()))
    told = zip(*(one.key + (one.shared or ()) for one in records), strict=True)
    columns: dict[str, Sequence[Any]] = dict(zip(names, told, strict=False))
    columns["more"] = [one.key for one in more]
    sizes, arrays = header.sizes(rank), {"dropped": np.array([dropped], dtype=np.int64)}
    for name, field in fields_in_pieces(rank).items():
        by_record = more if field.shape[0] == "M" else records
        values = columns.get(field.name)
        if values is None:
            optional = field.since > 1
            if name in arrays or (optional and not any(field.name in e.values for e in by_record)):
                continue
            nothing = field.filled(sizes, field.shape[1:]) if optional else None
            values = [one.values.get(field.name, nothing) for one in by_record]
        arrays[name] = _array(field, values, [sizes[letter] for letter in field.shape[1:]])
    return arrays | summary_of(header, arrays)


def _array(field: Field, values: Sequence[Any], shape: list[int]) -> Array:
    """One row per record, also if there are none; copies of all of them behind each other."""
    if field.shape[0] == "C":
        none = np.empty((0, *shape), dtype=field.kind)
        return np.concatenate([none, *values]).astype(field.kind)
    if field.name == ENDS:
        return np.cumsum([len(copies) for copies in values], dtype=field.kind)
    return np.array(values, dtype=field.kind).reshape(len(values), *shape)
