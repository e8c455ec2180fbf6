"""Observers of a balancer: stages that begin and end, plans, bytes sent.

`staged` marks a method as a stage; observers are called when it begins and ends. Clocks
(`clocks.py`) are observers that pass host numbers to sinks.

Stages, forward and backward: `ultraep.trace.schema.STAGES`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from ultraep.dispatch import Moved
from ultraep.errors import CommunicationError, errors_at
from ultraep.microbatch import AnyPlan, MicrobatchInfo
from ultraep.plan import Plan
from ultraep.runtime.flight import NotingFailures

P = ParamSpec("P")
T = TypeVar("T")


class Observer(Protocol):
    """Called when something happens; stages may be nested."""

    def begin(self, stage: str, microbatch: MicrobatchInfo, /) -> None: ...

    def end(self, stage: str, microbatch: MicrobatchInfo, /) -> None: ...

    def planned(self, microbatch: MicrobatchInfo, plan: AnyPlan, /) -> None: ...

    def sent(
        self, microbatch: MicrobatchInfo, what: str, nbytes: int, copies: int | None, /
    ) -> None:
        """`weights` or `gradients` of some replicas, `nbytes` each; None: as planned."""


class Sink(Protocol):
    """Stores what clocks observe, as host numbers."""

    def planned(self, microbatch: MicrobatchInfo, plan: Plan, /) -> None: ...

    def took(self, microbatch: MicrobatchInfo, stage: str, seconds: float, /) -> None: ...

    def sent(self, microbatch: MicrobatchInfo, what: str, nbytes: int, copies: int, /) -> None: ...

    def passed(self, microbatch: MicrobatchInfo, start_time: float, /) -> None:
        """A forward or backward pass that began at this time may have ended."""


class Observed(Protocol):
    """An object whose verbs are stages of a microbatch."""

    @property
    def info(self) -> MicrobatchInfo: ...

    @property
    def observers(self) -> Sequence[Observer]: ...


Self = TypeVar("Self", bound=Observed)


def staged(
    forward: str, backward: str | None = None
) -> Callable[[Callable[Concatenate[Self, P], T]], Callable[Concatenate[Self, P], T]]:
    """Mark a method as a stage, with another name in backward if given.

    If the method raises, the stage does not end.
    """

    def decorate(verb: Callable[Concatenate[Self, P], T]) -> Callable[Concatenate[Self, P], T]:
        @wraps(verb)
        def observed(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> T:
            info, observers = self.info, self.observers
            stage = backward if backward is not None and info.in_backward else forward
            for observer in observers:
                observer.begin(stage, info)
            try:
                result = noted(self, *args, **kwargs)
            except CommunicationError as error:
                error.at(place_of(stage, info))
                raise
            for observer in observers:
                observer.end(stage, info)
            return result

        noted = notes_failures(verb)
        return observed

    return decorate


def place_of(stage: str, microbatch: MicrobatchInfo) -> str:
    """Return the place of a stage in the program, for errors."""
    return f"stage {stage!r} of layer {microbatch.layer} (step {microbatch.step})"


def notes_failures(
    verb: Callable[Concatenate[Self, P], T],
) -> Callable[Concatenate[Self, P], T]:
    """Write what the flight recorder has if the method raises."""

    @wraps(verb)
    def noted(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with NotingFailures(self.observers):
            return verb(self, *args, **kwargs)

    return noted


class BaseExchange(ABC):
    """The rows of a microbatch; see `ultraep.dispatch.Exchange`. Each move of rows is a stage.

    The stage of the experts lasts from one move to the next. A data plane implements `begins`,
    `_at_backward` (called when backward begins), `_to_slots` and `_to_tokens`.
    """

    offsets: torch.Tensor

    @property
    @abstractmethod
    def slots(self) -> torch.Tensor: ...

    def __init__(self, info: MicrobatchInfo, observers: Sequence[Observer]) -> None:
        self.info, self.observers = info, observers
        self._stage = ""  # that began last
        self._serving = ""  # the stage of the experts, while it lasts

    @abstractmethod
    def begins(self) -> list[int]: ...

    @abstractmethod
    def _at_backward(self) -> None: ...

    @abstractmethod
    def _to_slots(self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None) -> Moved: ...

    @abstractmethod
    def _to_tokens(self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None) -> Moved: ...

    @notes_failures
    def begin_backward(self) -> None:
        self.info.in_backward, self.info.start_time = True, time.time()
        self._begin("combine back")
        with self._place():
            self._at_backward()
        self._end("combine back")

    @notes_failures
    def to_slots(self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None) -> Moved:
        self.leave_tokens()
        with self._place():
            moved = self._to_slots(values_TD, scalars_TK)
        self.reach_slots()
        return moved

    @notes_failures
    def to_tokens(self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None) -> Moved:
        self.leave_slots()
        with self._place():
            moved = self._to_tokens(rows_AD, scalars_A)
        self.reach_tokens()
        return moved

    def leave_tokens(self) -> None:
        """Report that rows, or gradients, are about to move to the slots."""
        self._begin("combine back" if self.info.in_backward else "dispatch")

    def reach_slots(self) -> None:
        """Report that rows, or gradients, have moved to the slots; the experts begin."""
        back = self.info.in_backward
        self._end("combine back" if back else "dispatch")
        self._serving = "experts back" if back else "experts"
        self._begin(self._serving)

    def leave_slots(self) -> None:
        """Report that the experts have ended, and rows or gradients are about to move back."""
        if self._serving:
            self._end(self._serving)
        self._serving = ""
        self._begin("dispatch back" if self.info.in_backward else "combine")

    def reach_tokens(self) -> None:
        """Report that rows, or gradients, have moved back to the tokens."""
        self._end("dispatch back" if self.info.in_backward else "combine")

    def _place(self) -> AbstractContextManager[None]:
        """Name the current stage in errors of communication."""
        return errors_at(place_of(self._stage, self.info))

    def _begin(self, stage: str) -> None:
        self._stage = stage
        for observer in self.observers:
            observer.begin(stage, self.info)

    def _end(self, stage: str) -> None:
        for observer in self.observers:
            observer.end(stage, self.info)
