"""BaseReplicas: how the replicas of a microbatch borrow spare slots, the same on every data plane.

A data plane implements `_fill` (lend a buffer of slots and fill it) and `_slot_tensors`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch

from ultraep.bundle import Bundle
from ultraep.errors import SlotError
from ultraep.ops.modes import outside_dispatch_modes
from ultraep.passes import Passes, note_failure
from ultraep.runtime.microbatch import NO_PASS, Context, backward_pass


class BaseReplicas(ABC):
    """The replicas of one microbatch; see `ultraep.microbatch.Replicas`.

    They hold their slots inside of a `with` block. Entering again, in backward, restores them. A
    backward pass that raises does not return its slots; the next microbatch to need slots does.
    """

    def __init__(self, context: Context, passes: Passes, bundle: Bundle) -> None:
        self.passes, self.bundle = passes, bundle
        self._context, self._lent = context, context.lent_in_backward
        self._loan: ExitStack | None = None
        self.begun = False  # before the `with` block

    def __str__(self) -> str:
        return f"layer {self.passes.layer} (step {self.passes.step})"

    @outside_dispatch_modes
    def __enter__(self) -> Self:
        record = self.passes.record
        record.at("replicate", "weights again")
        if not self.begun:
            self.begin()
        self.begun = False
        if record.backward:
            record.at("experts back")
        return self

    def begin(self) -> None:
        """Borrow a buffer of slots and begin to fill it."""
        current = backward_pass()
        for replicas, number in tuple(self._lent.items()):
            if number != current:
                replicas.give_back()
        with ExitStack() as loan:
            self._fill(loan)
            self._loan = loan.pop_all()
        if current != NO_PASS:
            self._lent[self] = current

    def __exit__(self, *error: Any) -> None:
        if error[1] is not None:
            note_failure(error[1])
        self.give_back()

    def give_back(self) -> None:
        """Return the slots."""
        assert self._loan is not None, "left a block that was not entered"
        self._lent.pop(self, None)
        self._loan.close()
        self._loan, self.begun = None, False

    @outside_dispatch_modes
    def tensors(self) -> dict[str, torch.Tensor]:
        if self._loan is None:
            raise SlotError(
                f"the replicas of {self} are in their slots only inside their `with` block"
            )
        return self._slot_tensors()

    @abstractmethod
    def _fill(self, loan: ExitStack) -> None:
        """Borrow a buffer of slots until the loan is closed, and begin to fill it."""

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
