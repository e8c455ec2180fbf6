"""Stage 7: sum the expert outputs of each token on the token's own rank.

The outputs are already multiplied by their gates. The sum runs over a token's choices in router
order, whichever slots served them, so the result does not depend on the plan.

Shapes: T tokens, A arrived rows, D model width.
"""

from __future__ import annotations

from typing import Any

import torch

from ultraep.dispatch import RowMover
from ultraep.ops.modes import outside_dispatch_modes
from ultraep.ops.recompute import Gradients, first_order, run, save


def combine(outputs_AD: torch.Tensor, mover: RowMover) -> torch.Tensor:
    """Return the `[T, D]` outputs of this rank's tokens. Padding contributes nothing."""
    y_TD: torch.Tensor = run(_Combine, outputs_AD, mover)
    return y_TD


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
