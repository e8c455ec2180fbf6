"""Recorder: hands the records of one rank to a thread that writes them, and never waits for it.

    with Recorder("run", topology, config, rank=rank) as recorder:
        for step in range(steps):
            ...
            recorder.add(step=step, layer=0, microbatch=0, plan=plan, slot_rows=arrived)

What waits to be written takes a bounded amount of memory. When it is full, because the disk is too
slow, records are dropped and counted; the count is part of the trace.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError, FileError
from ultraep.files.writing import write_text
from ultraep.hops import Relay
from ultraep.loads import as_integers
from ultraep.plan import DEFAULT_CONFIG, Plan
from ultraep.topology import Topology
from ultraep.trace.schema import (
    HEADER_FILE,
    NOT_TOLD,
    STAGES,
    Array,
    Header,
    Key,
    fields_of_plan,
    rank_folder,
)
from ultraep.trace.writer import Entry, Writer

MEMORY = 64 << 20  # bytes of records that wait
OVERHEAD = 1000  # bytes of a record besides its arrays
LARGEST = np.iinfo(np.int32).max


class Recorder:
    """Writes what one rank knows of every microbatch into a trace.

    folder: of the trace; all ranks name the same. It must not hold a trace yet.
    topology, config: of the run; the plans of all records must have been made for them.
    rank: whose records these are. Rank 0 also writes what all know alike: loads and plans.
    relay: how the weights of copies are sent, if that is known.
    stages: names of what `seconds` tell about.   note: anything to keep with the trace.
    memory: bytes that may wait to be written; what comes beyond is dropped, and counted.
    """

    def __init__(
        self,
        folder: str | Path,
        topology: Topology,
        config: BalanceConfig = DEFAULT_CONFIG,
        *,
        rank: int = 0,
        relay: Relay = NOT_TOLD,
        stages: Sequence[str] = STAGES,
        note: str = "",
        memory: int = MEMORY,
    ) -> None:
        if not 0 <= rank < topology.ranks:
            raise ConfigError(f"rank must lie in 0..{topology.ranks - 1}, got {rank}")
        if memory < 1:
            raise ConfigError(f"memory must be at least 1 byte, got {memory}")
        self.folder, self.rank = Path(folder), rank
        self.header = Header.of(topology, config, relay=relay, stages=tuple(stages), note=note)
        self._config = config
        self._place = {stage: place for place, stage in enumerate(self.header.stages)}
        self._slots = self.header.slots_of(rank)
        self._of_plan = attrgetter(*(field.plan for field in fields_of_plan()))
        _prepare(self.folder, self.header, rank)
        self._writer = Writer(self.folder / rank_folder(rank), self.header, rank, memory)
        self._finish = weakref.finalize(self, Writer.close, self._writer)  # also at exit

    def add(
        self,
        *,
        plan: Plan,
        slot_rows: Any,
        step: int,
        layer: int = 0,
        microbatch: int = 0,
        bytes_moved: int = 0,
        seconds: Mapping[str, float] | None = None,
        waited: Mapping[str, float] | None = None,
        began: float | None = None,
    ) -> bool:
        """Record one microbatch of one layer; False: it was dropped. Returns at once.

        step, layer, microbatch: name the record, on all ranks alike, and only this one.
        plan: all of it is recorded, with the loads that it was made for.
        slot_rows: rows that really arrived in each slot of this rank, home slots first.
        bytes_moved: bytes of weights and gradients of copies that this rank sent.
        seconds: of the stages on this rank, those that are known.
        waited: of the seconds, those at the end of a stage in which the rank waited for others.
        began: when it began, in seconds since 1970; None: it ends now.
        """
        key = _key(step, layer, microbatch)
        self._check_plan(plan)
        rows = self._rows(slot_rows)
        values = self._values("began", began, bytes_moved, seconds, waited) | {"slot_rows": rows}
        shared, nbytes = (), OVERHEAD + rows.nbytes
        if self.rank == 0:
            shared = self._of_plan(plan)
            nbytes += plan.loads.nbytes + plan.replicas.nbytes + plan.quotas.nbytes
        return self._writer.put(Entry(key, values, shared, nbytes))

    def more(
        self,
        *,
        step: int,
        layer: int = 0,
        microbatch: int = 0,
        bytes_moved: int = 0,
        seconds: Mapping[str, float] | None = None,
        waited: Mapping[str, float] | None = None,
        began: float | None = None,
    ) -> bool:
        """Add bytes and seconds of the backward pass to an earlier record."""
        values = self._values("back_began", began, bytes_moved, seconds, waited)
        return self._writer.put(Entry(_key(step, layer, microbatch), values, None, OVERHEAD))

    def lose(self, records: int) -> None:
        """Count records that are lost before they came here."""
        self._writer.lose(records)

    @property
    def dropped(self) -> int:
        """Records and additions that were lost so far, since writing was too slow or failed."""
        return self._writer.dropped

    def close(self) -> None:
        """Write what still waits; records that come later are dropped."""
        self._finish()

    def discard(self) -> None:
        """Take an empty trace back: a group that did not come about leaves none."""
        self.close()
        (self.folder / rank_folder(self.rank)).rmdir()
        if self.rank == 0:
            (self.folder / HEADER_FILE).unlink()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_plan(self, plan: Plan) -> None:
        if plan.topology != self.header.topology:
            raise ConfigError(
                f"the plan is one for {plan.topology}, the trace for {self.header.topology}"
            )
        mine, its = self._config, plan.config
        if mine is not its and replace(its, policy=mine.policy, rates=mine.rates) != mine:
            raise ConfigError(f"the plan was made with {its}, the trace is one of {mine}")

    def _rows(self, slot_rows: Any) -> Array:
        rows = as_integers(slot_rows, "slot_rows").astype(np.int32)
        if rows.shape != (self._slots,) or rows.min(initial=0) < 0:
            raise ConfigError(
                f"slot_rows must be rows of each of the {self._slots} slots of rank "
                f"{self.rank}, got {rows.tolist()}"
            )
        return rows

    def _values(
        self,
        beginning: str,
        began: float | None,
        bytes_moved: int,
        seconds: Mapping[str, float] | None,
        waited: Mapping[str, float] | None,
    ) -> dict[str, Any]:
        by_stage = self._by_stage(seconds or {})
        began = time.time() - sum(by_stage) if began is None else began
        values = {beginning: began, "bytes_moved": int(bytes_moved), "seconds": by_stage}
        return values if waited is None else values | {"waited": self._by_stage(waited)}

    def _by_stage(self, seconds: Mapping[str, float]) -> list[float]:
        places = self._place
        values = [0.0] * len(places)
        try:
            for stage, value in seconds.items():
                values[places[stage]] = value
        except KeyError as key:
            raise ConfigError(f"unknown stage {key}; the trace has {', '.join(places)}") from None
        return values


def _key(step: int, layer: int, microbatch: int) -> Key:
    if step < 0 or not 0 <= layer <= LARGEST or not 0 <= microbatch <= LARGEST:
        raise ConfigError(
            f"step, layer and microbatch must not be negative: {step}, {layer}, {microbatch}"
        )
    return int(step), int(layer), int(microbatch)


def _prepare(folder: Path, header: Header, rank: int) -> None:
    """Make the folder of a rank, and rank 0 the header; refuse what cannot be written to."""
    own = folder / rank_folder(rank)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            _check_empty(folder)
        own.mkdir()
        if rank == 0:
            write_text(folder / HEADER_FILE, header.to_json() + "\n")
    except FileExistsError:
        if not folder.is_dir():
            raise FileError(f"{folder}: a file, a trace needs a folder") from None
        raise FileError(_held(folder)) from None
    except OSError as error:
        raise FileError(f"{folder}: cannot be written to: {error.strerror}") from None


def _check_empty(folder: Path) -> None:
    """Other ranks may have been here already; anything else must not."""
    found = sorted(path.name for path in folder.iterdir() if not path.name.startswith("rank-"))
    if HEADER_FILE in found:
        raise FileError(_held(folder))
    if found:
        raise FileError(
            f"{folder}: not empty, it holds {found[0]}: name a new folder for the trace"
        )


def _held(folder: Path) -> str:
    return f"{folder}: holds a trace already: remove it, or name a new folder"
