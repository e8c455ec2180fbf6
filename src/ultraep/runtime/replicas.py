"""BaseReplicas: how the replicas of a microbatch borrow spare slots, the same on every data plane.

A data plane implements `_fill` (lend a buffer of slots and fill it) and `_slot_tensors`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self
from weakref import ref

import torch

from ultraep.bundle import Bundle
from ultraep.errors import SlotError
from ultraep.microbatch import Foreseen, MicrobatchInfo
from ultraep.ops.modes import hidden
from ultraep.runtime.flight import note_failure
from ultraep.runtime.foresight import send_next
from ultraep.runtime.microbatch import NO_PASS, Shared, backward_pass
from ultraep.runtime.observe import Later, staged


class BaseReplicas(ABC):
    """The replicas of one microbatch; see `ultraep.microbatch.Replicas`.

    They hold their slots inside of a `with` block. Entering again, in backward, restores them. A
    backward pass that raises does not return its slots; the next microbatch to need slots does.
    """

    beside_experts = True  # whether the next replicas may travel while experts compute

    def __init__(self, shared: Shared, info: MicrobatchInfo, bundle: Bundle) -> None:
        self.info, self.bundle, self.observers = info, bundle, shared.observers
        self._shared, self._lent = shared, shared.lent_in_backward
        self._loan: ExitStack | None = None
        self.begun = False  # before the `with` block
        self._foreseen: Foreseen | None = None  # the layer, if its neighbours are known
        self._early: list[tuple[str, int, int | Later | None]] = []  # sent before a microbatch

    def __str__(self) -> str:
        return f"layer {self.info.layer} (step {self.info.step})"

    @hidden
    @staged("replicate", "weights again")
    def __enter__(self) -> Self:
        if not self.begun:
            self.begin()
        self.begun = False
        return self

    def begin_ahead(self) -> bool:
        """Begin to fill the slots before the `with` block, if a buffer is free; return whether.

        In backward, only in the buffer that forward used: autograd has saved views of it.
        """
        if self._loan is None and self._buffer_is_free():
            self.begun = True
            self.begin(ahead=True)
        return self.begun

    def take_over(self, info: MicrobatchInfo, bundle: Bundle, foreseen: Foreseen) -> None:
        """Belong to this microbatch from now on, and send the replicas of its neighbours."""
        self.info, self.bundle, self._foreseen = info, bundle, foreseen
        foreseen.ahead, foreseen.last = None, ref(self)
        early, self._early = self._early, []
        for sent in early:
            self._sent(*sent)

    def begin(self, *, ahead: bool = False) -> None:
        """Borrow a buffer of slots and begin to fill it.

        ahead: while another layer computes; `tensors` waits for the weights.
        """
        current = backward_pass()
        for replicas in [other for other, number in self._lent.items() if number != current]:
            replicas.give_back()
        with ExitStack() as loan:
            self._fill(loan, ahead=ahead)
            self._loan = loan.pop_all()
        if current != NO_PASS:
            self._lent[self] = current

    def __exit__(self, *error: Any) -> None:
        note_failure(self.observers, error[1])
        self.give_back()
        if not self.beside_experts and self._foreseen is not None and not any(error):
            send_next(self._foreseen, self.info)

    def give_back(self) -> None:
        """Return the slots."""
        assert self._loan is not None, "left a block that was not entered"
        self._lent.pop(self, None)
        self._loan.close()
        self._loan, self.begun = None, False

    @hidden
    @staged("replicate", "weights again")
    def tensors(self) -> dict[str, torch.Tensor]:
        if self._loan is None:
            raise SlotError(
                f"the replicas of {self} are in their slots only inside their `with` block"
            )
        tensors = self._slot_tensors()
        if self.beside_experts and self._foreseen is not None:
            send_next(self._foreseen, self.info)
        return tensors

    def _sent(self, what: str, nbytes: int, copies: int | Later | None) -> None:
        if self._foreseen is None and self.begun:  # no microbatch has these replicas yet
            self._early.append((what, nbytes, copies))
            return
        for observer in self.observers:
            observer.sent(self.info, what, nbytes, copies)

    @abstractmethod
    def _fill(self, loan: ExitStack, *, ahead: bool) -> None:
        """Borrow a buffer of slots until the loan is closed, and begin to fill it."""

    @abstractmethod
    def _buffer_is_free(self) -> bool:
        """Whether the last buffer of these replicas can be borrowed, or any if they had none."""

    @abstractmethod
    def _slot_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors in the slots of this rank, once they are filled."""


def no_free_slots(borrower: str, borrowers: Sequence[str | None]) -> SlotError:
    """Return the error for a microbatch that needs slots while all buffers are lent."""
    return SlotError(
        f"{borrower} needs spare slots, but all {len(borrowers)} buffers are lent to "
        f"{', '.join(map(str, borrowers))}: finish those microbatches first, or pass a larger "
        "in_flight= to the balancer"
    )
