"""Open traces: a table with one row per record, and single records read on request.

The pieces of all ranks are read side by side. Loads and rows are summed at once, so a trace may be
larger than the memory. A record enters the table once all ranks have it. A damaged piece adds a
note; the records of other pieces are shown.

Shapes: N records, R ranks, G stages.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ultraep.config import MAX_ROWS
from ultraep.errors import ConfigError, FileError
from ultraep.trace.files import read_header, read_piece
from ultraep.trace.read import Trace, concatenated, imbalance, join, routed_rows
from ultraep.trace.schema import (
    COST,
    ENDS,
    KEY,
    PIECE,
    Arrays,
    Header,
    Key,
    no_records,
    piece_file,
    rank_folder,
)
from ultraep_tools.view.table import Table

LONGEST = 1e6  # seconds; longer times are clipped
MOST_NOTES = 20
CACHED_PIECES = 2


class OpenTrace:
    """A trace that the viewer shows."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path, self.header = path, header
        self.notes: list[str] = []
        # Of every rank; loads and rows are summed.
        self._pieces: list[list[Arrays]] = [[] for _ in range(header.ranks)]
        self._show(self._joined_pieces())

    def read(self) -> None:
        """Read everything that is new."""

    def _with_record(self, key: Key) -> Trace:
        """Return a trace that contains a record."""
        raise NotImplementedError

    def record(self, key: Key) -> Trace:
        """Return a trace of one record that all ranks have."""
        if not has_key(key, *(getattr(self.table, name) for name in KEY)):
            step, layer, microbatch = key
            raise ConfigError(
                f"step {step}, layer {layer}, microbatch {microbatch}: no such record, or not all "
                "ranks have it yet"
            )
        trace = self._with_record(key)
        keys = np.column_stack([trace.arrays[name] for name in KEY])
        records = np.flatnonzero((keys == key).all(axis=1))
        if not len(records):
            raise FileError(f"{self.path}: the record is no longer there")
        return trace.take(records[:1])

    def note(self, text: str) -> None:
        """Show a line next to the trace, once."""
        if text not in self.notes and len(self.notes) < MOST_NOTES:
            self.notes.append(text)

    def _joined_pieces(self) -> Arrays:
        ranks = enumerate(self._pieces)
        return join([concatenated(own or [self._nothing(rank)]) for rank, own in ranks])

    def _nothing(self, rank: int) -> Arrays:
        return summed(self.header, no_records(self.header, rank))

    def _show(self, joined: Arrays) -> None:
        """Show the records that all ranks have."""
        self.table = table_of(self.header, joined)
        self.dropped, self.left_out = int(joined["dropped"][0]), int(joined["left_out"][0])


def summed(header: Header, arrays: Arrays) -> Arrays:
    """Return the arrays of a piece with `slot_rows` and `loads` summed to [N, 1] and [N, R]."""
    rows = arrays["slot_rows"].sum(axis=1, keepdims=True, dtype=np.int64)
    loads = {"loads": routed_rows(header, arrays["loads"])} if ENDS in arrays else {}
    return arrays | {"slot_rows": rows} | loads


