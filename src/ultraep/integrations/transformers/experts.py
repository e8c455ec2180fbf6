"""Experts of a transformers model, spread over ranks: what becomes of such a module.

The library decorates classes of experts, so that one of several functions computes them. Balancing
changes the class of a module to one that is derived from its own and from `BalancedExperts`: its
parameters hold the home experts of this rank, its forward is the stages, and what it computes is
still what the library computes, on home weights and on copies.

Shapes: T tokens, K experts per token, E experts, n rows, D model width.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import _grouped_linear

from ultraep.arrays import PADDING
from ultraep.bundle import Bundle
from ultraep.comm import moved
from ultraep.errors import ConfigError
from ultraep.experts.loan import serve
from ultraep.integrations.common import InPlaceOf
from ultraep.layer import run_stages
from ultraep.microbatch import AnyPlan, Layer
from ultraep.parallel.home import HomeModule
from ultraep.runtime.balancer import Balancer
from ultraep.runtime.state import gather_experts

GROUPED = "grouped_mm"  # the library's name for products of all experts at once


def is_registered(module: nn.Module) -> bool:
    """Whether the library's registry of experts knows this module."""
    return hasattr(module, "is_concatenated") and hasattr(module, "has_gate")


class BalancedExperts(HomeModule):
    """The home experts of this rank, in a module of the library that had all experts.

    kind: the class that it had.   balancer, layer_index: who balances it, and its number there.
    stacked: names of the tensors that are stacked over experts.
    last_plan: of the last microbatch.
    """

    kind: type[nn.Module]
    stacked: tuple[str, ...]
    balancer: Balancer
    layer_index: int
    last_plan: AnyPlan | None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, D] -> [T, D], as the class before; `[T, K]` ids of experts, and gates."""
        given = hidden_states, top_k_index, top_k_weights
        y, self.last_plan = stages(self, self.bundle, *given)
        return y

    @property
    def bundle(self) -> dict[str, torch.Tensor]:
        """What a copy of an expert consists of: all that is stacked over experts."""
        own = stacked_tensors(self)
        if own.keys() != set(self.stacked):
            changed = sorted(own.keys() ^ set(self.stacked))
            raise ConfigError(
                f"{', '.join(changed)} of {self.kind.__name__} changed since it was balanced: "
                "adapters of experts (LoRA) cannot be balanced, those of other layers can"
            )
        return own

    def home_parameters(self) -> list[nn.Parameter]:
        """Those of single experts; what all experts share is like any dense parameter."""
        return [p for p in self._parameters.values() if p is not None]


def stages(
    experts: Any,
    bundle: Bundle,
    tokens: torch.Tensor,
    top_k_index: torch.Tensor,
    gates: torch.Tensor,
) -> tuple[torch.Tensor, AnyPlan]:
    """[T, D] -> [T, D] and the plan: `kind`, `balancer` and `layer_index` of experts say how."""
    balancer: Balancer = experts.balancer
    # What no expert serves has an id behind the last one in this library.
    ids = top_k_index.masked_fill(top_k_index >= balancer.topology.experts, PADDING)
    layer = Layer(experts.layer_index, bundle, partial(serve, partial(compute, experts)))
    return run_stages(balancer, layer, ids, gates, tokens)


def compute(
    experts: Any, rows: torch.Tensor, counts: list[int], tensors: dict[str, Any]
) -> torch.Tensor:
    """[n, D] -> [n, D] as the library does it, with these tensors for so many rows each."""
    seen = InPlaceOf(experts, num_experts=len(counts), **tensors)
    if experts.config._experts_implementation == GROUPED:
        return in_groups(seen, rows, counts)
    each = moved(torch.tensor(counts), rows.device)
    ids = torch.arange(len(counts), device=rows.device)
    ids = ids.repeat_interleave(each, output_size=len(rows))
    ones = rows.new_ones(len(rows), 1)
    outputs: torch.Tensor = experts.kind.forward(seen, rows, ids[:, None], ones)
    return outputs


def in_groups(experts: Any, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """What the library does for "grouped_mm", for rows that are in the order of experts already."""
    ends = moved(torch.tensor(list(accumulate(counts)), dtype=torch.int32), rows.device)
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    hidden = _product(experts, first, rows, counts, ends)
    hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
    outputs = _product(experts, "down_proj", hidden, counts, ends)
    if getattr(experts, "has_post_expert_norm", False):  # since 5.22
        outputs = experts.post_expert_norm(outputs)
    return outputs.to(rows.dtype)


def _product(
    experts: Any, name: str, rows: torch.Tensor, counts: list[int], ends: torch.Tensor
) -> torch.Tensor:
    """Rows times the weights of their experts."""
    bias = None
    if experts.has_bias:
        each = moved(torch.tensor(counts), rows.device)
        stacked = getattr(experts, f"{name}_bias")
        bias = stacked.repeat_interleave(each, dim=0, output_size=len(rows))
    product: torch.Tensor = _grouped_linear(
        rows, getattr(experts, name), offs=ends, bias=bias, is_transposed=experts.is_transposed
    )
    return product


def stacked_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that the module holds itself, by name."""
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


@cache
def balanced_class(kind: Any) -> type[BalancedExperts]:
    """The class of a module of this class when it is balanced."""
    return type(f"Balanced{kind.__name__}", (BalancedExperts, kind), {"kind": kind})


@torch.no_grad()
def spread(module: Any, balancer: Balancer) -> None:
    """Keep only the home experts of this rank, and become balanced."""
    homes = tuple(balancer.topology.home_experts(balancer.rank).tolist())
    for tensor in stacked_tensors(module).values():
        if len(homes) < len(tensor):  # a copy, so that the memory of the others is freed
            tensor.data = tensor.data[list(homes)]
    kind: Any = type(module)
    module.__class__ = balanced_class(kind)
    module.home_experts, module.balancer, module.last_plan = homes, balancer, None
    module.stacked = tuple(stacked_tensors(module))
    module.layer_index = balancer.register_layer()
    module.spread_over(balancer)


@torch.no_grad()
def reunite(module: Any) -> None:
    """Have all experts again, as before `spread`; collective."""
    for tensor in module.bundle.values():
        tensor.data = gather_experts(tensor, module.balancer)
        tensor.grad = None
        tensor.__dict__.pop("expert_ranks", None)
    for name in ("home_experts", "stacked", "balancer", "last_plan", "layer_index", "ranks"):
        delattr(module, name)
    module.__class__ = module.kind
