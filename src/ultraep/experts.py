"""Stage 6: Arrivals -> outputs, a SwiGLU network for every home and every filled spare slot.

    out = weight * down(silu(gate) * up),   gate, up = the two halves of gate_up(x)

The weight of a row is the router's, and came with the row. Backward restores the replicas' weights
(stage 3 again), computes all gradients and adds those of the replicas to their homes (stage 8).

Shapes: A arrived rows, L slots of this rank (H home experts, then the spare ones), D model width,
F hidden width, P parameters of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, silu

from ultraep.dispatch import Arrivals
from ultraep.grad_reduce import accumulator
from ultraep.modes import unseen
from ultraep.parallel.home import HomeModule

if TYPE_CHECKING:
    from ultraep.runtime.replicas import Replicas

TILE = 32
NAMES = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")
Weights = dict[str, torch.Tensor]


class Experts(HomeModule):
    """The home experts of one rank, stacked.

    seed: experts are drawn from it one by one, so a model starts alike on any number of ranks.
    bitwise: fixed tiles of rows, so that what a row gives does not depend on the rows beside it.
    """

    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(
        self,
        hidden: int,
        ffn: int,
        home_experts: list[int],
        *,
        bias: bool = False,
        bitwise: bool = False,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.bitwise, self.home_experts = bitwise, tuple(home_experts)
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        homes = len(home_experts)
        self.gate_up_proj = nn.Parameter(torch.empty(homes, 2 * ffn, hidden, **options))
        self.down_proj = nn.Parameter(torch.empty(homes, hidden, ffn, **options))
        for name, width in (("gate_up_bias", 2 * ffn), ("down_bias", hidden)):
            zeros = nn.Parameter(torch.zeros(homes, width, **options)) if bias else None
            self.register_parameter(name, zeros)
        self._draw(home_experts, seed)

    def _draw(self, home_experts: list[int], seed: int) -> None:
        for index, expert in enumerate(home_experts):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + expert)
            for stack in (self.gate_up_proj, self.down_proj):
                draw(stack[index], generator)

    @property
    def bundle(self) -> Weights:
        """What a copy of an expert consists of."""
        found = ((name, getattr(self, name)) for name in NAMES)
        return {name: weight for name, weight in found if weight is not None}

    def forward(self, arrivals: Arrivals, replicas: Replicas, copies: Weights) -> torch.Tensor:
        """[A, D] outputs times their weights. `copies` is what `replicas` put in the slots."""
        tile, bundle = TILE if self.bitwise else None, self.bundle
        if isinstance(arrivals.counts, torch.Tensor):  # only the device knows them
            from ultraep.backends.triton.experts import grouped_mlp

            on_device: Any = replicas
            return grouped_mlp(
                arrivals.rows, arrivals.weights, arrivals.counts, on_device, copies, bundle
            )
        call = _Call(arrivals.counts, replicas, copies, tuple(bundle), tile)
        outputs: torch.Tensor = _GroupedMLP.apply(  # type: ignore[no-untyped-call]
            arrivals.rows, arrivals.weights, call, *bundle.values()
        )
        return outputs


class _Call:
    """What the rows of one microbatch meet: counts, replicas, and how to multiply."""

    def __init__(
        self,
        counts: list[int],
        replicas: Replicas,
        copies: Weights | None,
        names: tuple[str, ...],
        tile: int | None,
    ) -> None:
        self.counts, self.replicas, self.copies = counts, replicas, copies
        self.names, self.tile = names, tile

    @unseen()  # a view of a slot that was kept may show what others put there since
    def slots(self, homes: Weights, copies: Weights) -> list[tuple[int, slice, Weights]]:
        """Every slot that has rows: its index, its rows and its weights."""
        found, begin = [], 0
        for slot, count in enumerate(self.counts):
            if count:
                spare = slot - self.replicas.num_homes
                source, index = (homes, slot) if spare < 0 else (copies, spare)
                weights = {name: source[name][index] for name in self.names}
                found.append((slot, slice(begin, begin + count), weights))
            begin += count
        return found


class _GroupedMLP(torch.autograd.Function):
    """The networks of all slots, one after the other, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_AD: torch.Tensor,
        weights_A: torch.Tensor,
        call: _Call,
        *stacked: torch.Tensor,
    ) -> torch.Tensor:
        homes = dict(zip(call.names, stacked, strict=True))
        assert call.copies is not None
        scales_A1 = weights_A[:, None].to(rows_AD.dtype)
        # New tensors, none written in part: selective checkpointing may keep any of them.
        hidden, outputs = [], []
        for _, part, expert in call.slots(homes, call.copies):
            up = _linear(rows_AD[part], expert, "gate_up", call.tile)
            hidden.append(up)
            outputs.append(_linear(swiglu(up), expert, "down", call.tile) * scales_A1[part])
        outputs_AD = _joined(outputs, rows_AD, rows_AD.shape[1])
        hidden_AF = _joined(hidden, rows_AD, homes["gate_up_proj"].shape[1])
        ctx.call, call.copies = call, None  # the slots are only lent
        ctx.save_for_backward(rows_AD, weights_A, hidden_AF, *stacked)
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
        hidden_AF: torch.Tensor,
        *stacked: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        homes = dict(zip(call.names, stacked, strict=True))
        sums = _Gradients(call, homes) if any(ctx.needs_input_grad[3:]) else None
        d_rows_AD = torch.empty_like(rows_AD)
        d_weights_A = torch.empty_like(weights_A) if ctx.needs_input_grad[1] else None
        scales_A1 = weights_A[:, None].to(rows_AD.dtype)
        with call.replicas as copies:
            for slot, part, expert in call.slots(homes, copies):
                d_out, scale, up = d_outputs_AD[part], scales_A1[part], hidden_AF[part]
                d_hidden, hidden = _d_linear(d_out, expert, "down", call.tile), swiglu(up)
                if d_weights_A is not None:
                    d_weights_A[part] = _d_scale(d_out, d_hidden, hidden, expert)
                d_up = _d_swiglu(up, d_hidden * scale)
                d_rows_AD[part] = _d_linear(d_up, expert, "gate_up", call.tile)
                if sums is not None:
                    sums.add(slot, "down", d_out * scale, hidden)
                    sums.add(slot, "gate_up", d_up, rows_AD[part])
        wanted = sums.reduced() if sums is not None else [None] * len(stacked)
        return d_rows_AD, d_weights_A, None, *wanted


