"""Recording: the sink of a balancer that writes a trace.

A microbatch becomes a record when forward combines its outputs; the time of backward is added
later. A forward pass that backward recomputes is not a new record: its time is the stage
"recompute" of the first.
"""

from __future__ import annotations

import os
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ultraep.comm import Communicator, raise_together
from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError, FileError
from ultraep.hops import CHUNKS, copies_sent
from ultraep.microbatch import MicrobatchInfo
from ultraep.plan import Plan
from ultraep.reroute import rows_received
from ultraep.runtime.settings import Settings
from ultraep.runtime.speeds import REMEMBERED
from ultraep.topology import Topology
from ultraep.trace.record import Recorder
from ultraep.trace.schema import FORWARD, Key

VARIABLE = "ULTRAEP_TRACE"  # environment variable: a directory for the traces of all balancers
MOST_TRACES = 10_000  # in that directory
Sent = Sequence[tuple[str, int]]  # what, bytes per replica


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
    settings: Settings,
) -> Recorder | None:
    """Return the recorder of this rank, or None; collective. An error on one rank is one on all."""
    parent = os.environ.get(VARIABLE) if record is None else None
    if record is None and not parent:
        return None
    options: dict[str, Any] = {"relay": settings.relay, "chunks": CHUNKS}
    recorder = None
    directory = "" if record is None else str(Path(record).absolute())
    for first in (True, False):  # rank 0 creates the directory
        error = None
        if first == (comm.rank == 0):
            try:
                directory = directory or str(_new_directory(Path(str(parent))))
                recorder = Recorder(directory, topology, config, rank=comm.rank, **options)
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


@dataclass
class _Pass:
    """Observations of one microbatch since it was last written."""

    plan: Plan
    key: Key | None  # None: not recorded
    slot_rows: list[int]
    recorded: bool = False
    moved: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class _Waiting(NamedTuple):
    """A microbatch whose forward pass backward may recompute."""

    loads: bytes
    key: Key
    microbatch: weakref.ref[MicrobatchInfo]

    def before_backward(self) -> bool:
        microbatch = self.microbatch()
        return microbatch is not None and not microbatch.in_backward


def _first_pass(waiting: Sequence[_Waiting], loads: bytes) -> Key | None:
    """Return the key of the forward pass that is recomputed with these loads; None: forgotten."""
    equal = [entry for entry in reversed(waiting) if entry.loads == loads]
    equal.sort(key=_Waiting.before_backward, reverse=True)
    return equal[0].key if equal else None


class Recording:
    """The sink that writes a trace; one per rank."""

    def __init__(self, recorder: Recorder, rank: int) -> None:
        self._recorder, self._rank = recorder, rank
        self._waiting: dict[int, deque[_Waiting]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._numbers: dict[int, int] = defaultdict(int)  # microbatches of every layer
        self._step: int | None = None
        self._counts: dict[int, dict[int, int]] = {}  # microbatches by step and layer
        self._unplanned: WeakKeyDictionary[MicrobatchInfo, dict[str, float]] = WeakKeyDictionary()
        self._passes: WeakKeyDictionary[MicrobatchInfo, _Pass] = WeakKeyDictionary()

    def begin_step(self, step: int) -> None:
        """Set the step of the microbatches from now on."""
        if step < 0:
            raise ConfigError(f"a step must not be negative, got {step}")
        self._step = step

    def planned(self, microbatch: MicrobatchInfo, plan: Plan) -> None:
        """Assign a key to the microbatch."""
        waiting, loads = self._waiting[microbatch.layer], plan.loads.tobytes()
        if microbatch.recomputed:
            key = _first_pass(waiting, loads)
        else:
            key = self._new_key(microbatch.layer, self._step)
            waiting.append(_Waiting(loads, key, weakref.ref(microbatch)))
        current = self._pass(plan, key)
        current.seconds.update(self._unplanned.pop(microbatch, {}))
        self._passes[microbatch] = current

    def _new_key(self, layer: int, step: int | None) -> Key:
        """Return the key by which all ranks know the microbatch."""
        self._numbers[layer] += 1
        if step is None:  # every microbatch is a step
            return self._numbers[layer] - 1, layer, 0
        counts = self._counts.setdefault(step, defaultdict(int))
        counts[layer] += 1
        while len(self._counts) > REMEMBERED:
            del self._counts[next(iter(self._counts))]
        return step, layer, counts[layer] - 1

    def replayed(
        self, layer: int, step: int | None, plan: Plan, sent: Sent, start_time: float
    ) -> None:
        """Record a microbatch that a graph has served; its seconds are unknown."""
        replay = self._pass(plan, self._new_key(layer, step))
        replay.moved = sum(nbytes * copies_sent(plan, what, self._rank) for what, nbytes in sent)
        self._write(replay, start_time)

    def lost(self, records: int) -> None:
        """Count records that came too late."""
        if records:
            self._recorder.lose(records)

    def took(self, microbatch: MicrobatchInfo, stage: str, seconds: float) -> None:
        """Add the time of a stage; a recomputed forward pass is one stage."""
        stage = "recompute" if microbatch.recomputed and stage in FORWARD else stage
        current = self._passes.get(microbatch)
        sums = self._unplanned.setdefault(microbatch, {}) if current is None else current.seconds
        sums[stage] = sums.get(stage, 0.0) + seconds

    def sent(self, microbatch: MicrobatchInfo, _what: str, nbytes: int, _copies: int) -> None:
        """Add bytes that were moved."""
        self._passes[microbatch].moved += nbytes

    def passed(self, microbatch: MicrobatchInfo, start_time: float) -> None:
        """Write what was observed since the last call."""
        current = self._passes.get(microbatch)
        if current is None or current.key is None:
            return
        if not current.recorded and not microbatch.recomputed and "combine" not in current.seconds:
            return  # the caller dispatches rows and passes them to the recorder
        self._write(current, start_time, added=microbatch.recomputed)

    def _pass(self, plan: Plan, key: Key | None) -> _Pass:
        return _Pass(plan, key, rows_received(plan, self._rank).sum(axis=0).tolist())

    def _write(self, current: _Pass, start_time: float, *, added: bool = False) -> None:
        """Write a record, or add to the one that was written before."""
        assert current.key is not None
        step, layer, number = current.key
        fields: dict[str, Any] = {
            "step": step,
            "layer": layer,
            "microbatch": number,
            "bytes_moved": current.moved,
            "seconds": current.seconds,
            "began": start_time,
        }
        current.seconds, current.moved = defaultdict(float), 0
        if added or current.recorded:
            self._recorder.more(**fields)
        else:
            current.recorded = True
            self._recorder.add(plan=current.plan, slot_rows=current.slot_rows, **fields)