def table_of(header: Header, joined: Arrays) -> Table:
    """Return the table of all ranks, whose loads and rows are summed."""
    seconds_NRG = np.clip(np.nan_to_num(joined["seconds"].astype(np.float64)), 0, LONGEST)
    each = [np.isin(header.stages, names) for names in (["experts"], ["experts back"], COST)]
    forward_NR, backward_NR, cost_NR = (seconds_NRG[:, :, own].sum(axis=2) for own in each)
    experts = forward_NR.max(axis=1, initial=0) + backward_NR.max(axis=1, initial=0)
    mean = (forward_NR + backward_NR).mean(axis=1)
    rows, routed = np.clip(joined["slot_rows"], 0, MAX_ROWS), joined["loads"]
    replicas, count = np.diff(joined[ENDS], prepend=0), max(1, len(rows))
    before = imbalance(routed, joined["speeds"])
    timed = np.where(mean > 0, 1.0, np.nan)
    return Table(
        **{name: joined[name] for name in KEY},
        before=before,
        after=imbalance(rows, joined["speeds"]),
        copies=replicas.astype(np.float64),
        bytes=joined["bytes_moved"].sum(axis=1, dtype=np.float64),
        lost=(experts - mean) * timed,
        saved=np.where(replicas > 0, mean * before - experts, 0.0) * timed,
        cost=cost_NR.max(axis=1, initial=0) * timed,
        rows=routed.sum(axis=1),
        balanced=joined["policy"] != "none",
        stages=(seconds_NRG.sum(axis=0) / count).max(axis=0),
        layer_seconds=float(seconds_NRG.sum() / count / header.ranks),
    )


def has_key(key: Key, *columns: Any) -> bool:
    """Return whether a record has this key."""
    same = [column == part for column, part in zip(columns, key, strict=True)]
    return bool(np.logical_and.reduce(same).any())


class WholeTrace(OpenTrace):
    """A trace in memory, from a file of `ultraep trace export --npz`."""

    def __init__(self, path: Path, trace: Trace) -> None:
        super().__init__(path, trace.header)
        self.trace = trace
        rows = {"slot_rows": trace.rank_loads, "loads": trace.initial_rank_loads}
        self._show(trace.arrays | rows)

    def _with_record(self, _: Key) -> Trace:
        return self.trace


class FolderTrace(OpenTrace):
    """A trace in a folder. A job may still be writing it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, read_header(folder))
        self._joined = lru_cache(CACHED_PIECES)(self._read_joined)

    def piece_path(self, rank: int, piece: int) -> Path:
        return self.path / rank_folder(rank) / piece_file(piece)

    def read(self) -> None:
        """Read all new pieces."""
        pieces = [(n, rank) for rank in range(self.header.ranks) for n in self._new_pieces(rank)]
        for piece, rank in pieces:
            self._pieces[rank].append(self._read_summed(rank, piece))
        if pieces:
            self._show(self._joined_pieces())

    def _new_pieces(self, rank: int) -> range:
        """Return the numbers of pieces to read, up to the first missing one."""
        folder, known = self.path / rank_folder(rank), len(self._pieces[rank])
        try:
            names = {path.name for path in folder.iterdir()}
        except OSError:
            return range(0)
        end = known
        while piece_file(end) in names:
            end += 1
        beyond = sorted(name for name in names if PIECE.fullmatch(name) and name > piece_file(end))
        if beyond:
            self.note(f"{folder / beyond[0]}: not read, {piece_file(end)} before it is missing")
        return range(known, end)

    def _read_summed(self, rank: int, piece: int) -> Arrays:
        """Return a piece; an empty one, with a note, if the piece is damaged."""
        try:
            return summed(self.header, read_piece(self.piece_path(rank, piece), self.header, rank))
        except FileError as error:
            self.note(str(error))
            last = self._pieces[rank][-1:] or [self._nothing(rank)]
            return self._nothing(rank) | {"dropped": last[0]["dropped"]}

    def _with_record(self, key: Key) -> Trace:
        """Return the pieces of all ranks that mention a record."""
        return self._joined(
            tuple(
                tuple(
                    number
                    for number, piece in enumerate(own)
                    if has_key(key, *(piece[name] for name in KEY))
                    or has_key(key, *piece["more"].T)
                )
                for own in self._pieces
            )
        )

    def _read_joined(self, pieces: tuple[tuple[int, ...], ...]) -> Trace:
        """Return the records of some pieces of each rank."""
        with np.errstate(invalid="ignore"):  # a file may hold any number
            ranks = [
                concatenated([read_piece(self.piece_path(rank, n), self.header, rank) for n in own])
                for rank, own in enumerate(pieces)
            ]
            return Trace(self.header, join(ranks))
