"""Products of stage 6: the rows of every slot with the weights of that slot; and activations.

`TorchProducts` computes one slot after the other; `backends/triton/products.py` computes all slots
in one launch on a GPU. Both have the same methods, which `TorchProducts` describes.

Shapes: A rows, L slots of this rank (H home slots, then the spare slots), N and K of a weight, U
and F input and output width of an activation. Gated activations take U = 2F inputs: a gate and a
value per hidden element, in two halves or interleaved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import compress, pairwise
from typing import NamedTuple

import torch
from torch.nn.functional import gelu, linear, relu, silu

from ultraep.errors import ConfigError
from ultraep.ops.fp8 import Dequantise, dequantise, pack, unpack
from ultraep.ops.modes import outside_dispatch_modes

TILE = 32


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of that dtype are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Stacks:
    """One tensor per slot: a stack of the home slots and a stack of the spare slots.

    Both have equal strides within a slot and a contiguous last dimension. They have one dtype,
    except gradients: `homes` may have the dtype of the parameters. FP8 weights [N, K] have scales
    [N, 1] per slot.
    """

    homes: torch.Tensor
    replicas: torch.Tensor
    sums: torch.Tensor | None = None  # replaces `homes` for gradients that replicas are added to
    spans: torch.Tensor | None = None  # [H, 2] begin and end of the replicas of each home expert
    scales: Stacks | None = None  # of FP8 weights

    def __len__(self) -> int:
        return self.homes.shape[0] + self.replicas.shape[0]

    def plain(self, dtype: torch.dtype, dequantise: Dequantise = dequantise) -> Stacks:
        """Return the stacks; FP8 weights are dequantised."""
        if self.scales is None:
            return self
        return Stacks(
            dequantise(self.homes, self.scales.homes, dtype),
            dequantise(self.replicas, self.scales.replicas, dtype),
        )

    def slots(self) -> tuple[torch.Tensor, ...]:
        return *self.homes.unbind(), *self.replicas.unbind()


class Beside(NamedTuple):
    """Concurrent work on the device that occupies some programs of a product at first.

    behind: a context that launches behind that work, on the same multiprocessors.
    """

    programs: int
    behind: Callable[[], AbstractContextManager[None]]


class TorchProducts:
    """Products and activations for the rows of one microbatch with torch, slot after slot.

    With FP8 weights, `multiply` takes packed rows and `activate` returns them; backward uses the
    dequantised numbers.

    begins: [L + 1] where the rows of each slot begin.
    bitwise: multiply fixed tiles of rows, so that a row never depends on the rows beside it.
    fp8: dtype of the results of FP8 products; None: weights are not FP8.

    Returns new tensors and never writes a part of one: selective checkpointing may keep any of
    them.
    """

    knows_spans = False  # whether `weight_gradients` uses `sums` and `spans` of stacks

    def __init__(
        self, begins: list[int], activation: Activation, *, bitwise: bool, fp8: torch.dtype | None
    ) -> None:
        self._activation, self._fp8, self._bitwise = activation, fp8, bitwise
        self._rows = begins[-1]
        self._counts = [end - begin for begin, end in pairwise(begins)]  # [L]

    def multiply(
        self,
        rows_AK: torch.Tensor,
        weights: Stacks,
        bias: Stacks | None,
        *,
        scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[A, N] rows @ W^T + bias, times `scale` [A]; W [N, K] and bias [N] per slot."""
        if self._fp8 is not None:
            rows_AK = unpack(rows_AK, weights.homes.shape[2], self._fp8)
            weights = weights.plain(self._fp8)
        stacks, width = (weights,) if bias is None else (weights, bias), weights.homes.shape[1]
        product = self._by_slot(linear, rows_AK, width, *stacks)
        if scale is not None:
            product = product * scale[: self._rows, None].to(product)
        return product if out is None else _written(product, out)

    def multiply_transposed(
        self,
        rows_AN: torch.Tensor,
        weights: Stacks,
        *,
        out: torch.Tensor | None = None,
        beside: Beside | None = None,
    ) -> torch.Tensor:
        """[A, K] rows @ W."""
        del beside  # only for GPUs
        weights = weights.plain(rows_AN.dtype)
        product = self._by_slot(torch.matmul, rows_AN, weights.homes.shape[2], weights)
        return product if out is None else _written(product, out)

    def activate(self, up: torch.Tensor) -> torch.Tensor:
        """[A, F] from `[A, U]`."""
        hidden_AF = self._activation.apply(up)
        return hidden_AF if self._fp8 is None else pack(hidden_AF)

    def activate_backward(
        self, up: torch.Tensor, d_hidden_AF: torch.Tensor, scale_A: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Backward of down(activate(up)) * scale, from d_hidden = d_out @ W_down before scaling.

        Returns d_up [A, U], activate(up) * scale [A, F], and the dot products of d_hidden with
        activate(up) [A]. May overwrite `d_hidden_AF`.
        """
        return activate_backward(self._activation, up, d_hidden_AF, scale_A)

    def row_dots(self, rows_AN: torch.Tensor, bias: Stacks, sums_A: torch.Tensor) -> None:
        """Add the dot product of every row with the bias [N] of its slot to the sums."""
        parts = zip(self._parts(rows_AN), self._parts(sums_A), bias.slots(), strict=True)
        for rows, sums, added in parts:
            sums += dots(rows, added)

    def weight_gradients(
        self,
        d_out_AN: torch.Tensor,
        rows_AK: torch.Tensor,
        into: Stacks,
        bias: Stacks | None,
        *,
        scale: torch.Tensor | None = None,
    ) -> None:
        """Write d_out^T @ rows [N, K] per slot to `into`; zeros for a slot without rows.

        Also writes the sum of d_out * scale to `bias` [N] per slot. Slots that `into` lacks are
        skipped. Sums are rounded once, to the dtype of their stack; home experts with replicas are
        not rounded, and go to `sums` if there is one.
        """
        if rows_AK.dtype == torch.uint8:  # packed
            rows_AK = unpack(rows_AK, into.homes.shape[2], d_out_AN.dtype)
        scales = None if bias is None or scale is None else self._parts(scale[:, None])
        biases = () if bias is None else bias.slots()
        parts = zip(into.slots(), self._parts(d_out_AN), self._parts(rows_AK), strict=False)
        for slot, (gradient, d_out, rows) in enumerate(parts):
            gradient.copy_(d_out.T @ rows)
            if biases:
                scaled = d_out if scales is None else d_out * scales[slot].to(d_out)
                biases[slot].copy_(scaled.sum(dim=0))

    def _parts(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        return rows[: self._rows].split_with_sizes(self._counts)

    def _by_slot(
        self, multiply: Callable[..., torch.Tensor], rows: torch.Tensor, width: int, *stacks: Stacks
    ) -> torch.Tensor:
        """Return `[A, width]` the rows of all slots, multiplied by the tensors of their slots."""
        if not self._rows:
            return rows.new_empty(0, width)
        counts, tensors = self._counts, []
        for stack in stacks:
            with outside_dispatch_modes():  # a view that a mode keeps shows later contents
                slots = stack.slots()
            tensors.append([slot.to(rows) for slot in compress(slots, counts)])
        parts = rows[: self._rows].split_with_sizes(list(filter(None, counts)))
        multiply = partial(_in_tiles, multiply) if self._bitwise else multiply
        return torch.cat(list(map(multiply, parts, *tensors)))


def _written(rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    with outside_dispatch_modes():  # a mode that kept it would not write it again
        out[: len(rows)].copy_(rows)
    return out


def _in_tiles(
    multiply: Callable[..., torch.Tensor], rows: torch.Tensor, *weights: torch.Tensor
) -> torch.Tensor:
    """Multiply tiles of `TILE` rows, the last one filled up with zeros."""
    padded = torch.cat([rows, rows.new_zeros(-len(rows) % TILE, rows.shape[1])])
    products = [multiply(part, *weights) for part in padded.split(TILE)]
    return torch.cat(products)[: len(rows)]


def activate_backward(
    activation: Activation, up: torch.Tensor, d_hidden_AF: torch.Tensor, scale_A: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `TorchProducts.activate_backward`; there may be more scales than rows."""
    hidden_AF, scale_A1 = activation.apply(up), scale_A[: len(up), None].to(up.dtype)
    d_up = activation.gradient(up, d_hidden_AF * scale_A1)
    d_scale_A = scale_A.new_zeros(len(scale_A), dtype=accumulator(up.dtype))
    d_scale_A[: len(up)] = dots(d_hidden_AF, hidden_AF)
    return d_up, hidden_AF * scale_A1, d_scale_A


def scale_rows(rows_AD: torch.Tensor, scale_A: torch.Tensor, out_AD: torch.Tensor) -> None:
    """Write rows times their scale, rounded to the dtype of the rows, into `out_AD`."""
    torch.mul(rows_AD, scale_A[:, None].to(rows_AD.dtype), out=out_AD)


def scale_rows_backward(
    d_out_AD: torch.Tensor, rows_AD: torch.Tensor, scale_A: torch.Tensor, d_scale_A: torch.Tensor
) -> torch.Tensor:
    """Return the gradient [A, D] of the rows, and write the gradient of the scale."""
    d_scale_A.copy_(dots(d_out_AD, rows_AD))
    return d_out_AD * scale_A[:, None].to(rows_AD.dtype)


def dots(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the dot products of rows, accumulated row by row."""
    wide = accumulator(left.dtype)
    return (left.to(wide) * right.to(wide)).sum(dim=1)


# -- activations -----------------------------------------------------------------------------------

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
    if name not in ACTIVATIONS:
        raise ConfigError(f"unknown activation {name!r}; choose from {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
