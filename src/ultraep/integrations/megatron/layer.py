"""BalancedMoELayer: Megatron-Core's MoE layer, with the balanced stages as its dispatcher.

    spec.submodules.mlp.module = BalancedMoELayer             # in the ModuleSpec of a layer
    spec.submodules.mlp.params = {"slots": 1}                 # see `Balancer`
    spec = balanced(spec, config, slots=1)                    # or all MoE layers of a spec

Router, experts, shared experts, recompute, parameters and checkpoints stay the library's. The
library calls the methods of a layer in turn and passes the result of each to the next.

Shapes: T local tokens, K experts per token, E experts, S slots of all ranks, A arrived rows, D
model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

from ultraep.bundle import Bundle
from ultraep.dispatch import Received, SlotRoutes
from ultraep.dispatchers.hybridep import check_slots, ranks_of_domain
from ultraep.errors import ConfigError
from ultraep.integrations.common import Overlay, run_layer, shared_balancer, stays_unchanged
from ultraep.integrations.megatron.experts import (
    adapter_for,
    check_plain,
    check_spec,
    parts_of,
    wait_for_weights,
)
from ultraep.integrations.megatron.settings import check_options, check_settings, choices, pads
from ultraep.layer import Routing
from ultraep.microbatch import AnyPlan, Layer
from ultraep.runtime.balancer import Balancer
from ultraep.supported import FLEX_DEEPEP

# Arguments that later versions pass to every MoE layer; this version may lack some.
OF_LIBRARY = {"is_mtp_layer", "name"}
Stage = TypeVar("Stage", bound=Callable[..., Any])


def replaces_library(method: Stage) -> Stage:
    """Run a method in place of the library's, unless the layer stays unchanged."""

    @wraps(method)
    def chosen(self: Any, *inputs: Any) -> Any:
        own = getattr(MoELayer, method.__name__) if self._unchanged else method
        return own(self, *inputs)

    return chosen  # type: ignore[return-value]


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
        of_library = {name: options.pop(name) for name in OF_LIBRARY & options.keys()}
        check_settings(config)
        check_options(options)
        check_spec(submodules.experts, config)
        pg_collection = pg_collection or get_default_pg_collection()
        if config.moe_token_dispatcher_type == "flex":
            homes = config.num_moe_experts // pg_collection.ep.size()
            options["dispatcher"] = FlexDispatcher(config, pg_collection, homes + slots)
        balancer = shared_balancer(
            pg_collection.ep, config.num_moe_experts, slots=slots, policy=policy, **options
        )
        super().__init__(config, submodules, layer_number, pg_collection, **of_library)
        if not isinstance(self.router, TopKRouter):
            raise ConfigError(
                f"the router must be a TopKRouter, which selects {config.moe_router_topk} experts "
                f"per token; got {type(self.router).__name__}"
            )
        if balancer.topology.ranks > 1:
            self.token_dispatcher = None
        self._unchanged = False  # the library's own layer runs this microbatch
        self.balancer, self.layer_index = balancer, balancer.register_layer()
        self.last_plan: AnyPlan | None = None
        self._adapter = adapter_for(self.experts, slots)
        self._checked = False

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, Routing]:
        """Convert the `[T, E]` routing to `[T, K]` ids and gates, or leave it to the library."""
        self._unchanged = stays_unchanged(self.balancer)
        if self._unchanged:
            return super().preprocess(hidden_states, probs, routing_map)  # type: ignore[no-any-return]
        top_k, padded = self.config.moe_router_topk, pads(self.config)
        return hidden_states, choices(probs, routing_map, top_k, padded=padded)

    @replaces_library
    def dispatch(self, hidden_states: torch.Tensor, probs: Routing) -> tuple[torch.Tensor, Routing]:
        """Do nothing: `routed_experts_compute` dispatches after planning."""
        return hidden_states, probs

    @replaces_library
    def routed_experts_compute(
        self, hidden_states: torch.Tensor, probs: Routing
    ) -> tuple[torch.Tensor, None]:
        """Run all stages, from counting to combining."""
        ids, gates, _ = probs
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        if gates.requires_grad and not tokens.requires_grad:  # gate gradients travel with rows
            tokens = tokens.detach().requires_grad_()
        layer = Layer(self.layer_index, self._weights(), self._adapter.serve)
        return run_layer(self, layer, ids, gates, tokens).view(hidden_states.shape), None

    @replaces_library
    def combine(self, output: torch.Tensor) -> torch.Tensor:
        """Do nothing: `routed_experts_compute` has combined the rows."""
        return output

    @replaces_library
    def postprocess(
        self, output: torch.Tensor, shared_expert_output: torch.Tensor | None
    ) -> torch.Tensor:
        """Add the outputs of the shared experts."""
        return output if shared_expert_output is None else output + shared_expert_output

    def _weights(self) -> Bundle:
        """Return the tensors of a replica."""
        wait_for_weights(self.experts)
        if not self._checked:
            check_plain(self.experts)
            self._checked = True
        return self._adapter.bundle()


