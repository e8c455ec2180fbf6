"""Stages 5 and 7: send every token to the ranks that serve it, and sum their outputs.

Rows arrive grouped by slot. Outputs are already multiplied by their gates. Their sum runs over the
choices of a token in router order, on the token's own rank, so it does not depend on the plan.

The data plane moves the rows, by messages or through mapped memory. Autograd sees two functions. A
`Dispatcher` of another library can move them instead: `Balancer(dispatcher=...)`.

Shapes: T tokens, K experts per token, A arrived rows, L slots of this rank, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import torch

from ultraep.ops.modes import outside_dispatch_modes
from ultraep.ops.recompute import Gradients, first_order, run, save
from ultraep.passes import Passes

Pack: TypeAlias = Callable[[torch.Tensor], torch.Tensor]  # [T, D] -> [T, bytes]
Moved: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]  # rows, and a scalar for each


class RowMover(Protocol):
    """Moves the rows of one microbatch from tokens to slots and back, in forward and backward.

    Each direction is the gradient of the other. A row may carry a scalar, which is not summed.
    """

    def to_slots(self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None) -> Moved:
        """Return `[A, D]` one row per choice of each token and its `[A]` scalar, in slot order."""

    def to_tokens(self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None) -> Moved:
        """Return `[T, D]` the rows of each token, summed in router order, and `[T, K]` scalars.

        Padding yields zeros.
        """

    def begin_backward(self) -> None:
        """Called when backward begins, before its first row moves."""


class Exchange(RowMover, Protocol):
    """A `RowMover` of a data plane, with the slots of its rows; marks the stages of passes."""

    @property
    def passes(self) -> Passes: ...

    @property
    def offsets(self) -> torch.Tensor:
        """[L + 1] first row of each slot, int32, on the device of the rows."""

    @property
    def slots(self) -> torch.Tensor:
        """[T, K] global slot of every routed row; -1: padding."""

    def begins(self) -> list[int]:
        """Return `offsets` on the host; may wait for the device."""


@dataclass(frozen=True, eq=False)
class SlotRoutes:
    """The slots of the rows of one microbatch, for a dispatcher.

    Every rank has the same number of slots, L: home slots, spare slots, then unused ones on ranks
    with fewer home experts. Slot `i` of a rank has the id `rank * L + i`, so a dispatcher sees
    `ranks * L` experts.
    """

    slots: torch.Tensor  # [T, K] int64, slot id of every routed row; -1: padding
    offsets: torch.Tensor  # [L + 1] int32, first row of each slot of this rank; the last: A
    begins: Callable[[], list[int]]  # returns `offsets` on the host; may wait for the device
    rank: int
    ranks: int
    slots_per_rank: int  # L

    @property
    def num_slots(self) -> int:
        """Slots of all ranks: the number of experts for a dispatcher."""
        return self.ranks * self.slots_per_rank

    def counts(self) -> list[int]:
        """Return how many rows each slot of this rank gets by the plan; may wait for the device."""
        return [end - begin for begin, end in pairwise(self.begins())]


@dataclass(frozen=True, eq=False)
class Received:
    """The rows that a dispatcher delivered to this rank: ordered by slot, without gaps.

    Inside of a slot, rows may have any order. Rows after the last planned row are unused.
    """

    rows: torch.Tensor  # [A, D], differentiable
    gates: torch.Tensor  # [A] gate of each row, differentiable
    counts: Sequence[int] | torch.Tensor  # [L] rows of each slot, as the dispatcher counted them
    state: Any = None  # what `combine` needs: a handle, or any other object


class Dispatcher(Protocol):
    """Moves the rows of all microbatches of a rank, in place of the data plane.

    Both methods are collective and differentiable. The balancer compares the counts with its plan.
    A method `check_slots(ranks, slots_per_rank)` is optional: the balancer calls it when created.
    So are the attributes `max_tokens`, `ordered` and `padding`: docs/dispatchers.md.
    For a library without autograd, derive from `ultraep.dispatchers.RawDispatcher`.
    """

    def dispatch(
        self, tokens_TD: torch.Tensor, gates_TK: torch.Tensor, routes: SlotRoutes
    ) -> Received:
        """Send every token to its slots, each row with its gate."""

    def combine(self, outputs_AD: torch.Tensor, received: Received) -> torch.Tensor:
        """Return `[T, D]` the sum of the outputs of each token; padding contributes nothing.

        outputs_AD: one row for each received row, already multiplied by its gate.
        received: the result of `dispatch` for the same microbatch.
        """


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Rows received from all ranks, ordered by slot, then by source rank.

    On a device the tensors may be longer than the rows received: rows from `offsets[L]` on are
    unused.
    """

    rows: torch.Tensor  # [A, D]
    gates: torch.Tensor  # [A] factor of each output
    exchange: Exchange
    packed: torch.Tensor | None = None  # [A, bytes] as sent; `rows` then has no values

    @property
    def offsets(self) -> torch.Tensor:
        """[L + 1] first row of each slot."""
        return self.exchange.offsets

    def begins(self) -> list[int]:
        """Return `offsets` on the host; may wait for the device."""
        return self.exchange.begins()


