"""The layers and experts of one rank that bench_single.py compares.

Shapes: T tokens, K experts per token, E experts, A = T * K rows, D model width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from layers import FixedRouter, check_close, layer_with_weights
from load_cases import Shape
from timing import Clock
from torch import nn
from torch.nn.functional import silu

import ultraep
from ultraep.dispatch import Arrivals
from ultraep.experts.custom import serve
from ultraep.microbatch import Layer as ExpertLayer

Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # rows and gates to outputs
Make = Callable[["Inputs", Mapping[str, Any]], Layer]


def name_of(shape: Shape) -> str:
    return f"{shape.hidden}/{shape.ffn}/{shape.experts}/{shape.top_k}"


@dataclass(frozen=True)
class Inputs:
    """Rows, gates, output gradients and weights of one shape."""

    shape: Shape
    ids: torch.Tensor  # [T, K]
    x: torch.Tensor
    gates: torch.Tensor
    dy: torch.Tensor
    weights: dict[str, torch.Tensor]

    @classmethod
    def of_tokens(cls, shape: Shape, clock: Clock) -> Inputs:
        """Inputs of a layer: [T, D] tokens and [T, K] gates."""
        generator = torch.Generator(device=clock.device).manual_seed(0)
        options: dict[str, Any] = {"generator": generator, "device": clock.device}
        drawn = partial(torch.randn, dtype=clock.dtype, **options)
        x, dy = (drawn(shape.tokens, shape.hidden) for _ in range(2))
        scores = torch.rand(shape.tokens, shape.experts, **options)
        best, ids = scores.topk(shape.top_k, dim=1)
        gate_up = drawn(shape.experts, 2 * shape.ffn, shape.hidden).mul_(shape.hidden**-0.5)
        down = drawn(shape.experts, shape.hidden, shape.ffn).mul_(shape.ffn**-0.5)
        weights = {"gate_up_proj": gate_up, "down_proj": down}
        return cls(shape, ids, x, best / best.sum(dim=1, keepdim=True), dy, weights)

    def arrived(self) -> Inputs:
        """Inputs of the experts: [A, D] arrived rows and [A] gates."""
        order = self.ids.flatten().argsort(stable=True)
        token = order // self.shape.top_k
        gates = self.gates.flatten()[order]
        return replace(self, x=self.x[token], gates=gates, dy=self.dy[token])

    def counts(self) -> list[int]:
        """[E] rows per expert."""
        counts = torch.bincount(self.ids.flatten(), minlength=self.shape.experts)
        rows: list[int] = counts.tolist()
        return rows


class Contender:
    """A layer with its own leaf tensors of equal values."""

    def __init__(self, inputs: Inputs, make: Make) -> None:
        self._dy = inputs.dy
        self._x, self._gates = (t.detach().requires_grad_() for t in (inputs.x, inputs.gates))
        weights = {name: nn.Parameter(tensor) for name, tensor in inputs.weights.items()}
        self._leaves = {"x": self._x, "gates": self._gates, **weights}
        self._layer = make(inputs, weights)

    def forward(self) -> torch.Tensor:
        for leaf in self._leaves.values():
            leaf.grad = None
        return self._layer(self._x, self._gates)

    def step(self) -> None:
        self.forward().backward(self._dy)

    def results(self) -> dict[str, torch.Tensor]:
        """Outputs and all gradients of a step, in the dtype of the outputs.

        Gradients of float32 gates are sums of bfloat16 products.
        """
        y = self.forward()
        results = {"outputs": y.detach().clone()}  # backward may overwrite them
        y.backward(self._dy)
        for name, leaf in self._leaves.items():
            assert leaf.grad is not None, name
            results[f"gradient of {name}"] = leaf.grad.to(y.dtype, copy=True)
            leaf.grad = None
        return results


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


def network(rows: torch.Tensor, ends: torch.Tensor, tensors: Mapping[str, Any]) -> torch.Tensor:
    """SwiGLU experts with torch's grouped products; `ends`: end of the rows of each expert."""
    gate_up, down = (tensors[name].mT for name in ("gate_up_proj", "down_proj"))
    gate, value = torch._grouped_mm(rows, gate_up, offs=ends).chunk(2, dim=-1)
    return torch._grouped_mm(silu(gate) * value, down, offs=ends)


