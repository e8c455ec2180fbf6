"""read_trace: read a folder or a file into a `Trace` with the records of all ranks.

Each rank writes its own files, so a rank that was killed may have fewer records. Records are
matched by step, layer and microbatch; records that some ranks lack are left out and counted.

Shapes: N records, M late additions, R ranks, E experts, S slots of all ranks, G stages.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.config import BalanceConfig, Rates
from ultraep.errors import FileError
from ultraep.files.reading import names_of_arrays
from ultraep.files.writing import is_unfinished
from ultraep.plan import Plan, plan_from_replicas
from ultraep.topology import Topology
from ultraep.trace.files import (
    check_claims,
    folders_of_traces,
    read_header,
    read_piece,
    read_single,
    write_arrays,
)
from ultraep.trace.schema import (
    ENDS,
    HEADER_FILE,
    KEY,
    RANK_FOLDER,
    Array,
    Arrays,
    Field,
    Header,
    fields_in_file,
    no_records,
    piece_file,
    rank_folder,
    take_records,
)

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Trace:
    """A trace: the fields of the schema as attributes.

    Every array has one row per record, in the order of recording. In arrays that each rank writes,
    the second dimension is the rank.
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
        """Records and additions that ranks lost because writing was too slow or failed."""
        return int(self.arrays["dropped"][0])

    @property
    def left_out(self) -> int:
        """Records that some ranks lack."""
        return int(self.arrays["left_out"][0])

    @property
    def topology(self) -> Topology:
        return self.header.topology

    @property
    def steps(self) -> IntArray:
        """The recorded steps in ascending order."""
        return np.unique(self.step)

    @property
    def layers(self) -> IntArray:
        """The recorded layers in ascending order."""
        return np.unique(self.layer)

    @cached_property
    def rank_loads(self) -> IntArray:
        """[N, R] rows that arrived at every rank."""
        return sums_between(self.slot_rows, self.topology.first_slot_of_rank)

    @cached_property
    def initial_rank_loads(self) -> IntArray:
        """[N, R] rows of every rank without replicas."""
        return routed_rows(self.header, self.loads)

    @property
    def imbalance_before(self) -> FloatArray:
        """[N] busiest rank over mean rank, without replicas; with speeds, of rows over speed."""
        return imbalance(self.initial_rank_loads, self.speeds)

    @property
    def imbalance_after(self) -> FloatArray:
        """[N] busiest rank over mean rank, by the rows that arrived."""
        return imbalance(self.rank_loads, self.speeds)

    @property
    def num_copies(self) -> IntArray:
        """[N] replicas of every record."""
        return np.diff(self.copy_ends, prepend=0)

    @property
    def stage_means(self) -> dict[str, float]:
        """Mean seconds per record of every stage that was timed, on its slowest rank."""
        means_RG = self.seconds.sum(axis=0, dtype=np.float64) / max(1, len(self))
        means = means_RG.max(axis=0)
        by_stage = zip(self.header.stages, means.tolist(), strict=True)
        return {stage: mean for stage, mean in by_stage if mean > 0}

    @property
    def left_alone(self) -> NDArray[np.bool_]:
        """[N] whether an imbalanced record has no replicas because they would cost too much."""
        imbalanced = self.imbalance_before > 1 + self.header.tolerance
        priced = (self.rates[:, 0] > 0) & (self.policy == "ultraep") & self.topology.can_replicate
        alone: NDArray[np.bool_] = imbalanced & priced & (self.num_copies == 0)
        return alone

    def config(self, record: int) -> BalanceConfig:
        policy, rates = str(self.policy[record]), self.rates_of(record)
        speeds = self.speeds_of(record)
        return replace(self.header.config, policy=policy, rates=rates, speeds=speeds)

    def rates_of(self, record: int) -> Rates | None:
        """Return the rates of the plan of a record; None if it used none."""
        numbers = self.rates[record]
        return Rates.from_numbers(numbers.tolist()) if numbers.any() else None

    def speeds_of(self, record: int) -> tuple[int, ...] | None:
        """Return the speeds of the plan of a record; None if they were equal."""
        numbers = self.speeds[record]
        return tuple(numbers.tolist()) if numbers.any() else None

    def plan(self, record: int) -> Plan:
        record = range(len(self))[record]
        begin, end = (int(self.copy_ends[n]) if n >= 0 else 0 for n in (record - 1, record))
        copies = self.copies[begin:end].astype(np.int64)
        copies[:, 2] = self.quotas[begin:end]
        return plan_from_replicas(self.loads[record], self.topology, self.config(record), copies)

    def of_layer(self, layer: int) -> Trace:
        return self.take(np.flatnonzero(self.layer == layer))

    def by_policy(self) -> dict[str, Trace]:
        """Return the records of each policy, the run's own policy first."""
        names = sorted(set(self.policy.tolist()), key=lambda name: name != self.header.policy)
        return {name: self.take(np.flatnonzero(self.policy == name)) for name in names}

    def by_layer(self) -> IntArray:
        """[microbatches, layers, R, E] the loads of microbatches that all layers have."""
        layers: dict[int, dict[tuple[int, int], int]] = {int(layer): {} for layer in self.layers}
        keys = zip(*(self.arrays[name].tolist() for name in KEY), strict=True)
        for record, (step, layer, microbatch) in enumerate(keys):
            layers[layer][step, microbatch] = record
        first = next(iter(layers.values()), {})
        common = [key for key in first if all(key in own for own in layers.values())]
        records = [[own[key] for own in layers.values()] for key in common]
        return self.loads[np.array(records, dtype=np.int64).reshape(len(common), len(layers))]

    def take(self, records: IntArray) -> Trace:
        """Return some of the records, in that order."""
        return replace(self, arrays=take_records(self.arrays, records))

    def save(self, path: str | Path) -> None:
        """Write the trace into one file, which `read_trace` reads."""
        arrays: Arrays = {"header": np.array(self.header.to_json())}
        for name, field in fields_in_file().items():
            arrays[name] = self.arrays[name].astype(field.dtype)
        write_arrays(Path(path), arrays)


