"""Stage 7: expert outputs -> tokens, the sum at the token's own rank.

The outputs carry the weights of the router already. The sum runs over a token's choices in their
order, whatever slots served them: the result does not depend on the plan.

Shapes: T tokens, A arrived rows, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ultraep.dispatch import Roads
from ultraep.modes import unseen


def combine(outputs_AD: torch.Tensor, roads: Roads) -> torch.Tensor:
    """[T, D] outputs of the tokens of this rank. Padding adds nothing."""
    y_TD: torch.Tensor = _Combine.apply(outputs_AD, roads)  # type: ignore[no-untyped-call]
    return y_TD


class _Combine(torch.autograd.Function):
    """Outputs travel to the tokens; their gradients travel to the slots."""

    @staticmethod
    def forward(ctx: Any, outputs_AD: torch.Tensor, roads: Roads) -> torch.Tensor:
        ctx.roads = roads
        ctx.save_for_backward(outputs_AD.new_empty(0))
        with unseen():
            y_TD, _ = roads.to_tokens(outputs_AD, None)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert ctx.saved_tensors  # where forward is to be computed again, that happens here, first
        ctx.roads.on_return()
        d_outputs_AD, _ = ctx.roads.to_slots(gradients[0], None)
        return d_outputs_AD, None
