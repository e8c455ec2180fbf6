"""Stage 6 on the GPU, forward and backward, with numbers of rows that only the device knows.

Shapes: A rows that there is room for, H home experts, L spare slots, D model width, F hidden width,
P parameters of an expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from ultraep.backends.triton.grouped import Grouped, Stacks
from ultraep.errors import ConfigError

Weights = Mapping[str, torch.Tensor]
TYPES = (torch.bfloat16, torch.float16, torch.float32)


class Replicas(Protocol):
    """What stage 6 needs of the copies and of the memory that ranks share."""

    sms: int  # multiprocessors of this rank

    def __enter__(self) -> Weights: ...

    def __exit__(self, *error: object) -> None: ...

    def arrived(self) -> None:
        """From here on, the weights of all copies are there."""

    def served_rows(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        """`[A, D]` where others can pull from."""

    def served_scalars(self) -> torch.Tensor:
        """`[A]` the same."""

    def gradient_rows(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        """`[L, P]` for the gradients of this rank's copies."""

    def reduce(self, gradients_HP: torch.Tensor) -> None:
        """Begin to add the gradients of all copies to those of the home experts."""

    def reduced(self) -> None:
        """From here on, they are added."""


@dataclass
class Call:
    """What the rows of one microbatch meet."""

    offsets: torch.Tensor  # [slots + 1] where the rows of each slot begin
    replicas: Replicas
    copies: Weights | None
    names: tuple[str, ...]


def grouped_mlp(
    rows_AD: torch.Tensor,
    weights_A: torch.Tensor,
    offsets: torch.Tensor,
    replicas: Replicas,
    copies: Weights,
    bundle: Weights,
) -> torch.Tensor:
    """[A, D] outputs times the weights of their rows, where others can pull them from."""
    if rows_AD.dtype not in TYPES:
        known = ", ".join(map(str, TYPES))
        raise ConfigError(f"kernels multiply {known}; rows are {rows_AD.dtype}")
    for name, tensor in bundle.items():
        if tensor.dtype != rows_AD.dtype:
            raise ConfigError(
                f"kernels multiply tensors of one type: rows are {rows_AD.dtype}, "
                f"{name!r} is {tensor.dtype}"
            )
    call = Call(offsets, replicas, copies, tuple(bundle))
    outputs: torch.Tensor = _GroupedMLP.apply(rows_AD, weights_A, call, *bundle.values())  # type: ignore[no-untyped-call]
    return outputs


class _GroupedMLP(torch.autograd.Function):
    """The networks of all slots at once."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_AD: torch.Tensor,
        weights_A: torch.Tensor,
        call: Call,
        *stacked: torch.Tensor,
    ) -> torch.Tensor:
        homes = dict(zip(call.names, stacked, strict=True))
        assert call.copies is not None
        call.replicas.arrived()
        grouped = Grouped(call.offsets, programs=call.replicas.sms)
        gate_up, down = (_stacks(homes, call.copies, name) for name in ("gate_up", "down"))
        up = rows_AD.new_empty(len(rows_AD), homes["gate_up_proj"].shape[1])
        hidden_AF = rows_AD.new_empty(len(rows_AD), homes["down_proj"].shape[2])
        outputs_AD = call.replicas.served_rows(rows_AD.shape[1], rows_AD.dtype)
        grouped.multiply(rows_AD, gate_up[0], up, bias=gate_up[1])
        grouped.swiglu(up, hidden_AF)
        grouped.multiply(hidden_AF, down[0], outputs_AD, bias=down[1], scale=weights_A)
        ctx.call, call.copies = call, None  # the slots are only lent
        ctx.save_for_backward(rows_AD, weights_A, up, *stacked)
        return outputs_AD

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Only what it is called with tells `once_differentiable` of a second derivative.
        return _GroupedMLP._backward(ctx, *gradients, *ctx.saved_tensors)

    @staticmethod
    @once_differentiable
    def _backward(
        ctx: Any,
        d_outputs_AD: torch.Tensor,
        rows_AD: torch.Tensor,
        weights_A: torch.Tensor,
        up: torch.Tensor,
        *stacked: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        homes = dict(zip(call.names, stacked, strict=True))
        trains = any(ctx.needs_input_grad[3:])
        sums = _Gradients(call, homes) if trains else None
        d_weights_A = call.replicas.served_scalars() if ctx.needs_input_grad[1] else None
        grouped = Grouped(call.offsets, programs=call.replicas.sms)
        hidden_AF = rows_AD.new_empty(len(rows_AD), homes["down_proj"].shape[2])
        d_up = torch.empty_like(up)
        with call.replicas as copies:
            call.replicas.arrived()
            gate_up, down = (_stacks(homes, copies, name) for name in ("gate_up", "down"))
            grouped.multiply_transposed(d_outputs_AD, down[0], hidden_AF)
            grouped.swiglu_backward(
                up, hidden_AF, d_up, hidden=hidden_AF, scale=weights_A, d_scale=d_weights_A
            )
            if d_weights_A is not None and down[1] is not None:
                grouped.row_dots(d_outputs_AD, down[1], d_weights_A)
            if sums is not None:
                weights, bias = sums.of("down")
                grouped.weight_gradients(
                    d_outputs_AD, hidden_AF, weights, bias=bias, scale=weights_A
                )
                weights, bias = sums.of("gate_up")
                grouped.weight_gradients(d_up, rows_AD, weights, bias=bias)
                sums.reduce()
            d_rows_AD = call.replicas.served_rows(rows_AD.shape[1], rows_AD.dtype)
            grouped.multiply_transposed(d_up, gate_up[0], d_rows_AD)
        wanted = sums.reduced() if sums is not None else [None] * len(stacked)
        return d_rows_AD, d_weights_A, None, *wanted


def _stacks(homes: Weights, copies: Weights, layer: str) -> tuple[Stacks, Stacks | None]:
    """Weights and biases of one layer of all slots."""
    weight, bias = f"{layer}_proj", f"{layer}_bias"
    return (
        Stacks(homes[weight].detach(), copies[weight]),
        Stacks(homes[bias].detach(), copies[bias]) if bias in homes else None,
    )


class _Gradients:
    """Weight gradients of all slots, flat, in single precision."""

    def __init__(self, call: Call, homes: Weights) -> None:
        some = homes["gate_up_proj"]
        self._replicas, self._names, self._homes = call.replicas, call.names, homes
        shapes = [homes[name].shape[1:] for name in call.names]
        width = sum(shape.numel() for shape in shapes)
        self._of_homes = torch.empty(len(some), width, dtype=torch.float32, device=some.device)
        of_copies = call.replicas.gradient_rows(width, torch.float32)
        self._views = self._split(self._of_homes, shapes), self._split(of_copies, shapes)

    def _split(self, rows: torch.Tensor, shapes: list[torch.Size]) -> dict[str, torch.Tensor]:
        parts = rows.split([shape.numel() for shape in shapes], dim=1)
        views = zip(self._names, parts, shapes, strict=True)
        return {name: part.unflatten(1, shape) for name, part, shape in views}

    def of(self, layer: str) -> tuple[Stacks, Stacks | None]:
        """Where the gradients of one layer go."""
        return _stacks(*self._views, layer)

    def reduce(self) -> None:
        """Begin to add those of the copies to those of the homes."""
        self._replicas.reduce(self._of_homes)

    def reduced(self) -> list[torch.Tensor]:
        """The gradients of the home experts, with those of all their copies."""
        self._replicas.reduced()
        return [self._views[0][name].to(self._homes[name].dtype) for name in self._names]