def counted_network(rows: torch.Tensor, counts: list[int], tensors: dict[str, Any]) -> torch.Tensor:
    """The same for the extension API, which passes row counts."""
    ends = torch.tensor([*accumulate(counts)], dtype=torch.int32, pin_memory=rows.is_cuda)
    return network(rows, ends.to(rows.device, non_blocking=True), tensors)


def with_torch(inputs: Inputs, weights: Mapping[str, Any], *, gathers: bool) -> Layer:
    """A plain torch layer."""
    every = torch.arange(inputs.shape.experts, device=inputs.ids.device)

    def layer(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        chosen, order = inputs.ids.flatten().sort(stable=True)
        ends = torch.searchsorted(chosen, every, right=True, out_int32=True)
        gates = gates.to(x.dtype)
        if not gathers:
            token = order // inputs.shape.top_k
            outputs = network(x.index_select(0, token), ends, weights)
            outputs = outputs * gates.flatten()[order, None]
            return torch.zeros_like(x).index_add(0, token, outputs)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        outputs = network(apply(Gathered, x, order, back), ends, weights)
        choices = apply(Permuted, outputs, back, order).view(*gates.shape, -1)
        return torch.bmm(gates[:, None], choices).squeeze(1)

    return layer


def apply(function: Any, *args: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = function.apply(*args)
    return outputs


def with_ultraep(inputs: Inputs, weights: Mapping[str, Any], *, path: str) -> Layer:
    """Our layer on one data plane."""
    balancer = ultraep.Balancer("alone", experts=inputs.shape.experts, data_plane=path)
    return on_balancer(inputs, weights, balancer=balancer)


def on_balancer(inputs: Inputs, weights: Mapping[str, Any], *, balancer: ultraep.Balancer) -> Layer:
    """Our layer with these weights on a balancer."""
    router = FixedRouter(inputs.ids)
    moe = layer_with_weights(balancer, router, weights)

    def layer(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        router.gates = gates
        y: torch.Tensor = moe(x)
        return y

    return layer


def experts_alone(inputs: Inputs, weights: Mapping[str, Any]) -> Layer:
    """The torch experts on arrived rows."""
    ends = torch.tensor(inputs.counts(), device=inputs.x.device).cumsum(0, dtype=torch.int32)

    def experts(rows: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return network(rows, ends, weights) * gates.to(rows.dtype)[:, None]

    return experts


@dataclass(frozen=True)
class Arrived:
    """The part of an exchange that experts need: the first row of every slot."""

    offsets: torch.Tensor
    known: list[int] | None  # known to the host; None: the host must wait for the device

    def begins(self) -> list[int]:
        return self.offsets.tolist() if self.known is None else self.known


def through_extension_api(inputs: Inputs, weights: Mapping[str, Any], *, path: str) -> Layer:
    """The same experts with weights from a balancer: stages 3 and 6 of a layer."""
    shape = inputs.shape
    balancer = ultraep.Balancer(
        "alone", experts=shape.experts, data_plane=path, capacity=shape.rows
    )
    ids = inputs.ids
    microbatch = balancer.begin(ExpertLayer(0, dict(weights)), ids)
    microbatch.count()
    microbatch.plan()
    begins = [0, *accumulate(inputs.counts())]
    begins += begins[-1:] * balancer.topology.slots  # the spare slots are empty
    offsets = torch.tensor(begins, dtype=torch.int32, device=ids.device)
    exchange: Any = Arrived(offsets, begins if path == "messages" else None)

    def experts(rows: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        with microbatch.replicate() as replicas:
            return serve(counted_network, Arrivals(rows, gates, exchange), replicas)

    return experts


PLANES = ("messages", "mapped")
PLAIN: dict[str, Make] = {
    "torch, index_add": partial(with_torch, gathers=False),
    "torch, gathers": partial(with_torch, gathers=True),
}
OURS: dict[str, Make] = {path: partial(with_ultraep, path=path) for path in PLANES}
EXTENSION_API: dict[str, Make] = {
    path: partial(through_extension_api, path=path) for path in PLANES
}


def compare(contenders: Mapping[str, Contender]) -> None:
    """Raise if the results of a contender differ from the first one."""
    wanted: dict[str, torch.Tensor] = {}
    for name, contender in contenders.items():
        results = contender.results()
        wanted = wanted or results
        for what, tensor in results.items():
            check_close(f"{what} of {name!r}", tensor, wanted[what])
