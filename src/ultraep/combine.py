"""Stage 7: expert outputs -> tokens, the sum at the token's own rank.

The outputs are multiplied by their gates already. The sum runs over a token's choices in their
order, whatever slots served them: the result does not depend on the plan.

Shapes: T tokens, A arrived rows, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ultraep.modes import unseen
from ultraep.plane import Exchange


def combine(outputs_AD: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """[T, D] outputs of the tokens of this rank. Padding adds nothing."""
    y_TD: torch.Tensor = _Combine.apply(outputs_AD, exchange)  # type: ignore[no-untyped-call]
    return y_TD


class _Combine(torch.autograd.Function):
    """Outputs travel to the tokens; their gradients travel to the slots."""

    @staticmethod
    def forward(ctx: Any, outputs_AD: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange, ctx.num_rows = exchange, len(outputs_AD)
        ctx.save_for_backward(outputs_AD.new_empty(0))
        with unseen():
            y_TD, _ = exchange.to_tokens(outputs_AD, None)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert ctx.saved_tensors  # where forward is to be computed again, that happens here, first
        ctx.exchange.returns()
        d_outputs_AD, _ = ctx.exchange.to_slots(gradients[0], None)
        return d_outputs_AD[: ctx.num_rows], None
