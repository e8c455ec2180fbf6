"""Stage 7: sum the expert outputs of each token on the token's own rank.

The outputs are already multiplied by their gates. The sum runs over a token's choices in router
order, whichever slots served them, so the result does not depend on the plan.

Shapes: T tokens, A arrived rows, D model width.
"""

from __future__ import annotations

from typing import Any

import torch

from ultraep.dispatch import Exchange
from ultraep.ops.modes import unseen
from ultraep.ops.recompute import Gradients, first_order, save


def combine(outputs_AD: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Return the `[T, D]` outputs of this rank's tokens. Padding contributes nothing."""
    y_TD: torch.Tensor = _Combine.apply(outputs_AD, exchange)  # type: ignore[no-untyped-call]
    return y_TD


class _Combine(torch.autograd.Function):
    """Sends outputs to the tokens and, in backward, their gradients to the slots."""

    @staticmethod
    def forward(ctx: Any, outputs_AD: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.num_rows = len(outputs_AD)
        save(ctx, exchange)  # unpacking this starts the recomputation of a checkpoint
        with unseen():
            y_TD, _ = exchange.to_tokens(outputs_AD, None)
        return y_TD

    @staticmethod
    @first_order
    def backward(ctx: Any, exchange: Exchange, gradients: Gradients, _: Any) -> Gradients:
        exchange.begin_backward()
        assert gradients[0] is not None
        d_outputs_AD, _ = exchange.to_slots(gradients[0], None)
        return d_outputs_AD[: ctx.num_rows], None
