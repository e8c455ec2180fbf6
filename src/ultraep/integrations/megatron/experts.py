"""The experts of Megatron-Core, run with other tensors: home weights, or replicas in spare slots.

SequentialMLP runs twice, on home rows and on the rows of replicas. TEGroupedMLP runs once: the
spare slots are further gemms of Transformer Engine's GroupedLinear.

Shapes: H home experts, L slots, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEGroupedLinear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from torch import nn
from torch.func import functional_call

from ultraep.bundle import Stack
from ultraep.dispatch import Arrivals
from ultraep.errors import ConfigError
from ultraep.experts.custom import Fused, serve
from ultraep.integrations.common import Overlay
from ultraep.parallel.home import mesh_of
from ultraep.replicas import Replicas

PARAM_GATHER_HOOK = "DistributedDataParallel._make_forward_pre_hook"


def check_spec(spec: Any, config: Any) -> None:
    """Raise if experts of this spec, builder or class cannot be balanced."""
    module, submodules = parts_of(spec)
    if not isinstance(module, type) or not issubclass(module, (SequentialMLP, TEGroupedMLP)):
        raise ConfigError(
            f"{getattr(module, '__name__', module)} cannot be balanced; use SequentialMLP or "
            "TEGroupedMLP"
        )
    linears = (
        (ColumnParallelLinear, RowParallelLinear)
        if issubclass(module, SequentialMLP)
        else (TEGroupedLinear or (),)  # None: Transformer Engine is not installed
    )
    for part in (submodules.linear_fc1, submodules.linear_fc2):
        layer = parts_of(part)[0]
        if not issubclass(layer, linears):
            raise ConfigError(
                f"{module.__name__} of {layer.__name__} cannot be balanced; use TEGroupedMLP of "
                "Transformer Engine (moe_grouped_gemm=True), or use_transformer_engine=False"
            )
    if getattr(config, "fp8", None) and not issubclass(module, TEGroupedMLP):
        raise ConfigError(
            f"fp8={config.fp8!r} cannot be balanced with {module.__name__}; use TEGroupedMLP "
            "(moe_grouped_gemm=True), or fp8=None"
        )


def parts_of(spec: Any) -> tuple[Any, Any]:
    """Return class and submodules of a ModuleSpec, a `functools.partial` or a class."""
    if hasattr(spec, "func"):
        return spec.func, spec.keywords.get("submodules")
    return getattr(spec, "module", spec), getattr(spec, "submodules", None)


def adapter_for(experts: Any, slots: int) -> Sequential | Grouped:
    """Return the object that bundles and runs these experts."""
    return Grouped(experts, slots) if isinstance(experts, TEGroupedMLP) else Sequential(experts)


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


def views_of(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """Return views of the parameters of a replica.

    Autograd produces gradients of views in the order in which the views were created, but of
    parameters in any order. DDP reduces a bucket when its gradients are complete, and ranks with
    the same experts must reduce in the same order.
    """
    return [parameter.view_as(parameter) for parameter in parameters]


class Sequential:
    """SequentialMLP: one module for each expert."""

    def __init__(self, experts: Any) -> None:
        self._experts = experts
        for module in experts.modules():  # replicas add their gradients through autograd
            if getattr(module, "gradient_accumulation_fusion", False):
                module.gradient_accumulation_fusion = False

    def bundle(self) -> dict[str, Stack]:
        """Return the tensors of a replica, as views of the parameters."""
        each = [dict(expert.named_parameters()) for expert in self._experts.local_experts]
        return {name: views_of([own[name] for own in each]) for name in each[0]}

    def serve(self, arrivals: Arrivals, replicas: Replicas) -> torch.Tensor:
        """Stage 6. The library's experts apply the gates themselves."""
        unused_gates = arrivals.gates

        def network(rows: torch.Tensor, counts: list[int], tensors: dict[str, Any]) -> torch.Tensor:
            nonlocal unused_gates  # of home rows at the first call, of replica rows at the second
            gates, unused_gates = unused_gates[: len(rows)], unused_gates[len(rows) :]
            return self._compute(rows, counts, tensors, gates)

        return serve(network, without_gates(arrivals), replicas)

    def _compute(
        self, rows: torch.Tensor, counts: list[int], tensors: dict[str, Any], probs: torch.Tensor
    ) -> torch.Tensor:
        experts = self._experts
        local = _experts_with(experts.local_experts[0], tensors)
        overlay = Overlay(experts, num_local_experts=len(counts), local_experts=local)
        outputs: torch.Tensor = type(experts).forward(overlay, rows, torch.tensor(counts), probs)[0]
        return outputs


