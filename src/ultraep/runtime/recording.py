"""Recording: what a balancer hands to the recorder of its rank, if it has one.

A `Passage` goes with a microbatch through a layer, from `gather` on, and collects the seconds of
its stages. Forward, it becomes a record when the outputs are combined; what backward takes is added
to that record later. A forward pass that is computed again in backward is no new record: its time
is the stage "recompute" of the first.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ultraep.comm import Communicator
from ultraep.config import BalanceConfig
from ultraep.dispatch import Roads
from ultraep.errors import ConfigError, FileError
from ultraep.plan import Plan
from ultraep.reroute import Routes
from ultraep.runtime.past import REMEMBERED, Seen
from ultraep.topology import Topology
from ultraep.trace.pieces import Key
from ultraep.trace.record import Recorder

VARIABLE = "ULTRAEP_TRACE"  # in the environment: a folder for the traces of all balancers
MOST_TRACES = 10_000  # in that folder


def wanted(record: str | Path | None) -> str:
    """What ranks must agree on: where to record, and whether in a folder of their own there."""
    if record is not None:
        return f"record in {Path(record)}"
    return f"record inside {os.environ[VARIABLE]}" if os.environ.get(VARIABLE) else "record nothing"


def open_recorder(
    record: str | Path | None, comm: Communicator, topology: Topology, config: BalanceConfig
) -> Recorder | None:
    """The recorder of this rank; None: nothing is recorded. An error on one rank is one on all."""
    inside = os.environ.get(VARIABLE) if record is None else None
    if record is None and not inside:
        return None
    recorder, chosen, error = None, "", ""
    if comm.rank == 0:
        try:
            chosen = str(_new_folder(Path(inside)) if inside else Path(str(record)).absolute())
            recorder = Recorder(chosen, topology, config)
        except FileError as refused:
            error = str(refused)
    chosen, error = comm.gather_objects((chosen, error))[0]
    if comm.rank and not error:
        try:
            recorder = Recorder(chosen, topology, config, rank=comm.rank)
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


class Passages:
    """Begins passages, and gives each the key that all ranks know it by."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.last: Passage | None = None  # that was planned
        self._step: int | None = None
        self._counts: dict[int, int] = defaultdict(int)  # of the step, by layer
        self._keys: dict[int, deque[tuple[int, Key]]] = defaultdict(
            lambda: deque(maxlen=REMEMBERED + 1)
        )

    def begin_step(self, step: int) -> None:
        """The microbatches from now on are those of this step."""
        if step < 0:
            raise ConfigError(f"a step must not be negative, got {step}")
        if step != self._step:
            self._counts.clear()
        self._step = step

    def planned(self, passage: Passage, layer: int, plan: Plan, seen: Seen) -> None:
        """The passage has a plan, and thereby a place among those of its layer."""
        self.last = passage
        passage.plan, passage.again = plan, seen.again
        if seen.again:
            found = (key for number, key in self._keys[layer] if number == seen.number)
            passage.key = next(found, None)
        elif seen.number is not None:
            passage.key = self._next(layer, seen.number)
            self._keys[layer].append((seen.number, passage.key))

    def _next(self, layer: int, number: int) -> Key:
        if self._step is None:  # nobody tells: every microbatch is a step
            return number, layer, 0
        self._counts[layer] += 1
        return self._step, layer, self._counts[layer] - 1


class Passage:
    """One microbatch on its way through one layer and back."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.key: Key | None = None  # None: not recorded
        self.plan: Plan | None = None
        self.again = self.back = False
        self.moved = 0
        self._slot_rows: list[int] | None = None
        self._recorded = False
        self._seconds: dict[str, float] = defaultdict(float)
        self._began = time.time()
        self._experts_since: float | None = None
        self._inside = 0.0  # seconds of other stages since then

    def took(self, stage: str, seconds: float) -> None:
        """Add the time of a stage."""
        if self.again and not self.back:
            stage = "recompute"
        elif self.back and stage == "replicate":
            stage = "weights again"
        self._seconds[stage] += seconds
        self._inside += seconds

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of the block."""
        begin = time.perf_counter()
        yield
        self.took(stage, time.perf_counter() - begin)

    def arrived(self, slot_rows: list[int]) -> None:
        """Rows are at their slots; the experts begin."""
        self._slot_rows = slot_rows
        self._experts_since, self._inside = time.perf_counter(), 0.0

    def served(self) -> None:
        """The experts are through, unless that was said before."""
        if self._experts_since is not None:
            whole = time.perf_counter() - self._experts_since
            self.took("experts back" if self.back else "experts", whole - self._inside)
            self._experts_since = None

    def returns(self) -> None:
        """Backward begins."""
        self.back, self._began = True, time.time()

    def flush(self) -> None:
        """Hand over what was collected since the last time."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        moved, self.moved = self.moved, 0
        if self.key is None or self.plan is None or self._slot_rows is None:
            return
        step, layer, microbatch = self.key
        if self.again or self._recorded:
            self._recorder.more(
                step=step,
                layer=layer,
                microbatch=microbatch,
                bytes_moved=moved,
                seconds=seconds,
                began=self._began,
            )
        else:
            self._recorded = True
            self._recorder.add(
                plan=self.plan,
                slot_rows=self._slot_rows,
                step=step,
                layer=layer,
                microbatch=microbatch,
                bytes_moved=moved,
                seconds=seconds,
                began=self._began,
            )


class TimedRoads(Roads):
    """Roads that tell a passage what goes over them."""

    def __init__(
        self, routes: Routes, comm: Communicator, on_return: Callable[[], None], passage: Passage
    ) -> None:
        def returns() -> None:
            passage.returns()
            with passage.timed("combine back"):
                on_return()

        super().__init__(routes, comm, returns)
        self._passage = passage

    def to_slots(
        self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Stage 5, or the backward of stage 7."""
        passage = self._passage
        with passage.timed("combine back" if passage.back else "dispatch"):
            found = super().to_slots(values_TD, scalars_TK)
        assert len(found[0]) == sum(self.counts)
        passage.arrived(self.counts)
        return found

    def to_tokens(
        self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Stage 7, or the backward of stage 5."""
        passage = self._passage
        passage.served()
        with passage.timed("dispatch back" if passage.back else "combine"):
            found = super().to_tokens(rows_AD, scalars_A)
        passage.flush()
        return found
