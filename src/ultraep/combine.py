"""Stage 7: expert outputs -> tokens, the sum at the token's own rank.

The outputs are multiplied by their gates already. The sum runs over a token's choices in their
order, whatever slots served them: the result does not depend on the plan.

Shapes: T tokens, A arrived rows, D model width.
"""

from __future__ import annotations

from typing import Any

import torch

from ultraep.dispatch import Exchange
from ultraep.ops.modes import unseen
from ultraep.ops.recompute import Gradients, first_order, save


def combine(outputs_AD: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """[T, D] outputs of the tokens of this rank. Padding adds nothing."""
    y_TD: torch.Tensor = _Combine.apply(outputs_AD, exchange)  # type: ignore[no-untyped-call]
    return y_TD


class _Combine(torch.autograd.Function):
    """Outputs travel to the tokens; their gradients travel to the slots."""

    @staticmethod
    def forward(ctx: Any, outputs_AD: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.num_rows = len(outputs_AD)
        save(ctx, exchange)  # the recomputation of a checkpoint begins where this is needed
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
