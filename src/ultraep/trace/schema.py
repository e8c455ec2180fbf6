"""What a trace consists of: its header, and the names, types and shapes of its arrays.

    folder/
    |-- header.json
    |-- rank-00000/000000.npz, 000001.npz, ...     pieces, in order
    `-- rank-00001/...

Shapes: N records of a piece, C copies of all of them, M late additions, R ranks, E experts, L slots
of a rank, S slots of all ranks, G stages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError, FileError
from ultraep.topology import Topology

FORMAT = "ultraep-trace"
VERSION = 1
HEADER_FILE = "header.json"

FORWARD = ("loads", "plan", "verify", "replicate", "reroute", "dispatch", "experts", "combine")
BACKWARD = (
    *("recompute", "combine back", "weights again"),
    *("experts back", "reduce", "dispatch back"),
)
STAGES = FORWARD + BACKWARD

Array = NDArray[Any]
Arrays = dict[str, Array]
Field = tuple[str, str]  # type, and a letter for every dimension; 1 and 3 are themselves

OF_RANK: dict[str, Field] = {  # in the pieces of every rank
    "step": ("int64", "N"),
    "layer": ("int32", "N"),
    "microbatch": ("int32", "N"),
    "slot_rows": ("int32", "NL"),  # rows that arrived in each slot of the rank
    "bytes_moved": ("int64", "N"),  # weights and gradients of copies that the rank sent
    "began": ("float64", "N"),  # seconds since 1970
    "seconds": ("float32", "NG"),
    "more": ("int64", "M3"),  # step, layer, microbatch that the next ones are added to
    "more_bytes": ("int64", "M"),
    "more_began": ("float64", "M"),
    "more_seconds": ("float32", "MG"),
    "dropped": ("int64", "1"),  # records and additions that the rank has lost so far
}
OF_GROUP: dict[str, Field] = {  # known to all ranks alike: in the pieces of rank 0
    "policy": ("str", "N"),
    "loads": ("int32", "NRE"),
    "copy_ends": ("int32", "N"),  # record n has the copies from copy_ends[n - 1] to copy_ends[n]
    "copies": ("int32", "C3"),  # expert, host rank, spare slot
    "quotas": ("int32", "C"),
}
OF_FILE: dict[str, Field] = {  # all ranks in one file
    "header": ("str", ""),
    "step": ("int64", "N"),
    "layer": ("int32", "N"),
    "microbatch": ("int32", "N"),
    **OF_GROUP,
    "slot_rows": ("int32", "NS"),
    "bytes_moved": ("int64", "NR"),
    "began": ("float64", "NR"),
    "back_began": ("float64", "NR"),  # of the late additions; NaN: there were none
    "seconds": ("float32", "NRG"),
    "dropped": ("int64", "1"),
    "left_out": ("int64", "1"),
}


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
    stages: tuple[str, ...] = STAGES
    note: str = ""
    created: str = ""
    version: int = VERSION

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
            policy=config.policy,
            tolerance=config.tolerance,
            min_tokens_per_replica=config.min_tokens_per_replica,
            max_replicas=config.max_replicas,
            locality=config.locality,
            stages=tuple(stages),
            note=note,
        )

    @cached_property
    def topology(self) -> Topology:
        """Where experts live, and where copies may go."""
        return Topology(
            ranks=self.ranks,
            experts=self.experts,
            slots=self.slots,
            domain=self.domain,
            homes=self.homes,
        )

    @cached_property
    def config(self) -> BalanceConfig:
        """How microbatches were balanced; a record may have a policy of its own."""
        return BalanceConfig(
            policy=self.policy,
            tolerance=self.tolerance,
            min_tokens_per_replica=self.min_tokens_per_replica,
            max_replicas=self.max_replicas,
            locality=self.locality,
        )

    def to_json(self) -> str:
        """One object, readable."""
        return json.dumps({"format": FORMAT} | asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str, where: str | Path) -> Header:
        """The header of the file `where`, checked."""
        content = _object(text, where)
        version = content.pop("version", None)
        if version != VERSION:
            raise FileError(
                f"{where}: a trace of version {version}, this program reads version {VERSION}"
            )
        known = {field.name for field in fields(cls)} - {"version"}
        if content.keys() != known:
            wrong = sorted(known ^ content.keys())
            raise FileError(f"{where}: entries that are missing or unknown: {', '.join(wrong)}")
        for name in ("homes", "stages"):
            if isinstance(content[name], list):
                content[name] = tuple(content[name])
        try:
            header = cls(**content)
            _check_words(header)
            _ = header.topology, header.config
        except (ConfigError, TypeError) as error:
            raise FileError(f"{where}: {error}") from None
        return header

    def slots_of(self, rank: int) -> int:
        """Home slots and spare slots of a rank."""
        return int(self.topology.homes_per_rank[rank]) + self.slots

    def sizes(self, rank: int = 0) -> dict[str, int]:
        """What the letters of shapes stand for, as far as the header knows."""
        slots = int(self.topology.first_slot_of_rank[-1])
        known = {"R": self.ranks, "E": self.experts, "S": slots, "G": len(self.stages)}
        return known | {"L": self.slots_of(rank), "1": 1, "3": 3}


def _object(text: str, where: str | Path) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise FileError(f"{where}: truncated or damaged: {error}") from None
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise FileError(f"{where}: not the header of a trace")
    return content


def _check_words(header: Header) -> None:
    words = (header.note, header.created, *header.stages)
    if not isinstance(header.stages, tuple) or not all(isinstance(word, str) for word in words):
        raise ConfigError("stages, note and created must be text")


def fields_of_rank(rank: int) -> dict[str, Field]:
    """The arrays in a piece of this rank."""
    return OF_RANK | OF_GROUP if rank == 0 else OF_RANK


def rank_folder(rank: int) -> str:
    """Name of the folder with the pieces of a rank."""
    return f"rank-{rank:05d}"


def piece_file(number: int) -> str:
    """Name of a piece."""
    return f"{number:06d}.npz"


def check_arrays(
    arrays: Mapping[str, Array],
    wanted: Mapping[str, Field],
    sizes: Mapping[str, int],
    where: str | Path,
) -> None:
    """Raise `FileError` unless the arrays have these names, types and shapes."""
    if arrays.keys() != wanted.keys():
        wrong = ", ".join(sorted(arrays.keys() ^ wanted.keys()))
        raise FileError(f"{where}: no piece of a trace: arrays missing or unknown: {wrong}")
    known = dict(sizes)
    for name, (kind, letters) in wanted.items():
        array = arrays[name]
        right = array.dtype.kind == "U" if kind == "str" else array.dtype == np.dtype(kind)
        if right and array.ndim == len(letters):
            for letter, size in zip(letters, array.shape, strict=True):
                known.setdefault(letter, size)
            right = array.shape == tuple(known[letter] for letter in letters)
        else:
            right = False
        if not right:
            shape = [known.get(letter, letter) for letter in letters]
            raise FileError(
                f"{where}: {name} must be {kind} {shape}, got {array.dtype} {list(array.shape)}"
            )
    _check_ends(arrays, where)


def _check_ends(arrays: Mapping[str, Array], where: str | Path) -> None:
    ends = arrays.get("copy_ends")
    if ends is None:
        return
    last = int(ends[-1]) if len(ends) else 0
    if (np.diff(ends, prepend=0) < 0).any() or last != len(arrays["copies"]):
        raise FileError(f"{where}: copy_ends do not fit the {len(arrays['copies'])} copies")
