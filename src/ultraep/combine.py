"""Stage 7: expert outputs -> tokens, the weighted sum at the token's own rank.

The sum runs over a token's choices in their order, whatever slots served them: the result does not
depend on the plan.

Shapes: T tokens, K experts per token, A arrived rows, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ultraep.arrays import PADDING
from ultraep.dispatch import Roads


def combine(outputs_AD: torch.Tensor, weights_TK: torch.Tensor, roads: Roads) -> torch.Tensor:
    """[T, D] outputs of the tokens of this rank. Padding adds nothing, whatever its weight."""
    if roads.routes.has_padding:
        weights_TK = weights_TK.masked_fill(roads.routes.slots == PADDING, 0)
    rows_ND: torch.Tensor = _ToTokens.apply(outputs_AD, roads)  # type: ignore[no-untyped-call]
    rows_TKD = rows_ND.reshape(*weights_TK.shape, outputs_AD.shape[-1])
    return (weights_TK.unsqueeze(-1).to(rows_TKD.dtype) * rows_TKD).sum(dim=1)


class _ToTokens(torch.autograd.Function):
    """Rows travel back to their tokens; their gradients travel to the slots again."""

    @staticmethod
    def forward(ctx: Any, outputs_AD: torch.Tensor, roads: Roads) -> torch.Tensor:
        ctx.roads = roads
        return roads.to_tokens(outputs_AD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.roads.on_return()
        return ctx.roads.to_slots(gradients[0], ctx.roads.routes.order), None
