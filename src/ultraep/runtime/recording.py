"""Recording: the subscriber of a balancer that writes a trace.

A microbatch becomes a record when forward combines its outputs; the time of backward is added
later. A forward pass that backward recomputes is not a new record: its time is the stage
"recompute" of the first.
"""

from __future__ import annotations

import os
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ultraep.comm import Communicator, raise_together
from ultraep.config import BalanceConfig
from ultraep.errors import FileError
from ultraep.passes import FORWARD, RECOMPUTED, Passes, PassRecord
from ultraep.reroute import rows_received
from ultraep.runtime.speeds import REMEMBERED
from ultraep.topology import Topology
from ultraep.trace.record import Recorder
from ultraep.trace.schema import Key

VARIABLE = "ULTRAEP_TRACE"  # environment variable: a directory for the traces of all balancers
MOST_TRACES = 10_000  # in that directory


def recording_setting(record: str | Path | None) -> str:
    """Return the setting that ranks compare: where to record."""
    if record is not None:
        return f"record in {Path(record)}"
    return f"record inside {os.environ[VARIABLE]}" if os.environ.get(VARIABLE) else "record nothing"


def open_recorder(
    record: str | Path | None,
    comm: Communicator,
    topology: Topology,
    config: BalanceConfig,
) -> Recorder | None:
    """Return the recorder of this rank, or None; collective. An error on one rank is one on all."""
    parent = os.environ.get(VARIABLE) if record is None else None
    if record is None and not parent:
        return None
    recorder = None
    directory = "" if record is None else str(Path(record).absolute())
    for first in (True, False):  # rank 0 creates the directory
        error = None
        if first == (comm.rank == 0):
            try:
                directory = directory or str(_new_directory(Path(str(parent))))
                recorder = Recorder(directory, topology, config, rank=comm.rank)
            except FileError as refused:
                error = FileError(f"cannot record: {refused}")
        try:
            raise_together(comm, error)
        except FileError:
            if recorder is not None:
                recorder.discard()
            raise
        directory = comm.gather_objects(directory)[0]
    return recorder


def _new_directory(parent: Path) -> Path:
    """Create a directory that no other balancer uses, in this process or another."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in range(MOST_TRACES):
            directory = parent / f"{number:04d}"
            if not directory.exists():
                try:
                    directory.mkdir()
                except FileExistsError:  # another process was quicker
                    continue
                return directory
    except OSError as error:
        raise FileError(f"{parent}: cannot be written to: {error.strerror}") from None
    raise FileError(f"{parent}: holds {MOST_TRACES} traces already, name a new folder")


class _Waiting(NamedTuple):
    """A microbatch whose forward pass backward may recompute."""

    loads: bytes
    key: Key
    microbatch: weakref.ref[Passes]

    def before_backward(self) -> bool:
        microbatch = self.microbatch()
        return microbatch is not None and not microbatch.record.backward


def _first_pass(waiting: Sequence[_Waiting], loads: bytes) -> Key | None:
    """Return the key of the forward pass that is recomputed with these loads; None: forgotten."""
    equal = [entry for entry in reversed(waiting) if entry.loads == loads]
    equal.sort(key=_Waiting.before_backward, reverse=True)
    return equal[0].key if equal else None


class Recording:
    """Writes the passes of one rank into a trace."""

    def __init__(self, recorder: Recorder, rank: int) -> None:
        self._recorder, self._rank = recorder, rank
        self._waiting: dict[int, deque[_Waiting]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._keys: WeakKeyDictionary[Passes, Key] = WeakKeyDictionary()

    def add(self, record: PassRecord) -> None:
        """Write a forward pass; add a later pass of the microbatch to it."""
        assert record.passes is not None
        if record.kind == FORWARD:
            if "combine" in record.seconds:  # else the caller dispatches rows, and records them
                self._write(record, record.passes)
            return
        seconds = record.seconds
        if record.kind == RECOMPUTED and record.plan is not None:
            seconds = {"recompute": sum(seconds.values())}
            first = _first_pass(self._waiting[record.layer], record.plan.loads.tobytes())
            if first is not None:
                self._keys[record.passes] = first
        if record.passes in self._keys:
            step, layer, number = self._keys[record.passes]
            self._recorder.more(
                step=step,
                layer=layer,
                microbatch=number,
                bytes_moved=sum(record.bytes_sent.values()),
                seconds=seconds,
                began=record.start_time,
            )

    def _write(self, record: PassRecord, passes: Passes) -> None:
        plan, key = record.plan, (passes.step, passes.layer, passes.microbatch)
        self._keys[passes] = key
        waiting = _Waiting(plan.loads.tobytes(), key, weakref.ref(passes))
        self._waiting[record.layer].append(waiting)
        step, layer, number = key
        self._recorder.add(
            plan=plan,
            slot_rows=rows_received(plan, self._rank).sum(axis=0),
            step=step,
            layer=layer,
            microbatch=number,
            bytes_moved=sum(record.bytes_sent.values()),
            seconds=record.seconds,
            began=record.start_time,
        )
