"""The schema of a trace: stages, fields, header. Every reader and writer of traces uses it.

To add a field, add one line to `FIELDS`, with the next version in `since`, and an argument to
`Recorder.add`. Pieces and files then hold it, `Trace.name` returns it, and older traces return its
default. See docs/traces.md.

Shapes: N records of a piece, C replicas of all of them, M late additions, R ranks, E experts, L
slots of a rank, S slots of all ranks, G stages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError, FileError
from ultraep.topology import Topology

FORMAT = "ultraep-trace"
HEADER_FILE = "header.json"
RANK_FOLDER, PIECE = re.compile(r"rank-(\d{5})"), re.compile(r"\d{6}\.npz")
TOPOLOGY = ("ranks", "experts", "slots", "domain", "homes")  # entries of the header
CONFIG = ("policy", "tolerance", "min_tokens_per_replica", "max_replicas", "locality", "objective")
LATER, LEFT = {"objective"}, ("relay", "chunks")  # entries that only new, or old, headers have

FORWARD = ("loads", "plan", "verify", "replicate", "reroute", "dispatch", "experts", "combine")
BACKWARD = ("recompute", "combine back", "weights again", "experts back", "reduce", "dispatch back")
STAGES = FORWARD + BACKWARD
COST = ("plan", "verify", "replicate", "weights again", "reduce")  # that balancing adds

MOST_STAGES, MOST_RANKS = 256, 4096
Array = NDArray[Any]
Arrays = dict[str, Array]
Key = tuple[int, int, int]  # step, layer, microbatch


@dataclass(frozen=True)
class Field:
    """An array of a trace.

    dtype, shape: of the array in a piece of a rank; a letter per dimension, digits are sizes.
    join: how the arrays of all ranks become one array. "key": part of the key of a record; "same":
        rank 0 alone writes it; "ranks": stacked, dimension R after N; "slots": slots of all ranks
        side by side; "sum": added up; "counted": computed by the reader; "pieces": not joined.
    plan: the attribute of a plan that it stores.
    default: the value in records that lack the field; None if every record has it.
    late, fold: the array of later additions, and how they are added to the record. With M instead
        of N in the shape, records have additions only.
    since: the version that added it. Later fields are in a piece only if a record has them.
    """

    name: str
    dtype: str
    shape: str
    join: Literal["key", "same", "ranks", "slots", "sum", "counted", "pieces"]
    plan: str = ""
    default: Any = None
    late: str = ""
    fold: np.ufunc = np.add
    since: int = 1

    def defaults(self, sizes: Mapping[str, int], letters: str) -> Array:
        shape = [sizes[letter] for letter in letters]
        return np.full(shape, self.default or 0, dtype=self.dtype)


FIELDS: tuple[Field, ...] = (
    Field("step", "int64", "N", "key"),
    Field("layer", "int32", "N", "key"),
    Field("microbatch", "int32", "N", "key"),
    Field("policy", "str", "N", "same", plan="config.policy"),
    # rows that every source rank routed to every expert
    Field("loads", "int32", "NRE", "same", plan="loads"),
    # record n has the replicas from copy_ends[n - 1] to copy_ends[n]
    Field("copy_ends", "int32", "N", "same", plan="replicas"),
    Field("copies", "int32", "C3", "same", plan="replicas"),  # expert, host rank, spare slot
    Field("quotas", "int32", "C", "same", plan="quotas"),
    # picoseconds of the `config.Rates` of the plan; zeros: the plan used no rates
    Field("rates", "int64", "N4", "same", plan="rate_numbers", default=0, since=3),
    # thousandths of the nominal speed of every rank; zeros: equal
    Field("speeds", "int32", "NR", "same", plan="speed_numbers", default=0, since=5),
    Field("slot_rows", "int32", "NL", "slots"),  # rows that arrived in each slot
    # weights and gradients of replicas that the rank sent
    Field("bytes_moved", "int64", "N", "ranks", default=0, late="more_bytes"),
    Field("began", "float64", "N", "ranks"),  # seconds since 1970
    # start of the backward pass; NaN without one
    Field("back_began", "float64", "M", "ranks", default=np.nan, late="more_began", fold=np.fmin),
    Field("seconds", "float32", "NG", "ranks", default=0, late="more_seconds"),
    Field("more", "int64", "M3", "pieces"),  # step, layer, microbatch of each addition
    Field("dropped", "int64", "1", "sum"),  # records and additions lost so far
    Field("left_out", "int64", "1", "counted"),  # records that some ranks lack
)


IGNORED = ("waited", "more_waited", "summary", "more_lines", "stage_sums")  # of earlier versions
VERSION = max(entry.since for entry in FIELDS)
KEY = tuple(entry.name for entry in FIELDS if entry.join == "key")
PLAN_FIELDS = tuple(entry for entry in FIELDS if entry.plan)  # that rank 0 takes from a plan
ENDS = "copy_ends"


def of_backward(stages: tuple[str, ...]) -> NDArray[np.bool_]:
    """[G] whether each stage belongs to the backward pass."""
    return np.isin(stages, BACKWARD)


def fields_in_pieces(rank: int) -> Mapping[str, Field]:
    """Return the arrays in a piece of this rank, by name; additions have M instead of N."""
    arrays = {}
    for entry in FIELDS:
        if entry.join != "counted" and (entry.join != "same" or rank == 0):
            if entry.shape[0] != "M" or not entry.late:
                arrays[entry.name] = entry
            if entry.late:
                arrays[entry.late] = replace(entry, shape="M" + entry.shape[1:])
    return arrays


@cache
def fields_in_file() -> Mapping[str, Field]:
    """Return the arrays of a trace with joined ranks, by name."""
    arrays = {}
    for entry in FIELDS:
        if entry.join != "pieces":
            joined = "NR" + entry.shape[1:] if entry.join == "ranks" else entry.shape
            arrays[entry.name] = replace(entry, shape=joined.replace("L", "S"))
    return arrays


@dataclass(frozen=True)
class Header:
    """The settings of a run, valid for all records of its trace."""

    ranks: int
    experts: int
    slots: int
    domain: int
    homes: tuple[int, ...] | None
    policy: str
    tolerance: float
    min_tokens_per_replica: int
    max_replicas: int | None
    locality: bool
    objective: str = "balance"
    stages: tuple[str, ...] = STAGES
    note: str = ""
    created: str = ""
    version: int = field(default_factory=lambda: VERSION)

    def __post_init__(self) -> None:
        if len(set(self.stages)) != len(self.stages):
            raise ConfigError(f"stages must differ, got {', '.join(self.stages)}")
        if not self.created:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            object.__setattr__(self, "created", now)

    @classmethod
    def of(cls, topology: Topology, config: BalanceConfig, **options: Any) -> Header:
        """Return the header of a run. options: note."""
        settings = {name: getattr(topology, name) for name in TOPOLOGY}
        settings |= {name: getattr(config, name) for name in CONFIG}
        return cls(**settings, **options)

    @cached_property
    def topology(self) -> Topology:
        return Topology(**{name: getattr(self, name) for name in TOPOLOGY})

    @cached_property
    def config(self) -> BalanceConfig:
        """The config of the run; a record may have its own policy."""
        return BalanceConfig(**{name: getattr(self, name) for name in CONFIG})

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT} | asdict(self) | {"version": VERSION}, indent=1)

    @classmethod
    def from_json(cls, text: str, where: str | Path) -> Header:
        """Return the header in the file `where`, checked."""
        try:
            content = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise FileError(f"{where}: truncated or damaged: {error}") from None
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise FileError(f"{where}: not the header of a trace")
        version = content.get("version")
        if type(version) is not int or not 1 <= version <= VERSION:
            raise FileError(
                f"{where}: version {version} of the trace format, but this ultraep reads 1 to "
                f"{VERSION}; update ultraep"
            )
        for name in LEFT:
            content.pop(name, None)
        known = {entry.name for entry in fields(cls)}
        wrong = known - LATER - content.keys() | content.keys() - known
        if wrong:
            raise FileError(f"{where}: entries missing or unknown: {', '.join(sorted(wrong))}")
        for name in ("homes", "stages"):
            if isinstance(content[name], list):
                content[name] = tuple(content[name])
        try:
            header = cls(**content)
            _ = header.topology, header.config
            header._check()
        except (ConfigError, TypeError) as error:
            raise FileError(f"{where}: {error}") from None
        return header

    def _check(self) -> None:
        texts = (self.note, self.created, *self.stages)
        if not isinstance(self.stages, tuple) or not all(isinstance(text, str) for text in texts):
            raise ConfigError("stages, note and created must be text")
        if len(self.stages) > MOST_STAGES:
            raise ConfigError(f"{len(self.stages):,} stages, but a trace has at most {MOST_STAGES}")
        if self.ranks > MOST_RANKS:
            raise ConfigError(f"{self.ranks:,} ranks, but a trace has at most {MOST_RANKS:,}")

    def sizes(self, rank: int = 0) -> dict[str, int]:
        """Return the sizes of the dimensions that the header determines, by letter."""
        first = self.topology.first_slot_of_rank
        sizes = {"R": self.ranks, "E": self.experts, "S": int(first[-1]), "G": len(self.stages)}
        slots = int(first[rank + 1] - first[rank])
        return sizes | {"L": slots, "1": 1, "3": 3, "4": 4}


def no_records(header: Header, rank: int) -> Arrays:
    """Return the arrays of a piece without records and additions."""
    sizes = {"N": 0, "C": 0, "M": 0} | header.sizes(rank)
    return {n: entry.defaults(sizes, entry.shape) for n, entry in fields_in_pieces(rank).items()}


def rank_folder(rank: int) -> str:
    return f"rank-{rank:05d}"


def piece_file(number: int) -> str:
    return f"{number:06d}.npz"


def checked_arrays(
    arrays: Arrays, wanted: Mapping[str, Field], sizes: dict[str, int], where: str | Path
) -> Arrays:
    """Return the wanted arrays; raise `FileError` unless names, types and shapes are right.

    A missing array of a later version becomes its default; without a default it stays missing.
    """
    needed = {name for name, entry in wanted.items() if entry.since == 1}
    wrong = needed - arrays.keys() | arrays.keys() - wanted.keys() - set(IGNORED)
    if wrong:
        raise FileError(f"{where}: arrays missing or unknown: {', '.join(sorted(wrong))}")
    known = dict(sizes)
    for name, entry in wanted.items():
        if name in arrays:
            _check_array(name, arrays[name], entry, known, where)
    if (ends := arrays.get(ENDS)) is not None:
        last, count = int(ends[-1]) if len(ends) else 0, len(arrays["copies"])
        if (np.diff(ends, prepend=0) < 0).any() or last != count:
            raise FileError(f"{where}: {ENDS} must rise to {count} replicas, got {last} at the end")
    return {
        name: arrays[name] if name in arrays else entry.defaults(known, entry.shape)
        for name, entry in wanted.items()
        if name in arrays or entry.default is not None
    }


def _check_array(
    name: str, array: Array, wanted: Field, known: dict[str, int], where: str | Path
) -> None:
    """Check type and shape; the first array with a letter determines its size."""
    dtype, letters = wanted.dtype, wanted.shape
    right = array.dtype.kind == "U" if dtype == "str" else array.dtype == np.dtype(dtype)
    if right and array.ndim == len(letters):
        for letter, size in zip(letters, array.shape, strict=True):
            known.setdefault(letter, size)
        if array.shape == tuple(known[letter] for letter in letters):
            return
    shape = [known.get(letter, letter) for letter in letters]
    raise FileError(
        f"{where}: {name} must be {dtype} {shape}, got {array.dtype} {list(array.shape)}"
    )


def take_records(arrays: Arrays, records: IntArray) -> Arrays:
    """Return the arrays of some records, in that order, with their replicas."""
    ends = np.cumsum(np.diff(arrays[ENDS], prepend=0)[records], dtype=np.int64)
    counts = np.diff(ends, prepend=0)
    shifts = arrays[ENDS][records] - ends  # from the new position of a replica to the old one
    copies = np.arange(int(counts.sum())) + np.repeat(shifts, counts)
    letters, rows = fields_in_file(), {"N": records, "C": copies}
    chosen = {
        name: array[rows[letters[name].shape[0]]] if letters[name].shape[0] in rows else array
        for name, array in arrays.items()
    }
    return chosen | {ENDS: ends}