def routed_rows(header: Header, loads_NRE: Array) -> IntArray:
    """[N, R] rows of every rank without replicas."""
    topology = header.topology
    by_home = loads_NRE.sum(axis=1, dtype=np.int64)[:, topology.experts_by_rank]
    return sums_between(by_home, topology.first_of_rank)


def sums_between(values: Array, ends: IntArray) -> IntArray:
    """[N, len(ends) - 1] sums of the columns between neighbouring ends."""
    upto = np.zeros((len(values), values.shape[1] + 1), dtype=np.int64)
    np.cumsum(values, axis=1, out=upto[:, 1:])
    return np.diff(upto[:, ends], axis=1)


def imbalance(loads_NR: IntArray, speeds_NR: IntArray) -> FloatArray:
    """[N] busiest rank over mean rank, of rows over speed; 1.0 without rows.

    speeds_NR: zeros if they are equal.
    """
    total_N = np.maximum(loads_NR.sum(axis=1), 1)
    weights_NR = np.where(speeds_NR > 0, speeds_NR, 1)
    peak_N = (loads_NR / weights_NR).max(axis=1, initial=0)
    ratio: FloatArray = peak_N * weights_NR.sum(axis=1) / total_N
    return np.where(loads_NR.any(axis=1), ratio, 1.0)


def read_trace(path: str | Path) -> Trace:
    """Read the trace in a folder, or in a file written by `ultraep trace export --npz`."""
    path = Path(path)
    if path.is_dir():
        return _read_folder(_folder_of_trace(path))
    if not path.exists():
        raise FileError(f"{path}: no such file or folder")
    return Trace(*read_single(path))


def holds_trace(path: str | Path) -> bool:
    """Whether a path is a folder, or an .npz file with a header."""
    return Path(path).is_dir() or "header" in names_of_arrays(path)


def _folder_of_trace(path: Path) -> Path:
    """Return the folder itself, or the only trace one or two levels below it."""
    folders = folders_of_traces(path)
    if not folders:
        raise FileError(f"{path}: holds no trace, there is no {HEADER_FILE}")
    if folders[0] != path and len(folders) > 1:
        names = ", ".join(sorted(map(str, folders)))
        raise FileError(f"{path}: holds {len(folders)} traces; pass one of them: {names}")
    return folders[0]


def _read_folder(folder: Path) -> Trace:
    header = read_header(folder)
    last = max(filter(RANK_FOLDER.fullmatch, os.listdir(folder)), default="")
    if last > rank_folder(header.ranks - 1):
        raise FileError(f"{folder / last}: unexpected, the trace has only {header.ranks} ranks")
    check_claims(folder, folder.glob("rank-*/[0-9]*.npz"))
    ranks = [_read_rank(folder / rank_folder(rank), header, rank) for rank in range(header.ranks)]
    return Trace(header, join(ranks))


def _read_rank(folder: Path, header: Header, rank: int) -> Arrays:
    """Return all pieces of a rank, concatenated."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    pieces = []
    for number, name in enumerate(name for name in names if not is_unfinished(name)):
        if name != piece_file(number):
            raise FileError(f"{folder / name}: expected piece {number:06d} here")
        pieces.append(read_piece(folder / name, header, rank))
    return concatenated(pieces or [no_records(header, rank)])


def concatenated(pieces: list[Arrays]) -> Arrays:
    """Return the pieces of a rank as one."""
    whole = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    whole["dropped"] = pieces[-1]["dropped"]  # counted from the first piece on
    if ENDS in whole:
        before = np.cumsum([0, *(len(piece["copies"]) for piece in pieces[:-1])])
        lengths = [len(piece[ENDS]) for piece in pieces]
        whole[ENDS] = whole[ENDS] + np.repeat(before, lengths)
    return whole


# -- joining the ranks ----------------------------------------------------------------------------


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
