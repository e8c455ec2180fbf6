"""What a trace consists of: its stages, its fields, its header. All that handles traces reads this.

    folder/
    |-- header.json
    |-- rank-00000/000000.npz, 000001.npz, ...     pieces, in order
    `-- rank-00001/...

A new field is one line of `FIELDS`, with `since` of the next version, and an argument of
`Recorder.add`: pieces and files hold it, `Trace.name` shows it, and what was written before reads
as its default. See docs/traces.md.

Shapes: N records of a piece, C copies of all of them, M late additions, T lines and K columns of
its summary, R ranks, E experts, L slots of a rank, S slots of all ranks, G stages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import IntEnum
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError, FileError
from ultraep.hops import MODES, Relay
from ultraep.topology import Topology

FORMAT = "ultraep-trace"
HEADER_FILE = "header.json"
RANK_FOLDER, PIECE = re.compile(r"rank-(\d{5})"), re.compile(r"\d{6}\.npz")
SHAPE = ("ranks", "experts", "slots", "domain", "homes")  # entries of the header: the topology
SETTINGS = (
    *("policy", "tolerance", "min_tokens_per_replica", "max_replicas", "locality"),
    "objective",
)
# Entries of the header that older traces do not have, or that not every recorder knows.
UNTOLD: dict[str, Any] = {"objective": "balance", "relay": "", "chunks": 0}

FORWARD = ("loads", "plan", "verify", "replicate", "reroute", "dispatch", "experts", "combine")
BACKWARD = (
    *("recompute", "combine back", "weights again"),
    *("experts back", "reduce", "dispatch back"),
)
STAGES = FORWARD + BACKWARD
ATTENTION, ATTENTION_BACK = "attention", "attention back"
SIMULATED = (ATTENTION, *STAGES, ATTENTION_BACK)  # the simulator knows what lies around, too

MOST_STAGES, MOST_RANKS = 256, 4096
NOT_TOLD = Relay()
Array = NDArray[Any]
Arrays = dict[str, Array]
Key = tuple[int, int, int]  # step, layer, microbatch


@dataclass(frozen=True)
class Field:
    """An array of a trace, and what becomes of it on its way.

    kind, shape: its type; a letter for every dimension in the pieces of a rank, digits are
        themselves.
    join: how those of all ranks become one. "key": a record is known by it; "same": all ranks know
        it alike, rank 0 writes it; "ranks": side by side, a dimension R behind N; "slots": those
        of all ranks in a row; "sum": added up; "counted" by the reader; "pieces": not at all.
    plan: the attribute of a plan that it is.
    default: for records that do not tell; None: all of them tell.
    late, fold: the array of what is told later, and how that goes into the record. With M in
        place of N nothing is told before.
    table: what becomes of it in a table: "plain"; over the ranks "sum" or "max"; "": nothing.
    since: the version it came with. After the first, pieces hold it only if a record tells it.
    """

    name: str
    kind: str
    shape: str
    join: Literal["key", "same", "ranks", "slots", "sum", "counted", "pieces"]
    plan: str = ""
    default: Any = None
    late: str = ""
    fold: np.ufunc = np.add
    table: Literal["", "plain", "sum", "max"] = ""
    since: int = 1

    def filled(self, sizes: Mapping[str, int], letters: str) -> Array:
        """Nothing but defaults, in this shape."""
        shape = [sizes[letter] for letter in letters]
        return np.full(shape, self.default or 0, dtype=self.kind)


FIELDS: tuple[Field, ...] = (
    Field("step", "int64", "N", "key", table="plain"),
    Field("layer", "int32", "N", "key", table="plain"),
    Field("microbatch", "int32", "N", "key", table="plain"),
    Field("policy", "str", "N", "same", plan="config.policy", table="plain"),
    # tokens that every source rank routed to every expert
    Field("loads", "int32", "NRE", "same", plan="loads"),
    # record n has the copies from copy_ends[n - 1] to copy_ends[n]
    Field("copy_ends", "int32", "N", "same", plan="replicas"),
    Field("copies", "int32", "C3", "same", plan="replicas"),  # expert, host rank, spare slot
    Field("quotas", "int32", "C", "same", plan="quotas"),
    # picoseconds of `config.Rates` that the plan was made by; zeros: there were none
    Field("rates", "int64", "N4", "same", plan="rate_numbers", default=0, since=3),
    Field("slot_rows", "int32", "NL", "slots"),  # rows that arrived in each slot
    # weights and gradients of copies that the rank sent
    Field("bytes_moved", "int64", "N", "ranks", default=0, late="more_bytes", table="sum"),
    Field("began", "float64", "N", "ranks"),  # seconds since 1970
    # the same of what was told late, which is backward; NaN: nothing was
    Field("back_began", "float64", "M", "ranks", default=np.nan, late="more_began", fold=np.fmin),
    Field("seconds", "float32", "NG", "ranks", default=0, late="more_seconds", table="max"),
    # of the seconds, those at the end of a stage in which the rank waited for others
    Field("waited", "float32", "NG", "ranks", default=0, late="more_waited", since=2),
    Field("more", "int64", "M3", "pieces"),  # step, layer, microbatch that additions belong to
    Field("dropped", "int64", "1", "sum"),  # records and additions that were lost so far
    Field("left_out", "int64", "1", "counted"),  # records that not all ranks have
)


class Column(IntEnum):
    """A column of the summary. Times are nanoseconds on this rank."""

    STEP = 0
    LAYER = 1
    MICROBATCH = 2
    LATE = 3  # 0: a record of the piece; 1: additions to one record of an earlier piece
    ROWS = 4  # that arrived at this rank
    BYTES = 5
    EXPERTS = 6
    EXPERTS_BACK = 7
    COST = 8  # of the stages that balancing adds
    ROUTED = 9  # rows of all ranks; rank 0 alone stores this and the following columns
    PEAK = 10  # rows of the fullest rank without replicas
    REPLICAS = 11


# A summary of each piece, for the viewer. `Trace` does not hold it: it follows from `FIELDS`.
SUMMARIES: dict[str, Field] = {
    "summary": Field("summary", "int64", "TK", "pieces", since=4),  # records, then late lines
    "more_lines": Field("more_lines", "int32", "M", "pieces", since=4),  # line of each addition
    "stage_sums": Field("stage_sums", "float64", "G", "pieces", since=4),  # seconds of all lines
}
VERSION = max(one.since for one in (*FIELDS, *SUMMARIES.values()))
KEY = tuple(one.name for one in FIELDS if one.join == "key")
ENDS = "copy_ends"  # of what has the letter C


def of_backward(stages: tuple[str, ...]) -> NDArray[np.bool_]:
    """[G] whether each stage is one of backward."""
    return np.isin(stages, (*BACKWARD, ATTENTION_BACK))


def fields_in_pieces(rank: int) -> Mapping[str, Field]:
    """Return the arrays in a piece of this rank, by name; of additions with M in place of N."""
    return _fields_in_pieces(rank == 0)


@cache
def _fields_in_pieces(first: bool) -> Mapping[str, Field]:
    found = {}
    for one in FIELDS:
        if one.join != "counted" and (one.join != "same" or first):
            if one.shape[0] != "M" or not one.late:
                found[one.name] = one
            if one.late:
                found[one.late] = replace(one, shape="M" + one.shape[1:])
    return found


def no_records(header: Header, rank: int) -> Arrays:
    """Return the arrays of a piece without records and additions."""
    sizes = {"N": 0, "C": 0, "M": 0} | header.sizes(rank)
    return {
        name: field.filled(sizes, field.shape) for name, field in fields_in_pieces(rank).items()
    }


def fields_of_plan() -> list[Field]:
    """What rank 0 takes from a plan."""
    return [one for one in FIELDS if one.plan]


@cache
def fields_in_file() -> Mapping[str, Field]:
    """Return the arrays of a trace whose ranks were joined, by name."""
    found = {}
    for one in FIELDS:
        if one.join != "pieces":
            shape = "NR" + one.shape[1:] if one.join == "ranks" else one.shape.replace("L", "S")
            found[one.name] = replace(one, shape=shape)
    return found


@dataclass(frozen=True)
class Header:
    """What holds for all records of a trace."""

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
    objective: str = UNTOLD["objective"]
    relay: str = ""  # how weights were to be sent; "": nobody tells
    chunks: int = 0
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
    def of(
        cls,
        topology: Topology,
        config: BalanceConfig,
        *,
        relay: Relay = NOT_TOLD,
        stages: tuple[str, ...] = STAGES,
        note: str = "",
    ) -> Header:
        """The header of a run."""
        homes = None if topology.homes is None else tuple(int(home) for home in topology.homes)
        return cls(
            ranks=topology.ranks,
            experts=topology.experts,
            slots=topology.slots,
            domain=topology.domain_size,
            homes=homes,
            relay=relay.mode,
            chunks=relay.chunks,
            stages=tuple(stages),
            note=note,
            **{name: getattr(config, name) for name in SETTINGS},
        )

    @cached_property
    def topology(self) -> Topology:
        """Where experts live, and where copies may go."""
        return Topology(**{name: getattr(self, name) for name in SHAPE})

    @cached_property
    def config(self) -> BalanceConfig:
        """How microbatches were balanced; a record may have a policy of its own."""
        return BalanceConfig(**{name: getattr(self, name) for name in SETTINGS})

    def to_json(self) -> str:
        """One object, readable."""
        return json.dumps({"format": FORMAT} | asdict(self) | {"version": VERSION}, indent=1)

    @classmethod
    def from_json(cls, text: str, where: str | Path) -> Header:
        """The header of the file `where`, checked."""
        content = _object(text, where)
        version = content.get("version")
        if type(version) is not int or not 1 <= version <= VERSION:
            raise FileError(
                f"{where}: a trace of version {version}, this program reads versions 1 to {VERSION}"
            )
        content = UNTOLD | content
        wrong = {entry.name for entry in fields(cls)} ^ content.keys()
        if wrong:
            told = ", ".join(sorted(wrong))
            raise FileError(f"{where}: entries that are missing or unknown: {told}")
        for name in ("homes", "stages"):
            if isinstance(content[name], list):
                content[name] = tuple(content[name])
        try:
            header = cls(**content)
            _ = header.topology, header.config
            _check_words(header)
        except (ConfigError, TypeError) as error:
            raise FileError(f"{where}: {error}") from None
        return header

    def slots_of(self, rank: int) -> int:
        """Home slots and spare slots of a rank."""
        first = self.topology.first_slot_of_rank
        return int(first[rank + 1] - first[rank])

    def sizes(self, rank: int = 0) -> dict[str, int]:
        """What the letters of shapes stand for, as far as the header knows."""
        slots = int(self.topology.first_slot_of_rank[-1])
        known = {"R": self.ranks, "E": self.experts, "S": slots, "G": len(self.stages)}
        return known | {"L": self.slots_of(rank), "K": len(Column), "1": 1, "3": 3, "4": 4}


def _object(text: str, where: str | Path) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise FileError(f"{where}: truncated or damaged: {error}") from None
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise FileError(f"{where}: not the header of a trace")
    return content


def _check_words(header: Header) -> None:
    if header.relay not in ("", *MODES) or type(header.chunks) is not int or header.chunks < 0:
        raise ConfigError(f"relay {header.relay!r} in {header.chunks!r} chunks is not known")
    words = (header.note, header.created, *header.stages)
    if not isinstance(header.stages, tuple) or not all(isinstance(word, str) for word in words):
        raise ConfigError("stages, note and created must be text")
    if len(header.stages) > MOST_STAGES:
        raise ConfigError(f"{len(header.stages):,} stages, a trace has at most {MOST_STAGES}")
    if header.ranks > MOST_RANKS:
        raise ConfigError(f"{header.ranks:,} ranks, traces of at most {MOST_RANKS:,} are read")


def rank_folder(rank: int) -> str:
    """Name of the folder with the pieces of a rank."""
    return f"rank-{rank:05d}"


def piece_file(number: int) -> str:
    """Name of a piece."""
    return f"{number:06d}.npz"


def checked_arrays(
    arrays: Arrays, wanted: Mapping[str, Field], sizes: dict[str, int], where: str | Path
) -> Arrays:
    """Return all arrays that are wanted; `FileError` unless names, types and shapes are right.

    An array of a later version that is missing becomes its default, or stays missing if it has
    none.
    """
    needed = {name for name, one in wanted.items() if one.since == 1}
    wrong = needed - arrays.keys() | arrays.keys() - wanted.keys()
    if wrong:
        told = ", ".join(sorted(wrong))
        raise FileError(f"{where}: no piece of a trace: arrays missing or unknown: {told}")
    known = dict(sizes)
    for name, one in wanted.items():
        if name in arrays:
            _check_array(name, arrays[name], one, known, where)
    _check_ends(arrays, where)
    return {
        name: arrays[name] if name in arrays else one.filled(known, one.shape)
        for name, one in wanted.items()
        if name in arrays or one.default is not None
    }


def _check_array(
    name: str, array: Array, wanted: Field, known: dict[str, int], where: str | Path
) -> None:
    """Compare type and shape; what a letter stands for is known from then on."""
    kind, letters = wanted.kind, wanted.shape
    right = array.dtype.kind == "U" if kind == "str" else array.dtype == np.dtype(kind)
    if right and array.ndim == len(letters):
        for letter, size in zip(letters, array.shape, strict=True):
            known.setdefault(letter, size)
        if array.shape == tuple(known[letter] for letter in letters):
            return
    shape = [known.get(letter, letter) for letter in letters]
    raise FileError(
        f"{where}: {name} must be {kind} {shape}, got {array.dtype} {list(array.shape)}"
    )


def _check_ends(arrays: Arrays, where: str | Path) -> None:
    ends = arrays.get(ENDS)
    if ends is None:
        return
    last = int(ends[-1]) if len(ends) else 0
    if (np.diff(ends, prepend=0) < 0).any() or last != len(arrays["copies"]):
        raise FileError(f"{where}: {ENDS} do not fit the {len(arrays['copies'])} copies")


def taken(arrays: Arrays, records: IntArray) -> Arrays:
    """Those of some records, in that order, with their copies."""
    ends = np.cumsum(np.diff(arrays[ENDS], prepend=0)[records], dtype=np.int64)
    counts = np.diff(ends, prepend=0)
    shifts = arrays[ENDS][records] - ends  # from where a copy stands now to where it stood
    copies = np.arange(int(counts.sum())) + np.repeat(shifts, counts)
    letters, rows = fields_in_file(), {"N": records, "C": copies}
    found = {
        name: array[rows[letters[name].shape[0]]] if letters[name].shape[0] in rows else array
        for name, array in arrays.items()
    }
    return found | {ENDS: ends}
