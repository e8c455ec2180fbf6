"""The experts of Megatron-Core: of which tensors they consist, and how they run with others.

The library's own `forward` computes, on home weights and on copies: it is given an object that
looks like the module, with other tensors for another number of experts.

Shapes: H home experts, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from torch import nn
from torch.func import functional_call

from ultraep.bundle import Stack
from ultraep.errors import ConfigError
from ultraep.integrations.common import InPlaceOf
from ultraep.parallel.tensors import mesh_of

WAITS = "DistributedDataParallel._make_forward_pre_hook"  # until weights are gathered


def check_spec(spec: Any) -> None:
    """Raise if experts of this spec, or class, cannot be balanced; names them."""
    kind = getattr(spec, "module", spec)
    if not isinstance(kind, type) or not issubclass(kind, SequentialMLP | GroupedMLP):
        name = getattr(kind, "__name__", kind)
        raise ConfigError(
            f"experts of {name} cannot be balanced, those of SequentialMLP and GroupedMLP can "
            "(moe_grouped_gemm=False, or moe_use_legacy_grouped_gemm=True)"
        )
    if issubclass(kind, SequentialMLP):
        for part in (spec.submodules.linear_fc1, spec.submodules.linear_fc2):
            layer = getattr(part, "module", part)
            if not issubclass(layer, ColumnParallelLinear | RowParallelLinear):
                raise ConfigError(
                    f"experts of {layer.__name__} cannot be balanced, those of "
                    "ColumnParallelLinear and RowParallelLinear can (use_transformer_engine=False)"
                )


def without_fusion(experts: nn.Module) -> None:
    """Let gradients of weights come from autograd, which adds those of the copies to them."""
    for module in experts.modules():
        if getattr(module, "gradient_accumulation_fusion", False):
            module.gradient_accumulation_fusion = False  # type: ignore[assignment]


def bundle_of(experts: Any) -> dict[str, Stack]:
    """What a copy of an expert consists of.

    Views, since autograd hands on gradients of views in the order in which these were made, and of
    parameters in any order: DDP begins to reduce a bucket when its gradients are there, and ranks
    with the same experts must do so in the same order.
    """
    if isinstance(experts, GroupedMLP):
        homes, width = experts.num_local_experts, experts.config.hidden_size
        return {
            "weight1": experts.weight1.view(homes, width, -1),
            "weight2": experts.weight2.view(homes, -1, width),
        }
    each = [dict(expert.named_parameters()) for expert in experts.local_experts]
    return {name: [one[name].view_as(one[name]) for one in each] for name in each[0]}


def check_plain(experts: nn.Module) -> None:
    """Raise if a parameter is not wholly here."""
    for name, parameter in experts.named_parameters():
        if mesh_of(parameter) is not None or not parameter.numel():
            raise ConfigError(
                f"{name!r} is sharded, shape {list(parameter.shape)}: experts under FSDP cannot be "
                "balanced, under DistributedDataParallel they can"
            )


def wait_for_weights(experts: nn.Module) -> None:
    """Wait for weights that DDP still gathers (overlap_param_gather): they are about to be sent.

    It waits in hooks of the modules that hold them, which do not know the tensors of copies.
    """
    for module in experts.modules():
        for hook in list(module._forward_pre_hooks.values()):
            if getattr(hook, "__qualname__", "").startswith(WAITS):
                hook(module, ())


def compute(
    experts: Any,
    rows: torch.Tensor,
    counts: list[int],
    tensors: dict[str, Any],
    probs: torch.Tensor,
) -> torch.Tensor:
    """[n, D] -> [n, D] as the library does it, with these tensors for so many rows each."""
    if isinstance(experts, GroupedMLP):
        others = {name: tensor.contiguous() for name, tensor in tensors.items()}
    else:
        others = {"local_experts": _like(experts.local_experts[0], tensors)}
    seen = InPlaceOf(experts, num_local_experts=len(counts), **others)
    outputs: torch.Tensor = type(experts).forward(seen, rows, torch.tensor(counts), probs)[0]
    return outputs


def _like(expert: nn.Module, tensors: dict[str, Any]) -> list[Callable[..., Any]]:
    """Experts like this one, with other tensors."""
    each = zip(*tensors.values(), strict=True)
    weights = [dict(zip(tensors, held, strict=True)) for held in each]
    return [lambda *rows, own=own: functional_call(expert, own, rows) for own in weights]
