"""BalancedMoELayer: Megatron-Core's MoE layer with our stages in place of its dispatcher.

    spec.submodules.mlp.module = BalancedMoELayer             # of a layer's ModuleSpec
    spec.submodules.mlp.params = {"slots": 1}                 # see `Balancer`
    spec = balanced(spec, config, slots=1)                    # or all MoE layers of a spec

Router, experts, shared experts, recompute, parameters and checkpoints stay the library's. It calls
the methods of a layer one after the other, and hands on what each returns.

Shapes: T local tokens, K experts per token, E experts, D model width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

import ultraep.integrations.megatron.experts as own
from ultraep.dispatch import Arrivals
from ultraep.errors import ConfigError
from ultraep.experts.loan import serve
from ultraep.integrations.common import shared_balancer
from ultraep.integrations.megatron.settings import check_options, check_settings, choices, pads
from ultraep.layer import run_stages
from ultraep.microbatch import AnyPlan, Layer, Replicas
from ultraep.routing import Routing
from ultraep.runtime.balancer import Balancer


class BalancedMoELayer(MoELayer):  # type: ignore[misc]
    """A MoE layer that balances every microbatch, for a ModuleSpec.

    slots, policy, options: see `Balancer`; `params` of the ModuleSpec. Layers with the same ones
    share a balancer, and its spare slots.
    pg_collection: process groups; None: those of `parallel_state`. TransformerLayer hands its own
        to no class but the library's: who made some gives them in `params` as well.
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
        own.check_spec(submodules.experts)
        pg_collection = pg_collection or get_default_pg_collection()
        balancer = shared_balancer(
            pg_collection.ep, config.num_moe_experts, slots=slots, policy=policy, **options
        )
        super().__init__(config, submodules, layer_number, pg_collection)
        if not isinstance(self.router, TopKRouter):
            raise ConfigError(
                f"choices of {type(self.router).__name__} are not known to be "
                f"{config.moe_router_topk} for a token: a TopKRouter is needed"
            )
        own.without_fusion(self.experts)
        self.token_dispatcher = None
        self.balancer, self.layer_index = balancer, balancer.register_layer()
        self.last_plan: AnyPlan | None = None
        self._checked = False

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, Routing]:
        """What the router decided, as ids and gates: `[T, E]` -> `[T, K]`."""
        return hidden_states, choices(
            probs, routing_map, self.config.moe_router_topk, padded=pads(self.config)
        )

    def dispatch(self, hidden_states: torch.Tensor, probs: Routing) -> tuple[torch.Tensor, Routing]:
        """Nothing yet: rows are sent when it is planned where."""
        return hidden_states, probs

    def routed_experts_compute(
        self, hidden_states: torch.Tensor, probs: Routing
    ) -> tuple[torch.Tensor, None]:
        """All stages: loads, plan, replicate, reroute, dispatch, experts, combine."""
        ids, gates, _ = probs
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        if gates.requires_grad and not tokens.requires_grad:  # rows must take gates' gradients back
            tokens = tokens.detach().requires_grad_()
        layer = Layer(self.layer_index, self._weights(), self._serve)
        outputs, self.last_plan = run_stages(self.balancer, layer, ids, gates, tokens)
        return outputs.view(hidden_states.shape), None

    def combine(self, output: torch.Tensor) -> torch.Tensor:
        """Nothing more: rows are back."""
        return output

    def postprocess(
        self, output: torch.Tensor, shared_expert_output: torch.Tensor | None
    ) -> torch.Tensor:
        """Outputs of routed and of shared experts."""
        return output if shared_expert_output is None else output + shared_expert_output

    def _weights(self) -> dict[str, Any]:
        """What a copy of an expert consists of, as it is now."""
        own.wait_for_weights(self.experts)
        if not self._checked:
            own.check_plain(self.experts)
            self._checked = True
        return own.bundle_of(self.experts)

    def _serve(self, arrivals: Arrivals, replicas: Replicas) -> torch.Tensor:
        """Stage 6. Experts apply gates themselves, in the place where the library does."""
        begins = arrivals.begins()
        ends = begins[replicas.num_homes], begins[-1]
        parts = arrivals.gates[: ends[0]], arrivals.gates[ends[0] : ends[1]]
        gates = iter([part for part in parts if len(part)])  # homes, copies: whoever has rows

        def network(rows: torch.Tensor, counts: list[int], tensors: dict[str, Any]) -> torch.Tensor:
            return own.compute(self.experts, rows, counts, tensors, next(gates))

        ones = torch.ones_like(arrivals.gates)
        return serve(network, Arrivals(arrivals.rows, ones, arrivals.exchange), replicas)


def balanced(spec: Any, config: Any, **options: Any) -> Any:
    """A spec with a `BalancedMoELayer` wherever this one, of a layer or a block, has a MoELayer.

    config: what the model is to be built with; it is refused now if it cannot be balanced.
    options: see `BalancedMoELayer`.   The spec that is given stays as it is.
    """
    check_settings(config)
    check_options(options)
    found: list[Any] = []
    made = _replaced(spec, options, found)
    if not found:
        raise ConfigError(f"there is no MoELayer in this {type(spec).__name__}")
    return made


def balanced_layers(model: nn.Module | Iterable[nn.Module]) -> list[BalancedMoELayer]:
    """The balanced layers of a model, or of its chunks, in their order."""
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    return [m for chunk in chunks for m in chunk.modules() if isinstance(m, BalancedMoELayer)]


def balancers(model: nn.Module | Iterable[nn.Module]) -> list[Balancer]:
    """Who balances a model, or its chunks: one for each set of options."""
    return list({id(layer.balancer): layer.balancer for layer in balanced_layers(model)}.values())


def _replaced(part: Any, options: dict[str, Any], found: list[Any]) -> Any:
    """A part of a spec, with all that is in it; MoE layers of it go to `found`."""
    if isinstance(part, list):
        return [_replaced(one, options, found) for one in part]
    if isinstance(part, ModuleSpec) and part.module is MoELayer:
        own.check_spec(part.submodules.experts)
        found.append(part)
        return replace(part, module=BalancedMoELayer, params={**part.params, **options})
    if not is_dataclass(part) or isinstance(part, type):
        return part
    changed = {f.name: _replaced(getattr(part, f.name), options, found) for f in fields(part)}
    return replace(part, **changed)
