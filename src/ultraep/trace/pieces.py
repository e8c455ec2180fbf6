"""What one rank tells of records -> the arrays of a piece. Shapes: see schema.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ultraep.trace.schema import ENDS, Array, Arrays, Field, Header, fields_in_pieces

Key = tuple[int, int, int]  # step, layer, microbatch


class Entry(NamedTuple):
    """What a rank tells of one microbatch of one layer: first a record, then what is added."""

    values: dict[str, Any]  # by the name of the field
    late: bool
    nbytes: int  # of memory, as long as it waits


def piece(entries: list[Entry], header: Header, rank: int, *, dropped: int) -> Arrays:
    """The arrays of one piece."""
    told = {late: [one.values for one in entries if one.late == late] for late in (False, True)}
    sizes, arrays = header.sizes(rank), {"dropped": np.array([dropped], dtype=np.int64)}
    for name, field in fields_in_pieces(rank).items():
        by_record = told[field.shape[0] == "M"]
        if name not in arrays and (field.since == 1 or any(field.name in v for v in by_record)):
            arrays[name] = _array(field, by_record, sizes)
    return arrays


def _array(field: Field, told: list[dict[str, Any]], sizes: dict[str, int]) -> Array:
    """One row per record, also if there are none; copies of all of them behind each other."""
    nothing = field.filled(sizes, field.shape[1:])
    values = [values.get(field.name, nothing) for values in told]
    if field.shape[0] == "C":
        none = np.empty((0, *nothing.shape), dtype=field.kind)
        return np.concatenate([none, *values]).astype(field.kind)
    if field.name == ENDS:
        return np.cumsum(values, dtype=field.kind)
    return np.array(values, dtype=field.kind).reshape(len(values), *nothing.shape)
