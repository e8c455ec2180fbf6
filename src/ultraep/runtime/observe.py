"""What is seen of a balancer from outside: stages that begin and end, plans, bytes.

A balancer tells its observers; verbs hold no timers. Clocks are observers that hand numbers of the
host to notebooks (`Stats`, `Recording`). Benchmarks bring observers of their own.

Stages, forward and backward: `ultraep.trace.schema.STAGES`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, Self, TypeAlias

import torch

from ultraep.ops.products import Beside
from ultraep.plan import Plan
from ultraep.plane import AnyPlan, Copies, Exchange, Microbatch

Later: TypeAlias = Callable[[], int]  # a number that a device will know


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

    def begin_step(self, step: int, /) -> None:
        """Note all that was seen; what a device does from now on is of this step."""

    def settle(self) -> None:
        """Note all that was seen, and of replays what has come."""

    def finish(self) -> None:
        """Note everything; waits for the device."""


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

    def reduce(
        self,
        homes: Mapping[str, Any],
        own: Mapping[str, Any] | None = None,
        *,
        beside: bool = False,
    ) -> Beside | None:
        """Stage 8."""
        with self._watch.stage("reduce", self._microbatch):
            return self._copies.reduce(homes, own, beside=beside)

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
