"""Clocks: observers that time the stages of a data plane and pass host numbers to sinks.

`HostClock` passes them at once, `DeviceClock` when the device has finished the stage. The sinks are
`Stats` and `Recording`.
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
from ultraep.runtime.microbatch import PlaneRequest
from ultraep.runtime.observe import Sink
from ultraep.runtime.recording import Recording
from ultraep.runtime.replays import ReplayedPlans

TIMED = 8  # one in this many microbatches is timed on a GPU, unless all are recorded
MOST_PENDING = 4096  # reports that wait for the device
WORD, GOLDEN = 1 << 32, 2654435769  # the golden section of a 32-bit word
FIRST_STAGES = ("loads", "combine back")  # of forward, and of backward
LAST_STAGES = ("combine", "reduce", "dispatch back")  # after which a microbatch may be gone


class HostClock:
    """Times stages on the host, for planes whose verbs return when they are done.

    The time of a stage does not include the stages inside of it.
    rank: of this process; determines what it sends by a plan, if the plane does not count it.
    """

    def __init__(self, sinks: Sequence[Sink], rank: int) -> None:
        self._sinks, self._rank = sinks, rank
        self._open: WeakKeyDictionary[MicrobatchInfo, list[tuple[str, Any]]] = WeakKeyDictionary()
        self._plans: WeakKeyDictionary[MicrobatchInfo, Plan] = WeakKeyDictionary()

    def times(self, _step: int) -> bool:
        """Whether the stages of this microbatch are timed."""
        return True

    def begin_step(self, _step: int) -> None:
        """Pass on everything; what the device does from now on belongs to this step."""

    def settle(self) -> None:
        """Pass on everything observed, and the replays that have arrived; waits for the device."""

    def finish(self) -> None:
        """Pass on everything, and wait for all replays."""

    def begin(self, stage: str, microbatch: MicrobatchInfo) -> None:
        if not microbatch.timed:
            return
        stages, now = self._open.setdefault(microbatch, []), self._now()
        if stages:
            self._took(microbatch, *stages[-1], now)
        stages.append((stage, now))

    def end(self, stage: str, microbatch: MicrobatchInfo) -> None:
        self._close(stage, microbatch)
        if stage in LAST_STAGES and microbatch.timed:
            self._passed(microbatch, microbatch.start_time)

    def _close(self, stage: str, microbatch: MicrobatchInfo) -> None:
        """End a stage and all stages inside of it; the stage around it goes on."""
        stages, name = self._open.get(microbatch), ""
        if not stages:
            return
        now = self._now()
        while stages and name != stage:
            name, since = stages.pop()
            self._took(microbatch, name, since, now)
        if stages:
            stages[-1] = stages[-1][0], now

    def _now(self) -> Any:
        return time.perf_counter()

    def _took(self, microbatch: MicrobatchInfo, stage: str, since: Any, now: Any) -> None:
        self._report(microbatch, stage, now - since)

    def _report(self, microbatch: MicrobatchInfo, stage: str, seconds: float) -> None:
        for sink in self._sinks:
            sink.took(microbatch, stage, seconds)

    def _passed(self, microbatch: MicrobatchInfo, start_time: float) -> None:
        for sink in self._sinks:
            sink.passed(microbatch, start_time)

    def planned(self, microbatch: MicrobatchInfo, plan: AnyPlan) -> None:
        host_plan = self._plans[microbatch] = plan.to_host()
        for sink in self._sinks:
            sink.planned(microbatch, host_plan)

    def sent(self, microbatch: MicrobatchInfo, what: str, nbytes: int, copies: int | None) -> None:
        if copies is None:
            copies = copies_sent(self._plans[microbatch], what, self._rank)
        for sink in self._sinks:
            sink.sent(microbatch, what, nbytes * copies, copies)


class DeviceClock(HostClock):
    """Times stages on a GPU by events on its stream, and reports when the device has finished them.

    every: one in this many microbatches is timed, because events cost time of the host.
    replays: records the plans of replayed graphs; stages that a graph captures are not reported.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        rank: int,
        every: int = 1,
        replays: ReplayedPlans | None = None,
    ) -> None:
        super().__init__(sinks, rank)
        self._every, self._replays = every, replays
        self._pending: deque[tuple[Any, list[Callable[[], None]]]] = deque()
        self._reports: list[Callable[[], None]] = []  # that wait for the next event

    def times(self, step: int) -> bool:
        """Whether this microbatch is timed: the first one, then evenly over steps and layers."""
        return ((step - 1) * GOLDEN & WORD - 1) * self._every < WORD

    def begin(self, stage: str, microbatch: MicrobatchInfo) -> None:
        if not microbatch.timed or torch.cuda.is_current_stream_capturing():
            return
        if stage in FIRST_STAGES:
            while self._pending and self._pending[0][0].query():
                self._report_next()
        super().begin(stage, microbatch)

    def end(self, stage: str, microbatch: MicrobatchInfo) -> None:
        if not microbatch.timed or torch.cuda.is_current_stream_capturing():
            return
        self._close(stage, microbatch)
        if stage in LAST_STAGES:
            start_time = microbatch.start_time  # now: backward will change it
            self._reports.append(lambda: self._passed(microbatch, start_time))

    def _now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(torch.cuda.current_device()))
        return event

    def _took(self, microbatch: MicrobatchInfo, stage: str, since: Any, now: Any) -> None:
        def report() -> None:
            self._report(microbatch, stage, since.elapsed_time(now) / 1000)

        self._reports.append(report)
        self._attach(now)

    def planned(self, microbatch: MicrobatchInfo, plan: AnyPlan) -> None:
        if not torch.cuda.is_current_stream_capturing():
            later = plan.to_host_async()
            self._reports.append(lambda: HostClock.planned(self, microbatch, later()))
        elif self._replays is not None:
            self._replays.captured(microbatch, plan)  # type: ignore[arg-type]

    def sent(self, microbatch: MicrobatchInfo, what: str, nbytes: int, copies: int | None) -> None:
        if not torch.cuda.is_current_stream_capturing():
            self._reports.append(lambda: HostClock.sent(self, microbatch, what, nbytes, copies))
        elif self._replays is not None:
            self._replays.sent(microbatch, what, nbytes)

    def _attach(self, event: Any) -> None:
        """Make the reports wait for this event."""
        self._pending.append((event, self._reports))
        self._reports = []
        while len(self._pending) > MOST_PENDING:
            self._report_next()

    def _report_next(self) -> None:
        event, reports = self._pending.popleft()
        event.synchronize()
        for report in reports:
            report()

    def begin_step(self, step: int) -> None:
        self.settle()
        if self._replays is not None:
            self._replays.begin_step(step)

    def settle(self) -> None:
        if self._reports:
            self._attach(self._now())
        while self._pending:
            self._report_next()
        if self._replays is not None:
            self._replays.fetch()

    def finish(self) -> None:
        self.settle()
        if self._replays is not None:
            self._replays.finish()


def clock_for(
    request: PlaneRequest, sinks: Sequence[Sink], recording: Recording | None, *, captures: bool
) -> HostClock:
    """Return the clock of a data plane; captures: whether graphs can capture its microbatches."""
    rank, device = request.comm.rank, request.device
    if device.type != "cuda":
        return HostClock(sinks, rank)
    if recording is None:
        return DeviceClock(sinks, rank, TIMED)
    replays = ReplayedPlans(recording, request.topology, device) if captures else None
    return DeviceClock(sinks, rank, 1, replays)