class _Gradients:
    """Weight gradients of all slots, flat, in the type they are summed in."""

    def __init__(self, call: _Call, homes: Weights) -> None:
        some = homes["gate_up_proj"]
        self._call, self._homes = call, homes
        shapes = [homes[name].shape[1:] for name in call.names]
        width, dtype = sum(shape.numel() for shape in shapes), accumulator(some.dtype)
        self._of_homes = torch.zeros(len(some), width, dtype=dtype, device=some.device)
        self._of_copies = call.replicas.gradient_rows(width, dtype, some.device)
        self._of_copies.zero_()
        self._views = [self._split(rows, shapes) for rows in (self._of_homes, self._of_copies)]

    def _split(self, rows: torch.Tensor, shapes: list[torch.Size]) -> Weights:
        parts = rows.split([shape.numel() for shape in shapes], dim=1)
        views = zip(self._call.names, parts, shapes, strict=True)
        return {name: part.unflatten(1, shape) for name, part, shape in views}

    def add(self, slot: int, layer: str, d_out: torch.Tensor, rows: torch.Tensor) -> None:
        """Fill in the gradients of one layer of one slot."""
        spare = slot - len(self._of_homes)
        views, index = (self._views[0], slot) if spare < 0 else (self._views[1], spare)
        views[f"{layer}_proj"][index] = d_out.T @ rows
        if f"{layer}_bias" in views:
            views[f"{layer}_bias"][index] = d_out.sum(dim=0)

    def reduced(self) -> list[torch.Tensor]:
        """The gradients of the home experts, with those of all their copies."""
        self._call.replicas.reduce(self._of_homes, self._of_copies)
        return [self._views[0][name].to(self._homes[name].dtype) for name in self._call.names]


@torch.no_grad()
def draw(weight: torch.Tensor, generator: torch.Generator) -> None:
    """Fill a weight `[out, in]` evenly within 1 / sqrt(in), alike for every type and device."""
    drawn = torch.rand(weight.shape, generator=generator, dtype=torch.float64)
    weight.copy_((2 * drawn - 1) / math.sqrt(weight.shape[-1]))


def swiglu(up: torch.Tensor) -> torch.Tensor:
    """[..., 2F] -> [..., F]: the first half gates the second."""
    gate, value = up.chunk(2, dim=-1)
    return silu(gate) * value


def _joined(parts: list[torch.Tensor], like: torch.Tensor, width: int) -> torch.Tensor:
    return torch.cat(parts) if parts else like.new_empty(0, width)


def _d_swiglu(up: torch.Tensor, d_out: torch.Tensor) -> torch.Tensor:
    gate, value = up.chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    d_gate = d_out * value * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([d_gate, d_out * gate * sigmoid], dim=-1)


def _d_scale(
    d_out: torch.Tensor, d_hidden: torch.Tensor, hidden: torch.Tensor, expert: Weights
) -> torch.Tensor:
    """`d_out` times the output before it was scaled; that was not kept, what `down` got was."""
    d_scale = _dot(d_hidden, hidden)
    bias = expert.get("down_bias")
    return d_scale if bias is None else d_scale + _dot(d_out, bias.to(d_out))


def _dot(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Products of rows, in the type of sums; a row's does not depend on the rows beside it."""
    wide = accumulator(one.dtype)
    return (one.to(wide) * other.to(wide)).sum(dim=1)


def _linear(rows: torch.Tensor, expert: Weights, layer: str, tile: int | None) -> torch.Tensor:
    weight = expert[f"{layer}_proj"].to(rows)
    bias = expert.get(f"{layer}_bias")
    bias = None if bias is None else bias.to(rows)
    return _in_tiles(lambda part: linear(part, weight, bias), rows, tile)


def _d_linear(d_out: torch.Tensor, expert: Weights, layer: str, tile: int | None) -> torch.Tensor:
    weight = expert[f"{layer}_proj"].to(d_out)
    return _in_tiles(lambda part: part @ weight, d_out, tile)


def _in_tiles(
    multiply: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, tile: int | None
) -> torch.Tensor:
    if tile is None:
        return multiply(rows)
    short = -len(rows) % tile
    padded = torch.cat([rows, rows.new_zeros(short, rows.shape[1])])
    return torch.cat([multiply(part) for part in padded.split(tile)])[: len(rows)]
