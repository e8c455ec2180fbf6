"""What a balancer reports: stages that begin and end, plans, bytes sent.

Verbs hold no timers: `staged` marks a method as a stage, and observers are called when it begins
and ends. Clocks are observers that pass numbers of the host to sinks (`Stats`, `Recording`).

Stages, forward and backward: `ultraep.trace.schema.STAGES`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

import torch

from ultraep.dispatch import Rows
from ultraep.microbatch import AnyPlan, MicrobatchInfo
from ultraep.plan import Plan

Later: TypeAlias = Callable[[], int]  # a number that a device will know
P = ParamSpec("P")
T = TypeVar("T")


class Observer(Protocol):
    """Called when something happens; stages may be inside of others."""

    def begin(self, stage: str, microbatch: MicrobatchInfo, /) -> None: ...

    def end(self, stage: str, microbatch: MicrobatchInfo, /) -> None: ...

    def planned(self, microbatch: MicrobatchInfo, plan: AnyPlan, /) -> None: ...

    def sent(
        self, microbatch: MicrobatchInfo, what: str, nbytes: int, copies: int | Later | None, /
    ) -> None:
        """`weights` or `gradients` of so many replicas, `nbytes` each; None: as planned."""


class Clock(Observer, Protocol):
    """The observer of a data plane, which passes what it observes to sinks."""

    def times(self, step: int, /) -> bool:
        """Whether stages of that microbatch are timed."""

    def begin_step(self, step: int, /) -> None:
        """Flush; what a device does from now on belongs to this step."""

    def settle(self) -> None:
        """Pass on everything observed, and the replays that have arrived."""

    def finish(self) -> None:
        """Pass on everything; waits for the device."""


class Sink(Protocol):
    """Stores what clocks observe, in numbers of the host."""

    def planned(self, microbatch: MicrobatchInfo, plan: Plan, /) -> None: ...

    def took(self, microbatch: MicrobatchInfo, stage: str, seconds: float, /) -> None: ...

    def sent(self, microbatch: MicrobatchInfo, what: str, nbytes: int, copies: int, /) -> None: ...

    def passed(self, microbatch: MicrobatchInfo, began: float, /) -> None:
        """The microbatch may have left the layer, in a pass that began then."""


class Observers:
    """All observers of a data plane: its clock, and those that users added to the balancer."""

    def __init__(self, clock: Clock | None, added: list[Observer]) -> None:
        self.clock, self._added, self._silent = clock, added, False

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """What happens in this block is not observed."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def begin(self, stage: str, microbatch: MicrobatchInfo) -> None:
        for observer in self._all(timed=microbatch.timed):
            observer.begin(stage, microbatch)

    def end(self, stage: str, microbatch: MicrobatchInfo) -> None:
        for observer in self._all(timed=microbatch.timed):
            observer.end(stage, microbatch)

    def planned(self, microbatch: MicrobatchInfo, plan: AnyPlan) -> None:
        for observer in self._all():
            observer.planned(microbatch, plan)

    def sent(
        self, microbatch: MicrobatchInfo, what: str, nbytes: int, copies: int | Later | None
    ) -> None:
        for observer in self._all():
            observer.sent(microbatch, what, nbytes, copies)

    def _all(self, *, timed: bool = True) -> list[Observer]:
        """All observers; without the clock for stages that it does not time."""
        if self._silent:
            return []
        return [self.clock, *self._added] if timed and self.clock is not None else self._added


class Observed(Protocol):
    """An object whose verbs are stages of a microbatch."""

    @property
    def info(self) -> MicrobatchInfo: ...

    @property
    def observers(self) -> Observers: ...


Self = TypeVar("Self", bound=Observed)


def staged(
    forward: str, backward: str | None = None
) -> Callable[[Callable[Concatenate[Self, P], T]], Callable[Concatenate[Self, P], T]]:
    """Mark a method as a stage, perhaps with another name in backward. If it raises, it has no end.

    The name is chosen when the method is called.
    """

    def decorate(verb: Callable[Concatenate[Self, P], T]) -> Callable[Concatenate[Self, P], T]:
        @wraps(verb)
        def observed(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> T:
            info, observers = self.info, self.observers
            stage = backward if backward is not None and info.back else forward
            observers.begin(stage, info)
            result = verb(self, *args, **kwargs)
            observers.end(stage, info)
            return result

        return observed

    return decorate


class ObservedExchange:
    """The rows of a microbatch whose moves are stages, with the experts between them.

    at_backward: called when backward begins.
    """

    def __init__(
        self,
        rows: Rows,
        info: MicrobatchInfo,
        observers: Observers,
        at_backward: Callable[[], None],
    ) -> None:
        self._rows, self._at_backward = rows, at_backward
        self.info, self.observers = info, observers
        self.offsets, self.begins = rows.offsets, rows.begins
        self._serving = ""  # the stage of the experts, while it lasts

    @property
    def slots(self) -> torch.Tensor:
        """[T, K] slot of every routed row."""
        return self._rows.slots

    def begin_backward(self) -> None:
        """Backward begins."""
        self.info.back, self.info.began = True, time.time()
        self._meet()

    @staged("combine back")
    def _meet(self) -> None:
        self._at_backward()

    def to_slots(
        self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Stage 5, or the backward of stage 7; then the experts begin."""
        moved = self._to_slots(values_TD, scalars_TK)
        self._serving = "experts back" if self.info.back else "experts"
        self.observers.begin(self._serving, self.info)
        return moved

    def to_tokens(
        self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The experts end; stage 7, or the backward of stage 5."""
        if self._serving:
            self.observers.end(self._serving, self.info)
        self._serving = ""
        return self._to_tokens(rows_AD, scalars_A)

    @staged("dispatch", "combine back")
    def _to_slots(
        self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._rows.to_slots(values_TD, scalars_TK)

    @staged("combine", "dispatch back")
    def _to_tokens(
        self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._rows.to_tokens(rows_AD, scalars_A)
