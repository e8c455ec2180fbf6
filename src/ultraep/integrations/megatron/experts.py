"""Run the experts of Megatron-Core with other tensors.

The library's own `forward` computes home weights and replicas. It gets an `Overlay` of the module
with other tensors and another number of experts.

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
from ultraep.integrations.common import Overlay
from ultraep.parallel.tensors import mesh_of

PARAM_GATHER_HOOK = "DistributedDataParallel._make_forward_pre_hook"


def check_spec(spec: Any) -> None:
    """Raise if experts of this spec or class cannot be balanced."""
    module = getattr(spec, "module", spec)
    if not isinstance(module, type) or not issubclass(module, SequentialMLP | GroupedMLP):
        name = getattr(module, "__name__", module)
        raise ConfigError(
            f"{name} cannot be balanced; use SequentialMLP or GroupedMLP "
            "(moe_grouped_gemm=False, or moe_use_legacy_grouped_gemm=True)"
        )
    if issubclass(module, SequentialMLP):
        for part in (spec.submodules.linear_fc1, spec.submodules.linear_fc2):
            layer = getattr(part, "module", part)
            if not issubclass(layer, ColumnParallelLinear | RowParallelLinear):
                raise ConfigError(
                    f"experts of {layer.__name__} cannot be balanced; use ColumnParallelLinear and "
                    "RowParallelLinear (use_transformer_engine=False)"
                )


def without_fusion(experts: nn.Module) -> None:
    """Disable fused weight gradients: replicas add their gradients through autograd."""
    for module in experts.modules():
        if getattr(module, "gradient_accumulation_fusion", False):
            module.gradient_accumulation_fusion = False  # type: ignore[assignment]


def bundle_of(experts: Any) -> dict[str, Stack]:
    """Return the tensors of a replica, as views of the parameters.

    Autograd produces gradients of views in the order in which the views were created, but of
    parameters in any order. DDP reduces a bucket when its gradients are complete, and ranks with
    the same experts must reduce in the same order.
    """
    if isinstance(experts, GroupedMLP):
        homes, width = experts.num_local_experts, experts.config.hidden_size
        return {
            "weight1": experts.weight1.view(homes, width, -1),
            "weight2": experts.weight2.view(homes, -1, width),
        }
    each = [dict(expert.named_parameters()) for expert in experts.local_experts]
    return {name: [own[name].view_as(own[name]) for own in each] for name in each[0]}


def check_plain(experts: nn.Module) -> None:
    """Raise if a parameter is sharded."""
    for name, parameter in experts.named_parameters():
        if mesh_of(parameter) is not None or not parameter.numel():
            raise ConfigError(
                f"{name!r} is sharded, shape {list(parameter.shape)}: experts under FSDP cannot be "
                "balanced; use DistributedDataParallel"
            )


def wait_for_weights(experts: nn.Module) -> None:
    """Wait for weights that DDP is still gathering (overlap_param_gather), before sending them.

    DDP waits in forward hooks of the modules, which do not run for replicas.
    """
    for module in experts.modules():
        for hook in list(module._forward_pre_hooks.values()):
            if getattr(hook, "__qualname__", "").startswith(PARAM_GATHER_HOOK):
                hook(module, ())


def compute(
    experts: Any,
    rows: torch.Tensor,
    counts: list[int],
    tensors: dict[str, Any],
    probs: torch.Tensor,
) -> torch.Tensor:
    """Run the library's experts on `[n, D]` rows with these tensors, `counts` rows each."""
    if isinstance(experts, GroupedMLP):
        replaced = {name: tensor.contiguous() for name, tensor in tensors.items()}
    else:
        replaced = {"local_experts": _experts_with(experts.local_experts[0], tensors)}
    overlay = Overlay(experts, num_local_experts=len(counts), **replaced)
    outputs: torch.Tensor = type(experts).forward(overlay, rows, torch.tensor(counts), probs)[0]
    return outputs


def _experts_with(expert: nn.Module, tensors: dict[str, Any]) -> list[Callable[..., Any]]:
    """Return callables that run this expert with the tensors of each expert."""
    each = zip(*tensors.values(), strict=True)
    weights = [dict(zip(tensors, own, strict=True)) for own in each]
    return [lambda *rows, own=own: functional_call(expert, own, rows) for own in weights]
