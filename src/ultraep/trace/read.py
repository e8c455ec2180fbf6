"""read_trace: a folder or a file -> Trace, the records of all ranks side by side.

Ranks write by themselves, so one that was killed may have written less than the others. Records
are matched by step, layer and microbatch; those that a rank lacks are left out, and counted.

Shapes: N records, R ranks, E experts, S slots of all ranks, G stages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.config import BalanceConfig
from ultraep.errors import FileError
from ultraep.inputs import names_of_arrays, read_arrays, read_text
from ultraep.outputs import is_unfinished
from ultraep.plan import Plan, plan_of_copies
from ultraep.topology import Topology
from ultraep.trace.files import write_arrays
from ultraep.trace.join import Joined, join
from ultraep.trace.schema import (
    HEADER_FILE,
    OF_FILE,
    Array,
    Arrays,
    Header,
    check_arrays,
    fields_of_rank,
    piece_file,
    rank_folder,
)

FloatArray = NDArray[np.float64]
RANK_FOLDER = re.compile(r"rank-(\d{5})")


@dataclass(frozen=True, eq=False)
class Trace:
    """What was recorded; every array has one row per record, in the order of recording."""

    header: Header
    step: IntArray  # [N]
    layer: IntArray  # [N]
    microbatch: IntArray  # [N]
    policy: NDArray[np.str_]  # [N]
    loads: IntArray  # [N, R, E] tokens that every source rank routed to every expert
    copy_ends: IntArray  # [N] where the copies of a record end among those of all
    copies: IntArray  # [C, 3] expert, host rank, spare slot
    quotas: IntArray  # [C]
    slot_loads: IntArray  # [N, S] rows that arrived in every slot
    bytes_moved: IntArray  # [N, R] weights and gradients of copies that each rank sent
    began: FloatArray  # [N, R] seconds since 1970
    back_began: FloatArray  # [N, R] the same of backward; NaN: there was none
    seconds: FloatArray  # [N, R, G] of every stage of `header.stages`
    dropped: int  # lost by ranks that were too slow to write
    left_out: int  # records that not all ranks have

    def __len__(self) -> int:
        return len(self.step)

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
        return _sums(self.slot_loads, self.topology.first_slot_of_rank)

    @cached_property
    def initial_rank_loads(self) -> IntArray:
        """[N, R] rows of every rank if nothing had been copied."""
        by_home = self.loads.sum(axis=1, dtype=np.int64)[:, self.topology.experts_by_rank]
        return _sums(by_home, self.topology.first_of_rank)

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

    def config(self, record: int) -> BalanceConfig:
        """How a record was planned."""
        return replace(self.header.config, policy=str(self.policy[record]))

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
        counts = self.num_copies[records]
        ends = np.cumsum(counts, dtype=np.int64)
        shifts = self.copy_ends[records] - ends  # from where a copy stands now to where it stood
        copies = np.arange(int(counts.sum())) + np.repeat(shifts, counts)
        rows = {name: getattr(self, _NAMES.get(name, name))[records] for name in _BY_RECORD}
        rows["copy_ends"] = ends
        rows |= {"copies": self.copies[copies], "quotas": self.quotas[copies]}
        named = {_NAMES.get(name, name): array for name, array in rows.items()}
        return replace(self, **named)

    def save(self, path: str | Path) -> None:
        """One file with all of it, for sharing; `read_trace` reads it."""
        arrays: Arrays = {"header": np.array(self.header.to_json())}
        for name, (kind, _) in OF_FILE.items():
            if name in ("dropped", "left_out"):
                arrays[name] = np.array([getattr(self, name)], dtype=np.int64)
            elif name != "header":
                array = getattr(self, _NAMES.get(name, name))
                arrays[name] = array if kind == "str" else array.astype(kind)
        write_arrays(Path(path), arrays)


_NAMES = {"slot_rows": "slot_loads"}  # of a rank in its pieces, of all ranks here
_BY_RECORD = [name for name, (_, letters) in OF_FILE.items() if letters.startswith("N")]


def imbalance(loads_NR: IntArray) -> FloatArray:
    """[N] fullest rank over mean rank; 1.0 where there is no token."""
    total_N = np.maximum(loads_NR.sum(axis=1), 1)
    found: FloatArray = loads_NR.max(axis=1, initial=0) * loads_NR.shape[1] / total_N
    return np.where(loads_NR.any(axis=1), found, 1.0)


def _sums(values: Array, ends: IntArray) -> IntArray:
    """[N, R] sums of neighbouring columns, also of none."""
    upto = np.zeros((len(values), values.shape[1] + 1), dtype=np.int64)
    np.cumsum(values, axis=1, out=upto[:, 1:])
    return np.diff(upto[:, ends], axis=1)


# -- reading -------------------------------------------------------------------------------------


def read_trace(path: str | Path) -> Trace:
    """The trace in a folder, or in a file that `ultraep trace export --npz` has written."""
    path = Path(path)
    if path.is_dir():
        return _read_folder(_folder_of_trace(path))
    if not path.exists():
        raise FileError(f"{path}: no such file or folder")
    return _read_file(path)


def holds_trace(path: str | Path) -> bool:
    """Whether `read_trace` is the one to read it: a folder, or an .npz file with a header."""
    path = Path(path)
    if path.is_dir():
        return True
    return "header" in names_of_arrays(path)


def _folder_of_trace(path: Path) -> Path:
    """The folder itself, or the only trace in it."""
    if (path / HEADER_FILE).is_file():
        return path
    found = sorted(header.parent for header in path.glob(f"*/{HEADER_FILE}"))
    if len(found) > 1:
        names = ", ".join(folder.name for folder in found)
        raise FileError(f"{path}: holds {len(found)} traces, name one of them: {names}")
    if not found:
        raise FileError(f"{path}: holds no trace, there is no {HEADER_FILE}")
    return found[0]


def _read_folder(folder: Path) -> Trace:
    file = folder / HEADER_FILE
    header = Header.from_json(read_text(file), file)
    for path in folder.iterdir():
        match = RANK_FOLDER.fullmatch(path.name)
        if match and int(match[1]) >= header.ranks:
            raise FileError(f"{path}: a rank too many, the trace is one of {header.ranks} ranks")
    ranks = [_read_rank(folder / rank_folder(rank), header, rank) for rank in range(header.ranks)]
    return _trace(header, join(ranks, len(header.stages)), ranks[0])


def _read_rank(folder: Path, header: Header, rank: int) -> Arrays:
    """All pieces of a rank, one behind the other."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    names = [name for name in names if not is_unfinished(name)]
    pieces = []
    for number, name in enumerate(names):
        if name != piece_file(number):
            raise FileError(f"{folder / name}: not the piece that is expected here, {number:06d}")
        piece = read_arrays(folder / name)
        check_arrays(piece, fields_of_rank(rank), header.sizes(rank), folder / name)
        pieces.append(piece)
    return _concatenated(pieces, header, rank)


