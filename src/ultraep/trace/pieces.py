"""Records of one rank -> the arrays of a piece.

Shapes: N records, C copies of all of them, M late additions, L slots of the rank, G stages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ultraep.arrays import IntArray
from ultraep.trace.schema import Array, Arrays, Header

Key = tuple[int, int, int]  # step, layer, microbatch


class Record(NamedTuple):
    """One microbatch of one layer, as one rank saw it."""

    key: Key
    policy: str
    plan: tuple[IntArray, IntArray, IntArray] | None  # loads, replicas, quotas; for rank 0 only
    slot_rows: Array
    bytes_moved: int
    began: float
    seconds: list[float]
    nbytes: int  # of memory, as long as it waits


class More(NamedTuple):
    """What is added to a record of before."""

    key: Key
    bytes_moved: int
    began: float
    seconds: list[float]
    nbytes: int


def piece(items: list[Record | More], header: Header, rank: int, *, dropped: int) -> Arrays:
    """The arrays of one piece."""
    records = [item for item in items if isinstance(item, Record)]
    more = [item for item in items if isinstance(item, More)]
    stages, slots = len(header.stages), header.slots_of(rank)
    keys = np.array([record.key for record in records], dtype=np.int64).reshape(-1, 3)
    arrays: Arrays = {
        "step": keys[:, 0],
        "layer": keys[:, 1].astype(np.int32),
        "microbatch": keys[:, 2].astype(np.int32),
        "slot_rows": _stacked([record.slot_rows for record in records], (slots,), np.int32),
        "bytes_moved": np.array([record.bytes_moved for record in records], dtype=np.int64),
        "began": np.array([record.began for record in records], dtype=np.float64),
        "seconds": _stacked([record.seconds for record in records], (stages,), np.float32),
        "more": np.array([item.key for item in more], dtype=np.int64).reshape(-1, 3),
        "more_bytes": np.array([item.bytes_moved for item in more], dtype=np.int64),
        "more_began": np.array([item.began for item in more], dtype=np.float64),
        "more_seconds": _stacked([item.seconds for item in more], (stages,), np.float32),
        "dropped": np.array([dropped], dtype=np.int64),
    }
    return arrays | _shared(records, header) if rank == 0 else arrays


def _shared(records: list[Record], header: Header) -> Arrays:
    """What all ranks know alike."""
    plans = [record.plan for record in records if record.plan is not None]
    none = np.empty((0, 3), dtype=np.int32)
    return {
        "policy": np.array([record.policy for record in records], dtype=np.str_),
        "loads": _stacked([plan[0] for plan in plans], (header.ranks, header.experts), np.int32),
        "copy_ends": np.cumsum([len(plan[1]) for plan in plans], dtype=np.int32),
        "copies": np.concatenate([none, *(plan[1] for plan in plans)]).astype(np.int32),
        "quotas": np.concatenate([none[:, 0], *(plan[2] for plan in plans)]).astype(np.int32),
    }


def _stacked(rows: list[Any], shape: tuple[int, ...], kind: type) -> Array:
    """[N, ...] of rows of that shape, also if there are none."""
    return np.array(rows, dtype=kind).reshape(len(rows), *shape)