class Grouped:
    """TEGroupedMLP: two GroupedLinear modules, which take a weight for every slot."""

    def __init__(self, experts: Any, slots: int) -> None:
        if getattr(experts, "_with_fused_impl", False):
            raise ConfigError(
                "use_transformer_engine_op_fuser=True cannot be balanced, use False: fused "
                "operations hold their weights themselves"
            )
        self._experts = experts
        names = ("linear_fc1", "linear_fc2")
        self._wide = {name: Widened(getattr(experts, name), slots) for name in names}
        self._padding = {
            name: _with_gemms(getattr(experts, name), slots)
            for name in ("quantization_padding", "quantization_unpadding")
            if hasattr(experts, name)
        }

    def bundle(self) -> dict[str, Stack]:
        """Return the tensors of a replica, as views of the parameters."""
        return {name: views_of(parameters) for name, parameters in self._parameters().items()}

    def serve(self, arrivals: Arrivals, replicas: Replicas) -> torch.Tensor:
        """Stage 6. The library's experts apply the gates themselves."""

        def network(rows: torch.Tensor, counts: list[int], tensors: dict[str, Any]) -> torch.Tensor:
            linears = {name: wide.bound(tensors, name) for name, wide in self._wide.items()}
            slots = next(iter(linears.values())).num_gemms
            rows_per_slot = torch.tensor(counts + [0] * (slots - len(counts)))
            overlay = Overlay(self._experts, num_local_experts=slots, **linears, **self._padding)
            forward = type(self._experts).forward
            outputs: torch.Tensor = forward(overlay, rows, rows_per_slot, arrivals.gates)[0]
            return outputs

        return serve(network, without_gates(arrivals), replicas, fused=Fused(self._owners()))

    def _parameters(self) -> dict[str, list[nn.Parameter]]:
        return {
            f"{name}.{kind}": parameters
            for name, wide in self._wide.items()
            for kind, parameters in wide.parameters().items()
        }

    def _owners(self) -> dict[str, list[nn.Parameter]]:
        """Return the weights whose gradients Transformer Engine adds to `main_grad`."""
        owners = {
            name: parameters
            for name, parameters in self._parameters().items()
            if name.endswith(".weight") and self._wide[name.partition(".")[0]].fuses
        }
        owners = {n: ps for n, ps in owners.items() if ps[0].requires_grad}
        for name, parameters in owners.items() if torch.is_grad_enabled() else ():
            if not hasattr(parameters[0], "main_grad"):
                raise ConfigError(
                    f"gradient_accumulation_fusion=True needs `main_grad`, which {name!r} lacks; "
                    "wrap the model in DistributedDataParallel of Megatron-Core"
                )
        return owners if torch.is_grad_enabled() else {}


class Widened:
    """A GroupedLinear with further gemms for spare slots, which shares the state of the original.

    Its parameters are not registered: the original trains and saves them.
    """

    def __init__(self, linear: Any, slots: int) -> None:
        self._linear, self._homes = linear, linear.num_gemms
        if getattr(linear, "single_grouped_weight", False):
            raise ConfigError(
                "moe_single_grouped_weight=True cannot be balanced, use False: a replica is bound "
                "to the weight of its own gemm"
            )
        self._twin = twin = _with_gemms(linear, slots)
        twin._parameters = {}
        twin.fp8_meta = dict(linear.fp8_meta)
        twin.quantizers = {"scaling_fwd": [], "scaling_bwd": []}
        twin.fp8_initialized = twin.fp8_meta_tensors_initialized = False
        twin._fp8_workspaces = {}

    @property
    def fuses(self) -> bool:
        """Whether gradients of weights are added to `main_grad`."""
        return bool(self._linear.fuse_wgrad_accumulation)

    def parameters(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters of the home experts by kind."""
        kinds = ["weight", "bias"] if self._linear.use_bias else ["weight"]
        return {
            kind: [getattr(self._linear, f"{kind}{index}") for index in range(self._homes)]
            for kind in kinds
        }

    def bound(self, tensors: dict[str, Any], name: str) -> Any:
        """Return the module with these tensors as its weights; slots without tensors stay empty."""
        linear, twin = self._linear, self._twin
        for kind in ("weight", "bias"):
            given = tensors.get(f"{name}.{kind}", [])
            for index in range(twin.num_gemms):
                empty = given[0].detach() if given else getattr(linear, f"{kind}0")
                value = given[index] if index < len(given) else empty
                object.__setattr__(twin, f"{kind}{index}", value)
        for index in range(self._homes, twin.num_gemms):  # the slot was filled again
            twin._fp8_workspaces.pop(f"weight{index}", None)
        twin.training, twin.is_first_microbatch = linear.training, linear.is_first_microbatch
        linear.is_first_microbatch = False
        return twin


def without_gates(arrivals: Arrivals) -> Arrivals:
    """Return the same rows with gates of 1."""
    return Arrivals(arrivals.rows, torch.ones_like(arrivals.gates), arrivals.exchange)


def _with_gemms(module: Any, more: int) -> Any:
    """Return a shallow copy of a module of Transformer Engine with more gemms."""
    copied = copy(module)
    copied.num_gemms += more
    return copied


def _experts_with(expert: nn.Module, tensors: dict[str, Any]) -> list[Callable[..., Any]]:
    """Return callables that run this expert with the tensors of each expert."""
    each = zip(*tensors.values(), strict=True)
    weights = [dict(zip(tensors, own, strict=True)) for own in each]
    return [lambda *rows, own=own: functional_call(expert, own, rows) for own in weights]
