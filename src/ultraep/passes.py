"""PassRecord: the stages, plan and transfers of one pass of a microbatch through a layer.

A microbatch has a forward pass and, in training, a backward pass. Its verbs mark the begin of every
stage in the record of the current pass:

    passes = Passes(layer, step, log)     of one microbatch; its rows and replicas share them
    passes.record.at("loads")             stage 1 begins
    passes.record.at("plan")              stage 1 ends, stage 2 begins
    ...
    passes.record.end()                   the pass ends

`PassLog` calls every subscriber once for each pass, with host numbers: on a CPU when the pass ends,
on a GPU when the device has finished it. Stats, traces, metrics and learnt speeds are subscribers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import torch

from ultraep.arrays import digest_of
from ultraep.errors import CommunicationError
from ultraep.hops import replicas_sent
from ultraep.plan import Plan
from ultraep.position import At, Position, moment

FORWARD, BACKWARD, RECOMPUTED = "forward", "backward", "recomputed forward"
TIMED, LEARNT = 32, 8  # one in this many microbatches is timed on a GPU; if speeds are learnt
MOST_OPEN, MOST_PENDING = 256, 4096  # passes that have not ended; groups that wait for the device
MOST_WAITING = 8  # groups that wait for a pause of the host
WORD, GOLDEN = 1 << 32, 2654435769  # the golden section of a 32-bit word
CPU = torch.device("cpu")
STOPPED = "_StopRecomputationError"  # torch raises it when a checkpoint has recomputed enough

Subscriber: TypeAlias = "Callable[[PassRecord], None]"
logger = logging.getLogger(__name__)
_of_thread = threading.local()  # `record`: whose stage this thread began last


class PassRecord:
    """One forward or backward pass of one microbatch on this rank.

    layer, step, microbatch: position, as in a trace.
    kind: `FORWARD`, `RECOMPUTED` (backward recomputes this forward pass) or `BACKWARD`.
    start_time: Unix time.   timed: whether `seconds` are measured.
    captured: whether a CUDA graph captures the pass; then subscribers do not see it.
    timeline: stages with the host time at which they began; "": outside of all stages.
    plan: of the microbatch. None again after subscribers were called, to free its memory. A plan of
        the device if no subscriber reads plans.
    sent: "weights" or "gradients", bytes of a replica, and replicas; None: as planned.
    seconds: by stage.   bytes_sent, replicas_sent: by "weights" and "gradients".
    """

    __slots__ = (
        *("layer", "step", "microbatch", "kind", "backward", "start_time", "timed", "captured"),
        *("timeline", "plan", "sent", "seconds", "bytes_sent", "replicas_sent"),
        *("passes", "ended", "number", "digests", "clock", "on_gpu", "events", "_log"),
    )

    def __init__(self, passes: Passes, kind: str, log: PassLog | None = None) -> None:
        self.layer, self.step, self.microbatch = passes.layer, passes.step, passes.microbatch
        self.kind = kind
        self.backward, self.start_time = kind == BACKWARD, time.time()
        self.timed, self.captured, self.ended = True, False, False
        self.timeline: list[tuple[str, float]] = []
        self.plan: Any = passes.plan
        self.sent: list[tuple[str, int, int | None]] = []
        self.seconds: dict[str, float] = {}
        self.bytes_sent: dict[str, int] = {}
        self.replicas_sent: dict[str, int] = {}
        self.passes: Passes | None = None  # until subscribers were called
        self.number, self.digests = 0, (0, 0)  # for the flight recorder
        self.clock = time.perf_counter
        self.on_gpu = False  # and not captured
        self.events: list[Any] = []  # of a timed pass on a GPU, one for each entry of the timeline
        self._log = log

    def at(self, stage: str, in_backward: str = "") -> None:
        """Begin a stage, which may have another name in backward. The stage before it ends."""
        if in_backward and self.backward:
            stage = in_backward
        self.timeline.append((stage, self.clock()))
        if self.on_gpu and self.timed:
            self.events.append(_event())
        if self._log is not None:
            _of_thread.record = self

    @property
    def stage(self) -> str:
        """The current stage; "": none."""
        return self.timeline[-1][0] if self.timeline else ""

    def end(self) -> None:
        """End the pass, unless it has ended."""
        if not self.ended:
            self.at("")
            _of_thread.record = None
            if self._log is not None:
                self._log.ended(self)

    @property
    def place(self) -> str:
        """The place of the last stage in the program, for errors."""
        stage = next((stage for stage, _ in reversed(self.timeline) if stage), "")
        return f"stage {stage!r} of layer {self.layer} ({moment(self.step, self.microbatch)})"

    def failed(self, error: BaseException) -> None:
        """Name the stage in an error of communication, and write the flight file."""
        if isinstance(error, CommunicationError):
            error.at(self.place)
        if self._log is not None and self._log.flight is not None:
            self._log.flight.failed(error)

    def finish(self, rank: int) -> None:
        """Set the attributes that subscribers read; the device has finished the pass."""
        self.seconds, self.bytes_sent = defaultdict(float), defaultdict(int)
        self.replicas_sent = defaultdict(int)
        for what, nbytes, replicas in self.sent:
            number = replicas_sent(self.plan, what, rank) if replicas is None else replicas
            self.bytes_sent[what] += nbytes * number
            self.replicas_sent[what] += number
        if self.on_gpu:  # not timed: no events
            for (stage, _), (begin, end) in zip(self.timeline, pairwise(self.events), strict=False):
                self.seconds[stage] += begin.elapsed_time(end) / 1000
        else:
            for (stage, since), (_, until) in pairwise(self.timeline):
                self.seconds[stage] += until - since
        self.seconds.pop("", None)

    def plan_digests(self) -> tuple[int, int]:
        """Digests of the loads and of the plan of a forward pass; 0: not on the host."""
        plan = self.plan
        if self.backward or not isinstance(plan, Plan):
            return self.digests
        return digest_of(plan.loads), digest_of(plan.replicas, plan.quotas)


class FlightRecorder(Protocol):
    """Keeps the last passes; `ultraep.runtime.flight` writes them to a file."""

    def add(self, record: PassRecord, /) -> None: ...

    def failed(self, error: BaseException, /) -> None: ...


class NotingFailures:
    """A block whose error is noted in the pass that this thread works on."""

    def __enter__(self) -> None: ...

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            note_failure(error)


NOTING_FAILURES = NotingFailures()


def note_failure(error: BaseException) -> None:
    """Note an error in the pass that this thread works on, if there is one."""
    record: PassRecord | None = getattr(_of_thread, "record", None)
    if record is not None and type(error).__name__ != STOPPED:
        record.failed(error)


class Passes:
    """The position of one microbatch, and its current pass.

    step, microbatch: as in a trace.   count: of microbatches of all layers so far, with this one.
    log: None: no subscriber sees the passes.
    plan: of the microbatch, once it is known.
    gradients_leave: whether backward sends gradients back to the tokens.
    """

    __slots__ = (
        *("layer", "step", "microbatch", "count", "recomputed", "record", "plan"),
        *("gradients_leave",),
        *("_log", "_device", "__weakref__"),
    )

    def __init__(
        self,
        layer: int,
        step: int,
        log: PassLog | None = None,
        *,
        microbatch: int = 0,
        count: int = 1,
        recomputed: bool = False,
        device: torch.device = CPU,
    ) -> None:
        self.layer, self.step, self.microbatch = layer, step, microbatch
        self.count, self.recomputed = count, recomputed
        self.plan: Any = None
        self.gradients_leave = True
        self._log, self._device = log, device
        self.record = self._begin(RECOMPUTED if recomputed else FORWARD)

    def position(self, at: At) -> Position:
        """Return where this microbatch is, to be compared with the other ranks."""
        if self.recomputed and at is At.LOADS:
            at = At.LOADS_RECOMPUTED
        return Position(at, self.layer, self.step, self.microbatch)

    def begin_backward(self) -> None:
        """Begin a backward pass, in its first stage."""
        self.record.end()  # a recomputed forward pass may stop before its last stage
        self.record = self._begin(BACKWARD)
        self.record.at("combine back")

    def deliver(self) -> bool:
        """Deliver an earlier pass that has ended; return whether there was one."""
        return self._log is not None and self._log.deliver()

    def _begin(self, kind: str) -> PassRecord:
        if self._log is None:
            return PassRecord(self, kind)
        return self._log.begin(self, kind, self._device)


class PassLog:
    """The passes of all microbatches of one balancer, and their subscribers.

    flight: the flight recorder, which keeps the last passes.
    every: one in this many microbatches is timed on a GPU, because events cost time of the host.
    reads_plans: whether subscribers read plans; a rank alone need not fetch them otherwise.
    warn_of_captures: warn once that subscribers do not see the passes of graphs.
    record_type, clock: replaced by tools that watch stages.
    """

    record_type = PassRecord
    clock = staticmethod(time.perf_counter)

    def __init__(self, rank: int, flight: FlightRecorder | None = None, every: int = TIMED) -> None:
        self.rank, self.flight, self.every = rank, flight, every
        self._subscribers: list[Subscriber] = []
        self.warn_of_captures, self.reads_plans = False, True
        self._open: dict[PassRecord, None] = {}
        # Passes on a GPU that have ended, with functions that return their plans.
        self._ended: deque[tuple[PassRecord, Callable[[], Any]]] = deque()
        self._pending: deque[tuple[Any, deque[tuple[PassRecord, Any]]]] = deque()

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call the subscriber once for each pass that no graph captures."""
        self._subscribers.append(subscriber)

    def begin(self, passes: Passes, kind: str, device: torch.device) -> PassRecord:
        """Begin a pass; deliver earlier ones if many wait for it."""
        record = self.record_type(passes, kind, self)
        record.passes, record.clock = passes, self.clock
        if device.type == "cuda":
            record.timed = self.times(passes.count)
            record.captured = torch.cuda.is_current_stream_capturing()
            record.on_gpu = not record.captured
            while record.on_gpu and len(self._pending) > MOST_WAITING and self.deliver():
                pass
        if self.flight is not None:
            self.flight.add(record)
        self._open[record] = None
        if len(self._open) > MOST_OPEN:
            self._give_up(next(iter(self._open)))
        return record

    def times(self, count: int) -> bool:
        """Whether a GPU times this microbatch: the first one, then evenly over steps and layers."""
        return ((count - 1) * GOLDEN & WORD - 1) * self.every < WORD

    def ended(self, record: PassRecord) -> None:
        """Deliver a pass, at once or when the device has finished it."""
        record.ended = True
        self._open.pop(record, None)
        if record.captured:
            self._release(record)
            if self.warn_of_captures:
                self.warn_of_captures = False
                logger.warning(
                    "microbatches of replayed CUDA graphs are not recorded: traces, metrics and "
                    "other subscribers see passes outside of graphs only"
                )
        elif not record.on_gpu:
            plan = None if record.plan is None else record.plan.to_host()
            self._deliver(record, plan)
        elif not (self.reads_plans or record.timed):
            self._deliver(record, record.plan)
        else:
            self._ended.append((record, self._host_plan(record)))
            if record.timed:
                self._wait_for(_event())  # after the copy of the plan

    def _host_plan(self, record: PassRecord) -> Callable[[], Any]:
        """Return a callable that yields the plan for subscribers."""
        plan = record.plan
        return plan.to_host_async() if self.reads_plans and plan is not None else lambda: plan

    def _wait_for(self, event: Any) -> None:
        """Deliver the passes that have ended when this event has come."""
        self._pending.append((event, self._ended))
        self._ended = deque()
        while len(self._pending) > MOST_PENDING:
            self.deliver(wait=True)

    def deliver(self, *, wait: bool = False) -> bool:
        """Deliver one pass that has ended on the device; return whether there was one."""
        if not self._pending:
            return False
        event, ended = self._pending[0]
        if wait:
            event.synchronize()
        elif not event.query():
            return False
        record, plan = ended.popleft()
        if not ended:
            self._pending.popleft()
        self._deliver(record, plan())
        return True

    def _deliver(self, record: PassRecord, plan: Any) -> None:
        record.plan = plan
        record.finish(self.rank)
        if record.passes is not None:
            record.passes.plan = plan  # for backward: on the host, if it was on a device
        for subscriber in self._subscribers:
            subscriber(record)
        self._release(record)

    def _release(self, record: PassRecord) -> None:
        """Free what the flight recorder does not need."""
        if self.flight is not None:
            record.digests = record.plan_digests()
        record.plan = record.passes = record._log = None
        record.events = []

    def settle(self) -> None:
        """Deliver all passes so far, also those that have not ended; waits for the device.

        Later stages of a pass that has not ended are lost.
        """
        for record in [*self._open]:
            self._give_up(record)
        if self._ended:
            self._wait_for(_event())
        while self.deliver(wait=True):
            pass

    def _give_up(self, record: PassRecord) -> None:
        """Deliver a pass that does not end, such as one whose rows the caller dispatches."""
        if record.timeline and not record.captured:
            self.ended(record)
        self._open.pop(record, None)


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(torch.cuda.current_device()))
    return event
