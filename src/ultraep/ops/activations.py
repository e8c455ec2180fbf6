"""Activations between the two products of an expert: `[A, U] -> [A, F]`, and their gradients.

Gated activations take U = 2F inputs: a gate and a value per hidden element, in two halves or
interleaved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import gelu, relu, silu

from ultraep.errors import ConfigError

ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss


@dataclass(frozen=True)
class Activation:
    """A row-wise function that torch can differentiate."""

    name: str
    apply: Callable[[torch.Tensor], torch.Tensor]
    inputs: int = 2  # per output

    def gradient(self, up: torch.Tensor, d_hidden: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the input from the gradient of the output."""
        with torch.enable_grad():
            leaf = up.detach().requires_grad_()
            (d_up,) = torch.autograd.grad(self.apply(leaf), leaf, d_hidden)
        return d_up


def swiglu(up: torch.Tensor) -> torch.Tensor:
    """[..., 2F] -> [..., F]: silu of the first half, times the second."""
    gate, value = up.chunk(2, dim=-1)
    return silu(gate) * value


def clamped_swiglu(up: torch.Tensor) -> torch.Tensor:
    """[..., 2F] -> [..., F] as in gpt-oss: interleaved, clamped, and the value plus one."""
    gate, value = up[..., ::2].clamp(max=LIMIT), up[..., 1::2].clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (value + 1)


def geglu(up: torch.Tensor) -> torch.Tensor:
    """[..., 2F] -> [..., F]: gelu of the first half, times the second."""
    gate, value = up.chunk(2, dim=-1)
    return gelu(gate) * value


def squared_relu(up: torch.Tensor) -> torch.Tensor:
    """[..., F] -> [..., F]: the square of the positive part."""
    return relu(up).square()


ACTIVATIONS = {
    activation.name: activation
    for activation in (
        Activation("swiglu", swiglu),
        Activation("clamped_swiglu", clamped_swiglu),
        Activation("geglu", geglu),
        Activation("gelu", gelu, inputs=1),
        Activation("squared_relu", squared_relu, inputs=1),
    )
}


def activation_named(name: str) -> Activation:
    """Return the activation of that name."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"unknown activation {name!r}; choose from {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
