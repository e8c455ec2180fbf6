"""BalancedMoELayer: Megatron-Core's MoE layer, with the balanced stages as its dispatcher.

    spec.submodules.mlp.module = BalancedMoELayer             # in the ModuleSpec of a layer
    spec.submodules.mlp.params = {"slots": 1}                 # see `Balancer`
    spec = balanced(spec, config, slots=1)                    # or all MoE layers of a spec

Router, experts, shared experts, recompute, parameters and checkpoints stay the library's. The
library calls the methods of a layer in turn and passes the result of each to the next.

Shapes: T local tokens, K experts per token, E experts, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn
from torch.func import functional_call

from ultraep.bundle import Stack
from ultraep.dispatch import Arrivals
from ultraep.errors import ConfigError
from ultraep.experts.loan import serve
from ultraep.integrations.common import Overlay, shared_balancer
from ultraep.integrations.megatron.settings import check_options, check_settings, choices, pads
from ultraep.layer import run_stages
from ultraep.microbatch import AnyPlan, Layer, Replicas
from ultraep.parallel.home import mesh_of
from ultraep.routing import Routing
from ultraep.runtime.balancer import Balancer

PARAM_GATHER_HOOK = "DistributedDataParallel._make_forward_pre_hook"


class BalancedMoELayer(MoELayer):  # type: ignore[misc]
    """A MoE layer that balances every microbatch, for a ModuleSpec.

    slots, policy, options: see `Balancer`; set them in `params` of the ModuleSpec. Layers with the
        same options share a balancer and its spare slots.
    pg_collection: process groups; None: the groups of `parallel_state`. TransformerLayer passes
        its own groups to the library's classes only; pass custom groups in `params`.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        *,
        slots: int = 1,
        policy: str | None = None,
        **options: Any,
    ) -> None:
        check_settings(config)
        check_options(options)
        check_spec(submodules.experts)
        pg_collection = pg_collection or get_default_pg_collection()
        balancer = shared_balancer(
            pg_collection.ep, config.num_moe_experts, slots=slots, policy=policy, **options
        )
        super().__init__(config, submodules, layer_number, pg_collection)
        if not isinstance(self.router, TopKRouter):
            raise ConfigError(
                f"the router must be a TopKRouter, which selects {config.moe_router_topk} experts "
                f"per token; got {type(self.router).__name__}"
            )
        without_fusion(self.experts)
        self.token_dispatcher = None
        self.balancer, self.layer_index = balancer, balancer.register_layer()
        self.last_plan: AnyPlan | None = None
        self._checked = False

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, Routing]:
        """Convert the `[T, E]` routing to `[T, K]` ids and gates."""
        top_k, padded = self.config.moe_router_topk, pads(self.config)
        return hidden_states, choices(probs, routing_map, top_k, padded=padded)

    def dispatch(self, hidden_states: torch.Tensor, probs: Routing) -> tuple[torch.Tensor, Routing]:
        """Do nothing: `routed_experts_compute` dispatches after planning."""
        return hidden_states, probs

    def routed_experts_compute(
        self, hidden_states: torch.Tensor, probs: Routing
    ) -> tuple[torch.Tensor, None]:
        """Run all stages, from counting to combining."""
        ids, gates, _ = probs
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        if gates.requires_grad and not tokens.requires_grad:  # gate gradients travel with rows
            tokens = tokens.detach().requires_grad_()
        layer = Layer(self.layer_index, self._weights(), self._serve)
        outputs, self.last_plan = run_stages(self.balancer, layer, ids, gates, tokens)
        return outputs.view(hidden_states.shape), None

    def combine(self, output: torch.Tensor) -> torch.Tensor:
        """Do nothing: `routed_experts_compute` has combined the rows."""
        return output

    def postprocess(
        self, output: torch.Tensor, shared_expert_output: torch.Tensor | None
    ) -> torch.Tensor:
        """Add the outputs of the shared experts."""
        return output if shared_expert_output is None else output + shared_expert_output

    def _weights(self) -> dict[str, Any]:
        """Return the tensors of a replica."""
        wait_for_weights(self.experts)
        if not self._checked:
            check_plain(self.experts)
            self._checked = True
        return bundle_of(self.experts)

    def _serve(self, arrivals: Arrivals, replicas: Replicas) -> torch.Tensor:
        """Stage 6. The library's experts apply the gates themselves."""
        unused_gates = arrivals.gates

        def network(rows: torch.Tensor, counts: list[int], tensors: dict[str, Any]) -> torch.Tensor:
            nonlocal unused_gates  # of home rows at the first call, of replica rows at the second
            gates, unused_gates = unused_gates[: len(rows)], unused_gates[len(rows) :]
            return compute(self.experts, rows, counts, tensors, gates)

        ones = torch.ones_like(arrivals.gates)
        return serve(network, Arrivals(arrivals.rows, ones, arrivals.exchange), replicas)


def balanced(spec: Any, config: Any, **options: Any) -> Any:
    """Return a copy of a layer or block spec with `BalancedMoELayer` in place of `MoELayer`.

    config: the configuration of the model, which is checked here.
    options: see `BalancedMoELayer`.
    """
    check_settings(config)
    check_options(options)
    layers: list[Any] = []
    balanced_spec = _replaced(spec, options, layers)
    if not layers:
        raise ConfigError(f"this {type(spec).__name__} has no MoELayer to balance")
    return balanced_spec


def balanced_layers(model: nn.Module | Iterable[nn.Module]) -> list[BalancedMoELayer]:
    """Return the balanced layers of a model, or of its chunks, in order."""
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    return [m for chunk in chunks for m in chunk.modules() if isinstance(m, BalancedMoELayer)]


def balancers(model: nn.Module | Iterable[nn.Module]) -> list[Balancer]:
    """Return the balancers of a model, or of its chunks: one for each set of options."""
    return list(dict.fromkeys(layer.balancer for layer in balanced_layers(model)))


def _replaced(part: Any, options: dict[str, Any], layers: list[Any]) -> Any:
    """Return a part of a spec with its MoE layers replaced; append them to `layers`."""
    if isinstance(part, list):
        return [_replaced(inner, options, layers) for inner in part]
    if isinstance(part, ModuleSpec) and part.module is MoELayer:
        check_spec(part.submodules.experts)
        layers.append(part)
        return replace(part, module=BalancedMoELayer, params={**part.params, **options})
    if not is_dataclass(part) or isinstance(part, type):
        return part
    changed = {f.name: _replaced(getattr(part, f.name), options, layers) for f in fields(part)}
    return replace(part, **changed)


# -- the library's experts, run with other tensors -----------------------------------------------


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
