"""Stage 5: send every token to the ranks that serve it; rows arrive grouped by slot.

The data plane moves the rows, by messages or through mapped memory. Autograd sees one function.

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
Moved: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]  # rows, and a scalar for each


class Exchange(Protocol):
    """Moves the rows of one microbatch from tokens to slots and back, in forward and backward.

    Each direction is the gradient of the other. A row may carry a scalar, which is not summed.
    """

    @property
    def offsets(self) -> torch.Tensor:
        """[L + 1] first row of each slot, int32, on the device of the rows."""

    @property
    def slots(self) -> torch.Tensor:
        """[T, K] global slot of every routed row; -1: padding."""

    def begins(self) -> list[int]:
        """Return `offsets` on the host; may wait for the device."""

    def to_slots(self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None) -> Moved:
        """Return `[A, D]` one row per choice of each token and its `[A]` scalar, in slot order."""

    def to_tokens(self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None) -> Moved:
        """Return `[T, D]` the rows of each token, summed in router order, and `[T, K]` scalars.

        Padding yields zeros.
        """

    def begin_backward(self) -> None:
        """Called when backward begins, before its first row moves."""


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
    rows_AD, gates_A, packed = _Dispatch.apply(tokens_TD, gates_TK, exchange, pack)  # type: ignore[no-untyped-call]
    return Arrivals(rows_AD, gates_A, exchange, packed)


class _Dispatch(torch.autograd.Function):
    """Sends rows and gates to the slots and, in backward, their gradients to the tokens."""

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
        if not ctx.needs_input_grad[1]:
            d_gates_A = None
        return *exchange.to_tokens(d_rows_AD, d_gates_A), None, None