def _concatenated(pieces: list[Arrays], header: Header, rank: int) -> Arrays:
    sizes, whole = header.sizes(rank), {}
    for name, (kind, letters) in fields_of_rank(rank).items():
        none: Array = np.zeros([sizes.get(letter, 0) for letter in letters], dtype=kind)
        if name == "dropped":  # counted from the first piece on
            whole[name] = pieces[-1][name] if pieces else none
        else:
            whole[name] = np.concatenate([piece[name] for piece in pieces] or [none])
    if "copy_ends" in whole and pieces:
        before = np.cumsum([0, *(len(piece["copies"]) for piece in pieces)])
        ends = [piece["copy_ends"].astype(np.int64) for piece in pieces]
        whole["copy_ends"] = np.concatenate([e + b for e, b in zip(ends, before, strict=False)])
    return whole


def _trace(header: Header, joined: Joined, shared: Arrays) -> Trace:
    """The records that all ranks have, with what rank 0 knows of them."""
    everything = Trace(
        header=header,
        step=shared["step"],
        layer=shared["layer"],
        microbatch=shared["microbatch"],
        policy=shared["policy"],
        loads=shared["loads"],
        copy_ends=shared["copy_ends"],
        copies=shared["copies"],
        quotas=shared["quotas"],
        slot_loads=shared["slot_rows"],  # until the next lines, of rank 0 only
        bytes_moved=shared["bytes_moved"],
        began=shared["began"],
        back_began=shared["began"],
        seconds=shared["seconds"],
        dropped=joined.dropped,
        left_out=joined.left_out,
    )
    return replace(
        everything.take(joined.first),
        slot_loads=joined.slot_rows,
        bytes_moved=joined.bytes_moved,
        began=joined.began,
        back_began=joined.back_began,
        seconds=joined.seconds,
    )


def _read_file(path: Path) -> Trace:
    arrays = read_arrays(path)
    text = arrays.get("header")
    if text is None or text.dtype.kind != "U" or text.ndim:
        raise FileError(f"{path}: not a trace, it has no header")
    header = Header.from_json(str(text), path)
    check_arrays(arrays, OF_FILE, header.sizes(), path)
    rows: dict[str, Any] = {
        _NAMES.get(name, name): array for name, array in arrays.items() if array.ndim
    }
    rows |= {name: int(arrays[name][0]) for name in ("dropped", "left_out")}
    return Trace(header=header, **rows)
