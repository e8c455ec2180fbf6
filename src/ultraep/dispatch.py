"""Stage 5: tokens -> Arrivals, rows at the rank that serves them, grouped by slot.

A data plane moves the rows, by messages or through mapped memory. Autograd sees one function.

Shapes: T tokens, K experts per token, A arrived rows, L slots of this rank, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from ultraep.ops.modes import unseen
from ultraep.ops.recompute import Gradients, first_order, save

Pack: TypeAlias = Callable[[torch.Tensor], torch.Tensor]  # [T, D] -> [T, bytes]


class Rows(Protocol):
    """Moves the rows of one microbatch between tokens and slots, both ways.

    Each way is the gradient of the other. A row may carry a scalar, which is not summed.
    """

    @property
    def offsets(self) -> torch.Tensor:
        """[L + 1] where the rows of each slot begin, as int32 where the rows are."""

    @property
    def slots(self) -> torch.Tensor:
        """[T, K] slot of every routed row, counted over all ranks; -1: padding."""

    def begins(self) -> list[int]:
        """The offsets on the host; may wait for a device."""

    def to_slots(
        self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[A, D] a row for each choice of every token, and `[A]` its scalar, in slot order."""

    def to_tokens(
        self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, D] the rows of each token, summed in the order of its choices; `[T, K]` scalars.

        Padding, which was not sent, is zero.
        """


class Exchange(Rows, Protocol):
    """The rows of one microbatch until the end of its backward pass."""

    def begin_backward(self) -> None:
        """Backward begins; called before its first row moves."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Rows that came from all ranks, those of one slot together, in the order of their sources.

    On a device there may be more rows than have arrived: rows from `offsets[L]` on are unused.
    """

    rows: torch.Tensor  # [A, D]
    gates: torch.Tensor  # [A] factors of their outputs
    exchange: Exchange
    packed: torch.Tensor | None = None  # [A, bytes] as they arrived; `rows` then has no values

    @property
    def offsets(self) -> torch.Tensor:
        """[L + 1] where the rows of each slot begin."""
        return self.exchange.offsets

    def begins(self) -> list[int]:
        """The offsets on the host; may wait for a device."""
        return self.exchange.begins()


def dispatch(
    tokens_TD: torch.Tensor, gates_TK: torch.Tensor, exchange: Exchange, pack: Pack | None = None
) -> Arrivals:
    """Send every token to the slots that serve it, with the gates of its choices.

    pack: turns rows into bytes, which travel in their place; gradients come back as rows.
    """
    rows_AD, gates_A, packed = _Dispatch.apply(tokens_TD, gates_TK, exchange, pack)  # type: ignore[no-untyped-call]
    return Arrivals(rows_AD, gates_A, exchange, packed)


class _Dispatch(torch.autograd.Function):
    """Rows and gates travel to the slots; their gradients travel to the tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens_TD: torch.Tensor,
        gates_TK: torch.Tensor,
        exchange: Exchange,
        pack: Pack | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        save(ctx, exchange)
        packed = None
        with unseen():
            if pack is None:
                rows_AD, gates_A = exchange.to_slots(tokens_TD, gates_TK)
            else:
                packed, gates_A = exchange.to_slots(pack(tokens_TD), gates_TK)
                rows_AD = tokens_TD.new_empty(()).expand(len(packed), tokens_TD.shape[1])
        assert gates_A is not None
        fixed = [] if ctx.needs_input_grad[1] else [gates_A]
        ctx.mark_non_differentiable(*fixed, *([] if packed is None else [packed]))
        return rows_AD, gates_A, packed

    @staticmethod
    @first_order
    def backward(ctx: Any, exchange: Exchange, gradients: Gradients, _: Any) -> Gradients:
        d_rows_AD, d_gates_A, _ = gradients
        assert d_rows_AD is not None
        learns = ctx.needs_input_grad[1]
        return *exchange.to_tokens(d_rows_AD, d_gates_A if learns else None), None, None
