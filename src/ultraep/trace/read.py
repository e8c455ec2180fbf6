"""read_trace: a folder or a file -> Trace, the records of all ranks side by side.

Ranks write by themselves, so one that was killed may have written less than the others. Records
are matched by step, layer and microbatch; those that a rank lacks are left out, and counted.

Shapes: N records, R ranks, E experts, S slots of all ranks, G stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.config import BalanceConfig, Rates
from ultraep.errors import FileError
from ultraep.files.reading import names_of_arrays
from ultraep.files.writing import is_unfinished
from ultraep.plan import Plan, plan_of_copies
from ultraep.topology import Topology
from ultraep.trace.files import check_pieces, read_header, read_piece, read_single, write_arrays
from ultraep.trace.join import join
from ultraep.trace.schema import (
    ENDS,
    HEADER_FILE,
    RANK_FOLDER,
    Array,
    Arrays,
    Header,
    fields_in_file,
    fields_in_pieces,
    piece_file,
    rank_folder,
    taken,
)
from ultraep.trace.summary import routed_rows, sums_between

FloatArray = NDArray[np.float64]


class Routed(NamedTuple):
    """What a record asked to be planned."""

    layer: int
    loads: IntArray  # [R, E]
    rates: Rates | None  # that it was planned by


@dataclass(frozen=True, eq=False)
class Trace:
    """What was recorded: the fields of the schema, as attributes.

    Every array has one row per record, in the order of recording; what ranks tell for themselves
    has the ranks next. Of a simulated microbatch only the key and the times are known.
    """

    header: Header
    arrays: Arrays

    def __getattr__(self, name: str) -> Array:
        arrays: Arrays = self.__dict__.get("arrays", {})
        if name not in arrays:
            raise AttributeError(f"a trace has no {name!r}")
        return arrays[name]

    def __len__(self) -> int:
        return len(self.step)

    @property
    def dropped(self) -> int:
        """Records and additions that were lost by ranks that were too slow to write."""
        return int(self.arrays["dropped"][0])

    @property
    def left_out(self) -> int:
        """Records that not all ranks have."""
        return int(self.arrays["left_out"][0])

    @property
    def topology(self) -> Topology:
        """Where experts live, and where copies may go."""
        return self.header.topology

    @property
    def steps(self) -> IntArray:
        """The steps that were recorded, each once."""
        return np.unique(self.step)

    @property
    def layers(self) -> IntArray:
        """The layers that were recorded, each once."""
        return np.unique(self.layer)

    @cached_property
    def rank_loads(self) -> IntArray:
        """[N, R] rows that arrived at every rank."""
        return sums_between(self.slot_rows, self.topology.first_slot_of_rank)

    @cached_property
    def initial_rank_loads(self) -> IntArray:
        """[N, R] rows of every rank if nothing had been copied."""
        return routed_rows(self.header, self.loads)

    @property
    def imbalance_before(self) -> FloatArray:
        """[N] fullest rank over mean rank, with every token at the home of its expert."""
        return imbalance(self.initial_rank_loads)

    @property
    def imbalance_after(self) -> FloatArray:
        """[N] fullest rank over mean rank, by the rows that arrived."""
        return imbalance(self.rank_loads)

    @property
    def num_copies(self) -> IntArray:
        """[N] copies of every record."""
        return np.diff(self.copy_ends, prepend=0)

    @property
    def left_alone(self) -> NDArray[np.bool_]:
        """[N] whether ranks stay uneven, since by the rates no copies would pay."""
        uneven = self.imbalance_before > 1 + self.header.tolerance
        free = (self.rates[:, 0] > 0) & (self.policy == "ultraep") & self.topology.can_copy
        found: NDArray[np.bool_] = uneven & free & (self.num_copies == 0)
        return found

    def config(self, record: int) -> BalanceConfig:
        """How a record was planned."""
        policy, rates = str(self.policy[record]), self.rates_of(record)
        return replace(self.header.config, policy=policy, rates=rates)

    def rates_of(self, record: int) -> Rates | None:
        """What tokens and copies cost when it was planned, if anybody knew."""
        return rates_of(self.rates[record])

    def routed(self, record: int) -> Routed:
        """What a record asked to be planned."""
        return Routed(int(self.layer[record]), self.loads[record], self.rates_of(record))

    def plan(self, record: int) -> Plan:
        """The plan of a record, as it was made."""
        record = range(len(self))[record]
        begin, end = (int(self.copy_ends[n]) if n >= 0 else 0 for n in (record - 1, record))
        copies = self.copies[begin:end].astype(np.int64)
        copies[:, 2] = self.quotas[begin:end]
        return plan_of_copies(self.loads[record], self.topology, self.config(record), copies)

    def of_layer(self, layer: int) -> Trace:
        """The records of one layer."""
        return self.take(np.flatnonzero(self.layer == layer))

    def by_layer(self) -> IntArray:
        """[microbatches, layers, R, E] the loads of microbatches that all layers have."""
        found = [
            {
                (int(self.step[record]), int(self.microbatch[record])): int(record)
                for record in np.flatnonzero(self.layer == layer)
            }
            for layer in self.layers
        ]
        common = [key for key in found[0] if all(key in own for own in found)] if found else []
        records = [[own[key] for own in found] for key in common]
        return self.loads[np.array(records, dtype=np.int64).reshape(len(common), len(found))]

    def take(self, records: IntArray) -> Trace:
        """Some of the records, in that order."""
        return replace(self, arrays=taken(self.arrays, records))

    def save(self, path: str | Path) -> None:
        """One file with all of it, for sharing; `read_trace` reads it."""
        arrays: Arrays = {"header": np.array(self.header.to_json())}
        for name, field in fields_in_file().items():
            arrays[name] = self.arrays[name].astype(field.kind)
        write_arrays(Path(path), arrays)


def rates_of(numbers: Array) -> Rates | None:
    """Rates as a trace holds them; zeros are none."""
    return Rates.from_numbers(numbers.tolist()) if numbers.any() else None


def imbalance(loads_NR: IntArray) -> FloatArray:
    """[N] fullest rank over mean rank; 1.0 where there is no token."""
    total_N = np.maximum(loads_NR.sum(axis=1), 1)
    found: FloatArray = loads_NR.max(axis=1, initial=0) * loads_NR.shape[1] / total_N
    return np.where(loads_NR.any(axis=1), found, 1.0)


# -- reading -------------------------------------------------------------------------------------


def read_trace(path: str | Path) -> Trace:
    """The trace in a folder, or in a file that `ultraep trace export --npz` has written."""
    path = Path(path)
    if path.is_dir():
        return _read_folder(_folder_of_trace(path))
    if not path.exists():
        raise FileError(f"{path}: no such file or folder")
    return Trace(*read_single(path))


def holds_trace(path: str | Path) -> bool:
    """Whether `read_trace` is the one to read it: a folder, or an .npz file with a header."""
    path = Path(path)
    if path.is_dir():
        return True
    return "header" in names_of_arrays(path)


def _folder_of_trace(path: Path) -> Path:
    """Return the folder itself, or the only trace one or two levels below it."""
    if (path / HEADER_FILE).is_file():
        return path
    headers = [*path.glob(f"*/{HEADER_FILE}"), *path.glob(f"*/*/{HEADER_FILE}")]
    if len(headers) > 1:
        names = ", ".join(sorted(str(header.parent) for header in headers))
        raise FileError(f"{path}: holds {len(headers)} traces; pass one of them: {names}")
    if not headers:
        raise FileError(f"{path}: holds no trace, there is no {HEADER_FILE}")
    return headers[0].parent


def _read_folder(folder: Path) -> Trace:
    header = read_header(folder)
    names = {path.name for path in folder.iterdir() if RANK_FOLDER.fullmatch(path.name)}
    last = max(names, default="")
    if last > rank_folder(header.ranks - 1):
        raise FileError(
            f"{folder / last}: a rank too many, the trace is one of {header.ranks} ranks"
        )
    check_pieces(folder)
    ranks = [_read_rank(folder / rank_folder(rank), header, rank) for rank in range(header.ranks)]
    return Trace(header, join(ranks))


def _read_rank(folder: Path, header: Header, rank: int) -> Arrays:
    """All pieces of a rank, one behind the other."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    names = [name for name in names if not is_unfinished(name)]
    pieces = []
    for number, name in enumerate(names):
        if name != piece_file(number):
            raise FileError(f"{folder / name}: not the piece that is expected here, {number:06d}")
        pieces.append(read_piece(folder / name, header, rank))
    nothing = {"N": 0, "C": 0, "M": 0} | header.sizes(rank)
    fields = fields_in_pieces(rank)
    none = {name: field.filled(nothing, field.shape) for name, field in fields.items()}
    return _concatenated(pieces or [none])


def _concatenated(pieces: list[Arrays]) -> Arrays:
    whole = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    whole["dropped"] = pieces[-1]["dropped"]  # counted from the first piece on
    if ENDS in whole:
        before = np.cumsum([0, *(len(piece["copies"]) for piece in pieces[:-1])])
        lengths = [len(piece[ENDS]) for piece in pieces]
        whole[ENDS] = whole[ENDS] + np.repeat(before, lengths)
    return whole