def dispatch(
    tokens_TD: torch.Tensor, gates_TK: torch.Tensor, exchange: Exchange, pack: Pack | None = None
) -> Arrivals:
    """Send every token to the slots that serve it, with the gates of its choices.

    pack: converts rows to bytes before sending; gradients travel unpacked.
    """
    rows_AD, gates_A, packed = send(tokens_TD, gates_TK, exchange, pack)
    return Arrivals(rows_AD, gates_A, exchange, packed)


def send(
    tokens_TD: torch.Tensor, gates_TK: torch.Tensor, mover: RowMover, pack: Pack | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the rows and gates that arrive at the slots of this rank, and their packed bytes."""
    sent: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
    sent = run(_Dispatch, tokens_TD, gates_TK, mover, pack)
    return sent


def combine(outputs_AD: torch.Tensor, mover: RowMover) -> torch.Tensor:
    """Return the `[T, D]` outputs of this rank's tokens. Padding contributes nothing."""
    y_TD: torch.Tensor = run(_Combine, outputs_AD, mover)
    return y_TD


class _Dispatch(torch.autograd.Function):
    """Sends rows and gates to the slots and, in backward, their gradients to the tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens_TD: torch.Tensor,
        gates_TK: torch.Tensor,
        mover: RowMover,
        pack: Pack | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        save(ctx, mover)
        packed = None
        with outside_dispatch_modes():
            if pack is None:
                rows_AD, gates_A = mover.to_slots(tokens_TD, gates_TK)
            else:
                packed, gates_A = mover.to_slots(pack(tokens_TD), gates_TK)
                rows_AD = tokens_TD.new_empty(()).expand(len(packed), tokens_TD.shape[1])
        assert gates_A is not None
        fixed = [] if ctx.needs_input_grad[1] else [gates_A]
        ctx.mark_non_differentiable(*fixed, *([] if packed is None else [packed]))
        return rows_AD, gates_A, packed

    @staticmethod
    @first_order
    def backward(ctx: Any, mover: RowMover, gradients: Gradients, _: Any) -> Gradients:
        d_rows_AD, d_gates_A, _ = gradients
        assert d_rows_AD is not None
        if not ctx.needs_input_grad[1]:
            d_gates_A = None
        return *mover.to_tokens(d_rows_AD, d_gates_A), None, None


class _Combine(torch.autograd.Function):
    """Sends outputs to the tokens and, in backward, their gradients to the slots."""

    @staticmethod
    def forward(ctx: Any, outputs_AD: torch.Tensor, mover: RowMover) -> torch.Tensor:
        ctx.num_rows = len(outputs_AD)
        save(ctx, mover)  # unpacking this starts the recomputation of a checkpoint
        with outside_dispatch_modes():
            y_TD, _ = mover.to_tokens(outputs_AD, None)
        return y_TD

    @staticmethod
    @first_order
    def backward(ctx: Any, mover: RowMover, gradients: Gradients, _: Any) -> Gradients:
        mover.begin_backward()
        assert gradients[0] is not None
        d_outputs_AD, _ = mover.to_slots(gradients[0], None)
        return d_outputs_AD[: ctx.num_rows], None
