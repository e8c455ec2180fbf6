"""Recording: the sink of a balancer that becomes a trace, if one is wanted.

Forward, a microbatch becomes a record when its outputs are combined; what backward takes is added
to that record later. A forward pass that is computed again in backward is no new record: its time
is the stage "recompute" of the first.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ultraep.comm import Communicator
from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError, FileError
from ultraep.hops import Relay, copies_sent
from ultraep.microbatch import MicrobatchInfo
from ultraep.plan import Plan
from ultraep.reroute import rows_received
from ultraep.runtime.history import REMEMBERED, History, Moment
from ultraep.runtime.settings import Settings
from ultraep.topology import Topology
from ultraep.trace.record import Recorder
from ultraep.trace.schema import FORWARD, Key

VARIABLE = "ULTRAEP_TRACE"  # in the environment: a folder for the traces of all balancers
MOST_TRACES = 10_000  # in that folder
Sent = Sequence[tuple[str, int]]


def wanted(record: str | Path | None) -> str:
    """What ranks must agree on: where to record, and whether in a folder of their own there."""
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
    """The recorder of this rank; None: nothing is recorded. An error on one rank is one on all."""
    relay = Relay(settings.relay, settings.chunks)
    inside = os.environ.get(VARIABLE) if record is None else None
    if record is None and not inside:
        return None
    recorder, error = None, ""
    chosen = "" if record is None else str(Path(record).absolute())
    if comm.rank == 0:
        try:
            chosen = chosen or str(_new_folder(Path(str(inside))))
            recorder = Recorder(chosen, topology, config, relay=relay)
        except FileError as refused:
            error = str(refused)
    chosen, error = comm.gather_objects((chosen, error))[0]
    if not chosen and not error:
        error = f"ranks of one process cannot agree on a folder in {inside}: give record="
    if comm.rank and not error:
        try:
            recorder = Recorder(chosen, topology, config, rank=comm.rank, relay=relay)
        except FileError as refused:
            error = str(refused)
    errors = comm.gather_objects(error)
    if any(errors):
        if recorder is not None:
            recorder.discard()
        rank = next(rank for rank, text in enumerate(errors) if text)
        raise FileError(f"rank {rank} cannot record: {errors[rank]}")
    return recorder


def _new_folder(parent: Path) -> Path:
    """A folder that no other balancer has, in this process or another."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in range(MOST_TRACES):
            folder = parent / f"{number:04d}"
            if not folder.exists():
                try:
                    folder.mkdir()
                except FileExistsError:  # another was quicker
                    continue
                return folder
    except OSError as error:
        raise FileError(f"{parent}: cannot be written to: {error.strerror}") from None
    raise FileError(f"{parent}: holds {MOST_TRACES} traces already, name a new folder")


@dataclass
class _Pass:
    """What was noted of one microbatch since it was last written."""

    plan: Plan
    key: Key | None  # None: not recorded
    slot_rows: list[int]
    recorded: bool = False
    moved: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class Recording:
    """The sink that becomes a trace. One for each rank."""

    def __init__(self, recorder: Recorder, rank: int) -> None:
        self._recorder, self._rank = recorder, rank
        self._history = History()
        self._step: int | None = None
        self._counts: dict[int, dict[int, int]] = {}  # of every step, by layer
        self._keys: dict[int, deque[tuple[int, Key]]] = defaultdict(
            lambda: deque(maxlen=REMEMBERED + 1)
        )
        self._early: WeakKeyDictionary[MicrobatchInfo, dict[str, float]] = WeakKeyDictionary()
        self._passes: WeakKeyDictionary[MicrobatchInfo, _Pass] = WeakKeyDictionary()

    def begin_step(self, step: int) -> None:
        """The microbatches from now on are those of this step."""
        if step < 0:
            raise ConfigError(f"a step must not be negative, got {step}")
        self._step = step

    def planned(self, microbatch: MicrobatchInfo, plan: Plan) -> None:
        """The microbatch has a plan, and thereby a place among those of its layer."""
        layer, again = microbatch.layer, microbatch.again
        moment = self._history.note(microbatch, plan.loads.sum(axis=0))
        rows = rows_received(plan, self._rank).sum(axis=0).tolist()
        key = self._key_again(layer, moment) if again else self._key(layer, moment, self._step)
        found = _Pass(plan, key, rows)
        for stage, seconds in self._early.pop(microbatch, {}).items():
            found.seconds[stage] += seconds
        self._passes[microbatch] = found

    def _key(self, layer: int, moment: Moment, step: int | None) -> Key:
        """By which all ranks know the microbatch."""
        assert moment.number is not None
        key = moment.number, layer, 0  # where nobody tells, every microbatch is a step
        if step is not None:
            counts = self._counts.setdefault(step, defaultdict(int))
            key = step, layer, counts[layer]
            counts[layer] += 1
            while len(self._counts) > REMEMBERED:
                del self._counts[next(iter(self._counts))]
        self._keys[layer].append((moment.number, key))
        return key

    def _key_again(self, layer: int, moment: Moment) -> Key | None:
        """That of the first time."""
        found = (key for number, key in self._keys[layer] if number == moment.number)
        return next(found, None)

    def replayed(self, layer: int, step: int | None, plan: Plan, sent: Sent, began: float) -> None:
        """A graph has served a microbatch: it has no seconds. sent: what, bytes of a copy."""
        replay = MicrobatchInfo(layer, 0, again=False)
        moment = self._history.note(replay, plan.loads.sum(axis=0))
        step, layer, number = self._key(layer, moment, step)
        rows = rows_received(plan, self._rank).sum(axis=0).tolist()
        moved = sum(nbytes * copies_sent(plan, what, self._rank) for what, nbytes in sent)
        self._recorder.add(
            plan=plan,
            slot_rows=rows,
            step=step,
            layer=layer,
            microbatch=number,
            bytes_moved=moved,
            began=began,
        )

    def lost(self, records: int) -> None:
        """So many came too late to be recorded."""
        self._recorder.lose(records)

    def took(self, microbatch: MicrobatchInfo, stage: str, seconds: float) -> None:
        """Add the time of a stage; of a forward pass that is computed again, to one of its own."""
        stage = "recompute" if microbatch.again and stage in FORWARD else stage
        found = self._passes.get(microbatch)
        sums = self._early.setdefault(microbatch, {}) if found is None else found.seconds
        sums[stage] = sums.get(stage, 0.0) + seconds

    def sent(self, microbatch: MicrobatchInfo, _what: str, nbytes: int, _copies: int) -> None:
        """Add what was moved."""
        self._passes[microbatch].moved += nbytes

    def passed(self, microbatch: MicrobatchInfo, began: float) -> None:
        """Hand over what was noted since the last time."""
        found = self._passes.get(microbatch)
        if found is None or found.key is None:
            return
        if not found.recorded and not microbatch.again and "combine" not in found.seconds:
            return  # whoever moves the rows himself tells the recorder
        seconds, found.seconds = found.seconds, defaultdict(float)
        moved, found.moved = found.moved, 0
        step, layer, number = found.key
        told: dict[str, Any] = {
            "step": step,
            "layer": layer,
            "microbatch": number,
            "bytes_moved": moved,
            "seconds": seconds,
            "began": began,
        }
        if microbatch.again or found.recorded:
            self._recorder.more(**told)
        else:
            found.recorded = True
            self._recorder.add(plan=found.plan, slot_rows=found.slot_rows, **told)
