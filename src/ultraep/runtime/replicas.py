"""BaseReplicas: how the replicas of a microbatch borrow spare slots, the same on every data plane.

A data plane implements `_fill` (lend a buffer of slots and fill it) and `_slot_tensors`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

import torch

from ultraep.bundle import Bundle
from ultraep.errors import SlotError
from ultraep.microbatch import MicrobatchInfo
from ultraep.ops.modes import unseen
from ultraep.runtime.observe import Observers, staged


def in_backward() -> bool:
    """Whether autograd is running in this thread, so that a forward pass is a recomputation."""
    return _backward_pass() != -1


def _backward_pass() -> int:
    """Return the number of the backward pass that runs in this thread, or -1."""
    return torch._C._current_graph_task_id()


class LentInBackward:
    """The replicas of one rank that hold slots in a backward pass.

    A backward pass that raises does not return its slots. The next microbatch to need slots does.
    """

    def __init__(self) -> None:
        self._lent: list[tuple[int, BaseReplicas]] = []

    def add(self, replicas: BaseReplicas) -> None:
        """Remember replicas that have just borrowed slots, if a backward pass is running."""
        if in_backward():
            self._lent.append((_backward_pass(), replicas))

    def discard(self, replicas: BaseReplicas) -> None:
        """Forget replicas that have returned their slots."""
        self._lent = [(number, other) for number, other in self._lent if other is not replicas]

    def reclaim(self) -> None:
        """Return the slots of all backward passes except the one that is running."""
        for number, replicas in self._lent:
            if number != _backward_pass():
                replicas.__exit__(None, None, None)


class BaseReplicas(ABC):
    """The replicas of one microbatch; see `ultraep.microbatch.Replicas`.

    They hold their slots inside of a `with` block. Entering again, in backward, restores them.
    """

    def __init__(
        self, info: MicrobatchInfo, bundle: Bundle, observers: Observers, lent: LentInBackward
    ) -> None:
        self.info, self.bundle, self.observers = info, bundle, observers
        self._lent_in_backward = lent
        self._loan: ExitStack | None = None
        self._begun = False  # before the `with` block

    def __str__(self) -> str:
        return f"layer {self.info.layer} (step {self.info.step})"

    @unseen()
    @staged("replicate", "weights again")
    def __enter__(self) -> Self:
        if not self._begun:
            self.begin()
        self._begun = False
        return self

    def begin(self) -> None:
        """Borrow a buffer of slots and begin to fill it."""
        self._lent_in_backward.reclaim()
        with ExitStack() as loan:
            self._fill(loan)
            self._loan = loan.pop_all()
        self._lent_in_backward.add(self)

    def __exit__(self, *error: object) -> None:
        assert self._loan is not None, "left a block that was not entered"
        self._lent_in_backward.discard(self)
        self._loan.close()
        self._loan, self._begun = None, False

    @unseen()
    @staged("replicate", "weights again")
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
