"""What is seen of a balancer from outside: stages that begin and end, plans, bytes.

A balancer tells its observers; verbs hold no timers. Clocks are observers that hand numbers of the
host to notebooks (`Stats`, `Recording`): `HostClock` at once, `DeviceClock` when the device has
come so far, without waiting for it. Benchmarks bring observers of their own.

Stages, forward and backward: `ultraep.trace.schema.STAGES`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Self, TypeAlias
from weakref import WeakKeyDictionary

import torch

from ultraep.plan import Plan
from ultraep.plane import AnyPlan, Copies, Exchange, Microbatch

Later: TypeAlias = Callable[[], int]  # a number that a device will know
TIMED = 8  # one microbatch in so many, on a GPU that is not recorded
MOST_PENDING = 4096  # notes that wait for the device
WORD, GOLDEN = 1 << 32, 2654435769  # the golden section of a word
FIRST_STAGES = ("loads", "combine back")  # of forward, and of backward
LAST_STAGES = ("combine", "reduce", "dispatch back")  # after which a microbatch may be gone


class Observer(Protocol):
    """What is told when it happens; stages may be inside of others."""

    def begin(self, stage: str, microbatch: Microbatch, /) -> None: ...

    def end(self, stage: str, microbatch: Microbatch, /) -> None: ...

    def planned(self, microbatch: Microbatch, plan: AnyPlan, /) -> None: ...

    def sent(
        self, microbatch: Microbatch, what: str, nbytes: int, copies: int | Later | None, /
    ) -> None:
        """`weights` or `gradients` of so many copies, of so many bytes each; None: as planned."""


class Clock(Observer, Protocol):
    """The observer of a data plane, which hands on what it sees to notebooks."""

    def times(self, step: int, /) -> bool:
        """Whether stages of that microbatch are timed."""

    def settle(self) -> None:
        """Note all that was seen."""


class Notebook(Protocol):
    """What is kept, in numbers of the host."""

    def planned(self, microbatch: Microbatch, plan: Plan, /) -> None: ...

    def took(self, microbatch: Microbatch, stage: str, seconds: float, /) -> None: ...

    def sent(self, microbatch: Microbatch, what: str, nbytes: int, copies: int, /) -> None: ...

    def passed(self, microbatch: Microbatch, began: float, /) -> None:
        """The microbatch may have left the layer, in a pass that began then."""


class Watch:
    """All observers of a balancer: the clock of the data plane at work, and those of others."""

    def __init__(self) -> None:
        self.clock: Clock | None = None
        self.others: list[Observer] = []

    @contextmanager
    def nobody(self) -> Iterator[None]:
        """What happens in this block is no microbatch, and nobody is told."""
        clock, others, self.clock, self.others = self.clock, self.others, None, []
        try:
            yield
        finally:
            self.clock, self.others = clock, others

    def stage(self, name: str, microbatch: Microbatch) -> _Stage:
        """The `with` block is this stage."""
        return _Stage(self, name, microbatch)

    def begin(self, name: str, microbatch: Microbatch) -> None:
        if self.clock is not None and microbatch.timed:
            self.clock.begin(name, microbatch)
        for observer in self.others:
            observer.begin(name, microbatch)

    def end(self, name: str, microbatch: Microbatch) -> None:
        if self.clock is not None and microbatch.timed:
            self.clock.end(name, microbatch)
        for observer in self.others:
            observer.end(name, microbatch)

    def planned(self, microbatch: Microbatch, plan: AnyPlan) -> None:
        for observer in (self.clock, *self.others):
            if observer is not None:
                observer.planned(microbatch, plan)

    def sent(
        self, microbatch: Microbatch, what: str, nbytes: int, copies: int | Later | None
    ) -> None:
        for observer in (self.clock, *self.others):
            if observer is not None:
                observer.sent(microbatch, what, nbytes, copies)


class _Stage:
    """A stage while it lasts; one that fails has no end."""

    __slots__ = ("_microbatch", "_name", "_watch")

    def __init__(self, watch: Watch, name: str, microbatch: Microbatch) -> None:
        self._watch, self._name, self._microbatch = watch, name, microbatch

    def __enter__(self) -> None:
        self._watch.begin(self._name, self._microbatch)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._watch.end(self._name, self._microbatch)


class ObservedCopies:
    """Copies whose verbs are stages."""

    def __init__(self, copies: Copies, microbatch: Microbatch, watch: Watch) -> None:
        self._copies, self._microbatch, self._watch = copies, microbatch, watch
        self.num_homes, self.sms, self.kernels = copies.num_homes, copies.sms, copies.kernels
        self.possible = copies.possible
        self.served_rows, self.gradient_slots = copies.served_rows, copies.gradient_slots
        self.spans = copies.spans

    def _filling(self) -> Any:
        name = "weights again" if self._microbatch.back else "replicate"
        return self._watch.stage(name, self._microbatch)

    def __enter__(self) -> Self:
        with self._filling():
            self._copies.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._copies.__exit__(*error)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The copies; waits for them."""
        with self._filling():
            return self._copies.tensors()

    def reduce(self, homes: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
        """Stage 8."""
        with self._watch.stage("reduce", self._microbatch):
            self._copies.reduce(homes, own)

    def reduced(self) -> None:
        """Waits for stage 8."""
        with self._watch.stage("reduce", self._microbatch):
            self._copies.reduced()


class ObservedExchange:
    """An exchange whose verbs are stages, with the experts between them."""

    def __init__(self, exchange: Exchange, microbatch: Microbatch, watch: Watch) -> None:
        self._exchange, self._microbatch, self._watch = exchange, microbatch, watch
        self.offsets, self.begins = exchange.offsets, exchange.begins
        self._serving = ""  # the stage of the experts, while it lasts

    @property
    def slots(self) -> torch.Tensor:
        """[T, K] slot of every routed row."""
        return self._exchange.slots

    def returns(self) -> None:
        """Backward begins."""
        self._microbatch.back, self._microbatch.began = True, time.time()
        with self._watch.stage("combine back", self._microbatch):
            self._exchange.returns()

    def to_slots(self, *rows: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Stage 5, or the backward of stage 7."""
        back = self._microbatch.back
        with self._watch.stage("combine back" if back else "dispatch", self._microbatch):
            found = self._exchange.to_slots(*rows)
        self._serving = "experts back" if back else "experts"
        self._watch.begin(self._serving, self._microbatch)
        return found

    def to_tokens(self, *rows: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Stage 7, or the backward of stage 5."""
        if self._serving:
            self._watch.end(self._serving, self._microbatch)
        self._serving = ""
        back = self._microbatch.back
        with self._watch.stage("dispatch back" if back else "combine", self._microbatch):
            return self._exchange.to_tokens(*rows)


class _Spans:
    """The open stages of every microbatch; what is inside of another does not count for that."""

    def __init__(self, now: Callable[[], Any], took: Callable[..., None]) -> None:
        self._now, self._took = now, took
        self._open: WeakKeyDictionary[Microbatch, list[Any]] = WeakKeyDictionary()

    def begin(self, stage: str, microbatch: Microbatch) -> None:
        stack, now = self._open.setdefault(microbatch, []), self._now()
        if stack:
            self._took(microbatch, stack[-1][0], stack[-1][1], now)
        stack.append([stage, now])

    def end(self, stage: str, microbatch: Microbatch) -> None:
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

    def __init__(self, notebooks: Sequence[Notebook], rank: int) -> None:
        self._notebooks, self._rank = notebooks, rank
        self._spans = _Spans(time.perf_counter, self._took)
        self._plans: WeakKeyDictionary[Microbatch, Plan] = WeakKeyDictionary()

    def _took(self, microbatch: Microbatch, stage: str, since: float, now: float) -> None:
        self.took(microbatch, stage, now - since)

    def took(self, microbatch: Microbatch, stage: str, seconds: float) -> None:
        """Note the seconds of a stage."""
        for notebook in self._notebooks:
            notebook.took(microbatch, stage, seconds)

    def begin(self, stage: str, microbatch: Microbatch) -> None:
        self._spans.begin(stage, microbatch)

    def end(self, stage: str, microbatch: Microbatch) -> None:
        self._spans.end(stage, microbatch)
        self.passed(stage, microbatch, microbatch.began)

    def passed(self, stage: str, microbatch: Microbatch, began: float) -> None:
        """Note the end of a pass, if that was its last stage."""
        if stage in LAST_STAGES:
            for notebook in self._notebooks:
                notebook.passed(microbatch, began)

    def planned(self, microbatch: Microbatch, plan: AnyPlan) -> None:
        found = self._plans[microbatch] = plan.to_host()
        for notebook in self._notebooks:
            notebook.planned(microbatch, found)

    def sent(
        self, microbatch: Microbatch, what: str, nbytes: int, copies: int | Later | None
    ) -> None:
        if copies is None:
            plan = self._plans[microbatch]
            homes, hosts = plan.topology.home_of_expert[plan.replicas[:, 0]], plan.replicas[:, 1]
            copies = int(((homes if what == "weights" else hosts) == self._rank).sum())
        elif callable(copies):
            copies = copies()
        for notebook in self._notebooks:
            notebook.sent(microbatch, what, nbytes * copies, copies)

    def times(self, _step: int) -> bool:
        """Every microbatch."""
        return True

    def settle(self) -> None:
        """Nothing is left to be noted."""


class DeviceClock:
    """Seconds of a GPU, between events on its stream; notes come when the device has come so far.

    every: one microbatch in so many is timed, since events are work of the host: layers in turn.
    What a graph captures is not noted, and neither are its replays.
    """

    def __init__(self, notebooks: Sequence[Notebook], rank: int, every: int = 1) -> None:
        self._every = every
        self._notes = HostClock(notebooks, rank)
        self._spans = _Spans(_event, self._took)
        self._pending: deque[tuple[Any, list[Callable[[], None]]]] = deque()
        self._waiting: list[Callable[[], None]] = []  # notes that the next event is for

    def times(self, step: int) -> bool:
        """The first microbatch, and then as evenly as multiples of the golden section lie."""
        return ((step - 1) * GOLDEN & WORD - 1) * self._every < WORD

    def _took(self, microbatch: Microbatch, stage: str, since: Any, now: Any) -> None:
        def note() -> None:
            self._notes.took(microbatch, stage, since.elapsed_time(now) / 1000)

        self._waiting.append(note)
        self._attach(now)

    def begin(self, stage: str, microbatch: Microbatch) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        if stage in FIRST_STAGES:
            self._catch_up()
        self._spans.begin(stage, microbatch)

    def end(self, stage: str, microbatch: Microbatch) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        self._spans.end(stage, microbatch)
        if stage in LAST_STAGES:
            began = microbatch.began  # until then, backward may have begun
            self._waiting.append(lambda: self._notes.passed(stage, microbatch, began))

    def planned(self, microbatch: Microbatch, plan: AnyPlan) -> None:
        if not torch.cuda.is_current_stream_capturing():
            later = plan.later()
            self._waiting.append(lambda: self._notes.planned(microbatch, later()))

    def sent(
        self, microbatch: Microbatch, what: str, nbytes: int, copies: int | Later | None
    ) -> None:
        if not torch.cuda.is_current_stream_capturing():
            self._waiting.append(lambda: self._notes.sent(microbatch, what, nbytes, copies))

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

    def settle(self) -> None:
        """Note all that was seen; waits for the device."""
        if self._waiting:
            self._attach(_event())
        while self._pending:
            self._next()


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(torch.cuda.current_device()))
    return event


def clock_of(
    device: torch.device, notebooks: Sequence[Notebook], rank: int, *, recorded: bool
) -> Clock:
    """The clock of a data plane on that device."""
    if device.type != "cuda":
        return HostClock(notebooks, rank)
    return DeviceClock(notebooks, rank, 1 if recorded else TIMED)