class FlexDispatcher:
    """Moves rows with a flex dispatcher of the library (DeepEP, HybridEP), by slot ids.

    The dispatcher of the library has one expert for every slot.
    """

    ordered = True  # as the received rows of both libraries

    def __init__(self, config: Any, pg_collection: Any, slots_per_rank: int) -> None:
        ranks, rank = pg_collection.ep.size(), pg_collection.ep.rank()
        self.backend = config.moe_flex_dispatcher_backend
        if self.backend == "deepep" and FLEX_DEEPEP.installed():
            FLEX_DEEPEP.check()
        self._config = Overlay(
            config,
            num_moe_experts=ranks * slots_per_rank,
            # DeepEP sends choices of probability 0 unless there is a capacity.
            moe_expert_capacity_factor=1.0,
            moe_pad_expert_input_to_capacity=False,
            moe_router_padding_for_quantization=False,
            fp8=None,  # experts pad the rows of every slot
        )
        slots = list(range(rank * slots_per_rank, (rank + 1) * slots_per_rank))
        self._library = MoEFlexTokenDispatcher(slots_per_rank, slots, self._config, pg_collection)

    def __repr__(self) -> str:
        return f"FlexDispatcher({self.backend})"  # layers with the same options share a balancer

    def check_slots(self, ranks: int, slots_per_rank: int) -> None:
        if self.backend == "hybridep":
            check_slots(ranks_of_domain(ranks), slots_per_rank)

    def dispatch(
        self, tokens_TD: torch.Tensor, gates_TK: torch.Tensor, routes: SlotRoutes
    ) -> Received:
        """Send every token to its slots; see `Dispatcher`."""
        library = copy(self._library)  # with the handle of this microbatch
        library._comm_manager = copy(library._comm_manager)
        # Padding goes to one more column, which is removed.
        columns = routes.slots.masked_fill(routes.slots < 0, routes.num_slots)
        like = gates_TK.new_zeros(len(gates_TK), routes.num_slots + 1, dtype=torch.float32)
        probs_TS = like.scatter(1, columns, gates_TK.float())[:, :-1]
        chosen_TS = like.bool().scatter(1, columns, True)[:, :-1]
        tokens_TD, _ = library.dispatch_preprocess(tokens_TD, chosen_TS, probs_TS)
        sent, probs = library.token_dispatch(
            tokens_TD, async_finish=False, allocate_on_comm_stream=False
        )
        rows_AD, counts, gates_A = library.dispatch_postprocess(sent, probs)
        return Received(rows_AD, gates_A.to(gates_TK.dtype), counts, state=library)

    def combine(self, outputs_AD: torch.Tensor, received: Received) -> torch.Tensor:
        """Return the `[T, D]` sums of the outputs of each token."""
        library = received.state
        rows = library.combine_preprocess(outputs_AD)
        rows = library.token_combine(rows, async_finish=False, allocate_on_comm_stream=False)
        sums: torch.Tensor = library.combine_postprocess(rows)
        return sums


def balanced(spec: Any, config: Any, **options: Any) -> Any:
    """Return a copy of a layer or block spec with `BalancedMoELayer` in place of `MoELayer`.

    config: the configuration of the model, which is checked here.
    options: see `BalancedMoELayer`.
    """
    check_settings(config)
    check_options(options)
    layers: list[Any] = []
    balanced_spec = _replaced(spec, config, options, layers)
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


def _replaced(part: Any, config: Any, options: dict[str, Any], layers: list[Any]) -> Any:
    """Return a part of a spec with its MoE layers replaced; append them to `layers`."""
    if isinstance(part, list):
        return [_replaced(inner, config, options, layers) for inner in part]
    if isinstance(part, ModuleSpec | partial) and parts_of(part)[0] is MoELayer:
        check_spec(parts_of(part)[1].experts, config)
        layers.append(part)
        if isinstance(part, ModuleSpec):
            return replace(part, module=BalancedMoELayer, params={**part.params, **options})
        layer: Any = BalancedMoELayer
        return partial(layer, *part.args, **part.keywords, **options)
    if not is_dataclass(part) or isinstance(part, type):
        return part
    changed = {
        f.name: _replaced(getattr(part, f.name), config, options, layers) for f in fields(part)
    }
    return replace(part, **changed)
