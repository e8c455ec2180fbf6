"""Plain torch MoE layers of all experts, which `bench_blocks.py` compares with ours.

Shapes: T tokens, K experts per token, E experts, A = T * K rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu


class PlainLayer(nn.Module):
    """Rows sorted by expert, `torch._grouped_mm`, sums by index_add."""

    def __init__(self, router: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.router = router
        self.gate_up, self.down = (
            nn.Parameter(weights[name].clone()) for name in ("gate_up_proj", "down_proj")
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[T, D]` to `[T, D]`."""
        ids, gates = self.router(x)
        chosen, order = ids.flatten().sort(stable=True)
        every = torch.arange(len(self.down), device=x.device)
        ends = torch.searchsorted(chosen, every, right=True, out_int32=True)
        return self.combined(x, gates, order, ends)

    def combined(
        self, x: torch.Tensor, gates: torch.Tensor, order: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        token = order // gates.shape[1]
        outputs = self.network(x.index_select(0, token), ends) * gates.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, token, outputs)

    def network(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        gate, value = torch._grouped_mm(rows, self.gate_up.mT, offs=ends).chunk(2, dim=-1)
        return torch._grouped_mm(silu(gate) * value, self.down.mT, offs=ends)


class GatheringLayer(PlainLayer):
    """The same, but every sum over choices gathers its rows: faster with many tokens."""

    def combined(
        self, x: torch.Tensor, gates: torch.Tensor, order: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        outputs = self.network(apply(Gathered, x, order, back), ends)
        choices = apply(Permuted, outputs, back, order).view(*gates.shape, -1)
        return torch.bmm(gates[:, None], choices).squeeze(1)


class Gathered(torch.autograd.Function):
    """Rows in expert order; backward gathers and sums the rows of each token."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        ctx.shape = len(x), -1, x.shape[1]
        return x.index_select(0, order // (len(order) // len(x)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradients[0].index_select(0, back).view(ctx.shape).sum(dim=1), None, None


class Permuted(torch.autograd.Function):
    """Permute rows; backward permutes their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradients[0].index_select(0, back), None, None


def apply(function: Any, *args: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = function.apply(*args)
    return outputs


LAYERS = {"torch, index_add": PlainLayer, "torch, gathers": GatheringLayer}
