"""Replicas: the replicas of a microbatch in spare slots, the base of those of every data plane.

Shapes: H home experts of this rank, A rows that it serves, D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch

from ultraep.bundle import Bundle, Stack
from ultraep.errors import SlotError
from ultraep.ops.modes import outside_dispatch_modes
from ultraep.ops.products import Beside
from ultraep.passes import Passes, note_failure
from ultraep.position import moment

TensorSpecs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype, by name
NO_PASS = -1


def backward_pass() -> int:
    """Return the number of the backward pass that runs in this thread, or `NO_PASS`."""
    return torch._C._current_graph_task_id()


class Replicas(ABC):
    """The replicas of a plan in the slots of this rank, valid inside a `with` block.

    Entering starts to fill the slots; `tensors` waits until they are filled. After the block, other
    microbatches may overwrite the slots. Entering again in backward refills them if necessary, in
    the same memory unless another microbatch holds it. A backward pass that raises does not return
    its slots; the next microbatch to need slots does.

    lent: replicas of the balancer that hold slots in a backward pass, with its number.
    bundle: the weights of the home experts of this rank.
    """

    num_homes: int
    possible: bool  # whether this microbatch may have replicas; a device plan may still have none
    kernels: bool  # whether Triton kernels can run on the rows of this microbatch

    def __init__(self, lent: dict[Replicas, int], passes: Passes, bundle: Bundle) -> None:
        self._lent, self.passes, self.bundle = lent, passes, bundle
        self._loan: ExitStack | None = None
        self.begun = False  # before the `with` block

    def __str__(self) -> str:
        passes = self.passes
        return f"layer {passes.layer} ({moment(passes.step, passes.microbatch)})"

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

    def begin_again(self) -> None:  # noqa: B027 - messages fill the slots when they are entered
        """Begin to fill the slots for backward beside other work, if forward used them."""

    def __exit__(self, *error: Any) -> None:
        if error[1] is not None:
            note_failure(error[1])
        self.give_back()

    def give_back(self) -> None:
        assert self._loan is not None, "left a block that was not entered"
        self._lent.pop(self, None)
        self._loan.close()
        self._loan, self.begun = None, False

    @outside_dispatch_modes
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return `[slots, ...]` for every tensor of the bundle; raises outside of the block."""
        if self._loan is None:
            raise SlotError(
                f"the replicas of {self} are in their slots only inside their `with` block"
            )
        return self._slot_tensors()

    @abstractmethod
    def served_rows(self, like_AD: torch.Tensor) -> torch.Tensor | None:
        """Return `[A, D]` memory that other ranks read outputs from; None: use any memory."""

    @abstractmethod
    def gradient_slots(self, specs: TensorSpecs) -> dict[str, torch.Tensor]:
        """Return `[slots, ...]` memory for the gradients of replicas, not cleared."""

    @abstractmethod
    def spans(self) -> torch.Tensor:
        """Return `[H, 2]` first and end of each home expert's replicas in the plan, for kernels."""

    @abstractmethod
    def reduce(
        self,
        homes: Mapping[str, Stack],
        own: Mapping[str, torch.Tensor] | None = None,
        *,
        beside: bool = False,
    ) -> Beside | None:
        """Stage 8: start to add the gradients of all replicas to the home gradients.

        homes: `[H, ...]` or H tensors, for the names last passed to `gradient_slots`.
        own: gradients that home experts with replicas computed; None: they are in `homes`.
        beside: run the reduction next to the following product, which leaves it the returned
            number of GPU programs.
        """

    @abstractmethod
    def reduced(self) -> None:
        """Wait until `reduce` has finished."""

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
