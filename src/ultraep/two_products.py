"""The networks of all slots, forward and backward: two products with an activation between them.

Backward restores the weights of the copies (stage 3 again), computes all gradients and adds those
of the copies to their homes (stage 8). Weights that are multiplied in eight bits are not those that
learn: see `quantised.py`.

Shapes: A arrived rows, H home experts of this rank, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ultraep.plane import Copies
from ultraep.products import Products, Stacks, accumulator
from ultraep.quantised import QuantisedProducts, QuantisedStacks

Weights = Mapping[str, torch.Tensor]
Engine = Products | QuantisedProducts


@dataclass
class Call:
    """What the rows of one microbatch meet."""

    products: Engine
    copies: Copies
    names: tuple[str, ...]  # of the weights that learn
    eight_bits: dict[str, torch.Tensor] = field(default_factory=dict)  # what is multiplied instead

    def homes(self, learned: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        """What the rows of home slots meet."""
        return dict(zip(self.names, learned, strict=True)) | self.eight_bits


class TwoProducts(torch.autograd.Function):
    """The networks of all slots, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_AD: torch.Tensor,
        gates_A: torch.Tensor,
        packed: torch.Tensor | None,
        call: Call,
        *stacked: torch.Tensor,
    ) -> torch.Tensor:
        products, homes = call.products, call.homes(stacked)
        held, given = call.copies.tensors(), rows_AD if packed is None else packed
        if packed is None and isinstance(products, QuantisedProducts):
            given = products.packed(rows_AD)
        up = products.multiply(given, *_layer(homes, held, "gate_up"))
        outputs_AD = products.multiply(
            products.activate(up),
            *_layer(homes, held, "down"),
            scale=gates_A,
            out=call.copies.served_rows(rows_AD),
        )
        ctx.call, ctx.like = call, rows_AD.new_empty(()).expand(rows_AD.shape)
        ctx.save_for_backward(given, gates_A, up, *stacked)
        return outputs_AD

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Only what it is called with tells `once_differentiable` of a second derivative.
        return TwoProducts._backward(ctx, *gradients, *ctx.saved_tensors)

    @staticmethod
    @once_differentiable
    def _backward(
        ctx: Any,
        d_outputs_AD: torch.Tensor,
        given: torch.Tensor,
        gates_A: torch.Tensor,
        up: torch.Tensor,
        *stacked: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        products, homes = call.products, call.homes(stacked)
        learned = dict(zip(call.names, stacked, strict=True))
        learns = any(ctx.needs_input_grad[4:])
        sums = _Gradients(call.copies, learned, products.knows_spans) if learns else None
        with call.copies as copies:
            held = copies.tensors()
            gate_up, (down, down_bias) = (_layer(homes, held, n) for n in ("gate_up", "down"))
            d_hidden = products.multiply_transposed(d_outputs_AD, down)
            d_up, hidden, d_gates_A = products.activate_backward(up, d_hidden, gates_A)
            if down_bias is not None and ctx.needs_input_grad[1]:
                products.row_dots(d_outputs_AD, down_bias, d_gates_A)
            if sums is not None:
                products.weight_gradients(d_outputs_AD, hidden, *sums.of("down"), scale=gates_A)
                products.weight_gradients(d_up, given, *sums.of("gate_up"))
                sums.reduce()
            d_rows_AD = products.multiply_transposed(
                d_up, gate_up[0], out=copies.served_rows(ctx.like)
            )
        wanted = sums.reduced() if sums is not None else [None] * len(stacked)
        return d_rows_AD, d_gates_A if ctx.needs_input_grad[1] else None, None, None, *wanted


def _layer(
    homes: Weights,
    copies: Weights,
    layer: str,
    sums: Weights | None = None,
    spans: torch.Tensor | None = None,
) -> tuple[Any, Stacks | None]:
    """Weights and biases of one layer of all slots, or their gradients.

    Weights are `Stacks`, or `QuantisedStacks` where there are scales.
    """

    def stacks(name: str) -> Stacks:
        return Stacks(homes[name].detach(), copies[name], sums[name] if sums else None, spans)

    weight, bias, scales = stacks(f"{layer}_proj"), f"{layer}_bias", f"{layer}_scales"
    found = QuantisedStacks(weight, stacks(scales)) if scales in homes else weight
    return found, stacks(bias) if bias in homes else None


class _Gradients:
    """Weight gradients of all slots, in the type they are summed in until that is done.

    Those of home experts to which nothing is added are rounded at once, if the engine knows which.
    """

    def __init__(self, copies: Copies, homes: Weights, knows_spans: bool) -> None:
        self._copies, self._homes = copies, homes
        kinds = {n: (tuple(w.shape[1:]), accumulator(w.dtype)) for n, w in homes.items()}
        self._of_copies = copies.gradient_slots(kinds)
        wide = {n: kind for n, (_, kind) in kinds.items()}
        narrower = any(w.dtype != wide[n] for n, w in homes.items())
        apart = copies.possible and knows_spans and narrower
        self._spans = copies.spans() if apart else None
        self._own = {n: torch.empty_like(w, dtype=wide[n]) for n, w in homes.items() if apart}
        self._of_homes = {
            n: torch.empty_like(w, dtype=wide[n] if copies.possible and not apart else w.dtype)
            for n, w in homes.items()
        }

    def of(self, layer: str) -> tuple[Any, Stacks | None]:
        """Where the gradients of one layer go."""
        return _layer(self._of_homes, self._of_copies, layer, self._own, self._spans)

    def reduce(self) -> None:
        """Begin to add those of the copies to those of the homes."""
        if self._copies.possible:
            self._copies.reduce(self._of_homes, self._own or None)

    def reduced(self) -> list[torch.Tensor]:
        """The gradients of the home experts, with those of all their copies."""
        self._copies.reduced()
        return [self._of_homes[name].to(weight.dtype) for name, weight in self._homes.items()]
