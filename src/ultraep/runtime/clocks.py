"""Clocks: observers that hand numbers of the host to sinks (`Stats`, `Recording`).

`HostClock` does it at once, `DeviceClock` when the device has come so far, without waiting for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ultraep.hops import copies_sent
from ultraep.microbatch import AnyPlan, MicrobatchInfo
from ultraep.plan import Plan
from ultraep.runtime.observe import Clock, Later, Sink
from ultraep.runtime.replays import ReplayedPlans

TIMED = 8  # one microbatch in so many, on a GPU that is not recorded
MOST_PENDING = 4096  # notes that wait for the device
WORD, GOLDEN = 1 << 32, 2654435769  # the golden section of a word
FIRST_STAGES = ("loads", "combine back")  # of forward, and of backward
LAST_STAGES = ("combine", "reduce", "dispatch back")  # after which a microbatch may be gone


class _Spans:
    """The open stages of every microbatch; what is inside of another does not count for that."""

    def __init__(self, now: Callable[[], Any], took: Callable[..., None]) -> None:
        self._now, self._took = now, took
        self._open: WeakKeyDictionary[MicrobatchInfo, list[Any]] = WeakKeyDictionary()

    def begin(self, stage: str, microbatch: MicrobatchInfo) -> None:
        stack, now = self._open.setdefault(microbatch, []), self._now()
        if stack:
            self._took(microbatch, stack[-1][0], stack[-1][1], now)
        stack.append([stage, now])

    def end(self, stage: str, microbatch: MicrobatchInfo) -> None:
        stack = self._open.get(microbatch)
        if not stack:
            return
        now = self._now()
        while stack:
            name, since = stack.pop()
            self._took(microbatch, name, since, now)
            if name == stage:
                break
        if stack:
            stack[-1][1] = now


class HostClock:
    """Seconds of the host, for planes whose verbs return when they are done.

    rank: of this rank, whose part in a plan is noted as sent where nobody counts it.
    """

    def __init__(self, sinks: Sequence[Sink], rank: int) -> None:
        self._notebooks, self._rank = sinks, rank
        self._spans = _Spans(time.perf_counter, self._took)
        self._plans: WeakKeyDictionary[MicrobatchInfo, Plan] = WeakKeyDictionary()

    def _took(self, microbatch: MicrobatchInfo, stage: str, since: float, now: float) -> None:
        self.took(microbatch, stage, now - since)

    def took(self, microbatch: MicrobatchInfo, stage: str, seconds: float) -> None:
        """Note the seconds of a stage."""
        for sink in self._notebooks:
            sink.took(microbatch, stage, seconds)

    def begin(self, stage: str, microbatch: MicrobatchInfo) -> None:
        self._spans.begin(stage, microbatch)

    def end(self, stage: str, microbatch: MicrobatchInfo) -> None:
        self._spans.end(stage, microbatch)
        self.passed(stage, microbatch, microbatch.began)

    def passed(self, stage: str, microbatch: MicrobatchInfo, began: float) -> None:
        """Note the end of a pass, if that was its last stage."""
        if stage in LAST_STAGES:
            for sink in self._notebooks:
                sink.passed(microbatch, began)

    def planned(self, microbatch: MicrobatchInfo, plan: AnyPlan) -> None:
        found = self._plans[microbatch] = plan.to_host()
        for sink in self._notebooks:
            sink.planned(microbatch, found)

    def sent(
        self, microbatch: MicrobatchInfo, what: str, nbytes: int, copies: int | Later | None
    ) -> None:
        if copies is None:
            copies = copies_sent(self._plans[microbatch], what, self._rank)
        elif callable(copies):
            copies = copies()
        for sink in self._notebooks:
            sink.sent(microbatch, what, nbytes * copies, copies)

    def times(self, _step: int) -> bool:
        """Every microbatch."""
        return True

    def begin_step(self, _step: int) -> None:
        """Nothing is left to be noted."""

    def settle(self) -> None:
        """Nothing is left to be noted."""

    def finish(self) -> None:
        """Nothing is left to be noted."""


class DeviceClock:
    """Seconds of a GPU, between events on its stream; notes come when the device has come so far.

    every: one microbatch in so many is timed, since events are work of the host: layers in turn.
    What a graph captures is not noted. replays: records what its replays plan; None: nobody does.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        rank: int,
        every: int = 1,
        replays: ReplayedPlans | None = None,
    ) -> None:
        self._every, self._replays = every, replays
        self._notes = HostClock(sinks, rank)
        self._spans = _Spans(_event, self._took)
        self._pending: deque[tuple[Any, list[Callable[[], None]]]] = deque()
        self._waiting: list[Callable[[], None]] = []  # notes that the next event is for

    def times(self, step: int) -> bool:
        """The first microbatch, and then as evenly as multiples of the golden section lie."""
        return ((step - 1) * GOLDEN & WORD - 1) * self._every < WORD

    def _took(self, microbatch: MicrobatchInfo, stage: str, since: Any, now: Any) -> None:
        def note() -> None:
            self._notes.took(microbatch, stage, since.elapsed_time(now) / 1000)

        self._waiting.append(note)
        self._attach(now)

    def begin(self, stage: str, microbatch: MicrobatchInfo) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        if stage in FIRST_STAGES:
            self._catch_up()
        self._spans.begin(stage, microbatch)

    def end(self, stage: str, microbatch: MicrobatchInfo) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        self._spans.end(stage, microbatch)
        if stage in LAST_STAGES:
            began = microbatch.began  # until then, backward may have begun
            self._waiting.append(lambda: self._notes.passed(stage, microbatch, began))

    def planned(self, microbatch: MicrobatchInfo, plan: AnyPlan) -> None:
        if not torch.cuda.is_current_stream_capturing():
            later = plan.to_host_async()
            self._waiting.append(lambda: self._notes.planned(microbatch, later()))
        elif self._replays is not None:
            self._replays.captured(microbatch, plan)  # type: ignore[arg-type]

    def sent(
        self, microbatch: MicrobatchInfo, what: str, nbytes: int, copies: int | Later | None
    ) -> None:
        if not torch.cuda.is_current_stream_capturing():
            self._waiting.append(lambda: self._notes.sent(microbatch, what, nbytes, copies))
        elif self._replays is not None and copies is None:
            self._replays.sent(microbatch, what, nbytes)

    def _attach(self, event: Any) -> None:
        """Take the notes that wait when this event is over."""
        self._pending.append((event, self._waiting))
        self._waiting = []
        while len(self._pending) > MOST_PENDING:
            self._next()

    def _next(self) -> None:
        event, notes = self._pending.popleft()
        event.synchronize()
        for note in notes:
            note()

    def _catch_up(self) -> None:
        while self._pending and self._pending[0][0].query():
            self._next()

    def begin_step(self, step: int) -> None:
        self.settle()
        if self._replays is not None:
            self._replays.begin_step(step)

    def settle(self) -> None:
        """Note all that was seen; waits for the device. Of replays, what has come."""
        if self._waiting:
            self._attach(_event())
        while self._pending:
            self._next()
        if self._replays is not None:
            self._replays.fetch()

    def finish(self) -> None:
        """Note everything; waits for the device."""
        self.settle()
        if self._replays is not None:
            self._replays.finish()


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(torch.cuda.current_device()))
    return event


def clock_of(
    device: torch.device,
    sinks: Sequence[Sink],
    rank: int,
    *,
    recorded: bool,
    replays: ReplayedPlans | None = None,
) -> Clock:
    """The clock of a data plane on that device."""
    if device.type != "cuda":
        return HostClock(sinks, rank)
    return DeviceClock(sinks, rank, 1 if recorded else TIMED, replays)
