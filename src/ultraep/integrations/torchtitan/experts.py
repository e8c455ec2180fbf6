"""Balanced routed experts of torchtitan.

The stages replace the framework's token dispatch. The framework's own module still holds the
parameters and computes all rows, on home weights and on replicas, so FSDP2, checkpoints and
gradient clipping see the same parameters as before.

Shapes: B sequences, L tokens of each, K experts per token, D model width, n rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import spmd_types
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import RoutedExperts

from ultraep.comm import moved
from ultraep.dispatch import Received, SlotRoutes
from ultraep.dispatchers.hybridep import check_slots, ranks_of_domain
from ultraep.errors import ConfigError
from ultraep.experts.custom import serve
from ultraep.integrations.common import run_layer, shared_balancer
from ultraep.integrations.torchtitan.check import ALL_TO_ALL, DEEPEP, HYBRIDEP
from ultraep.microbatch import AnyPlan, Layer
from ultraep.ops.compiled_op import handle_of, routed_experts
from ultraep.runtime.balancer import Balancer


class BalancedRoutedExperts(RoutedExperts):  # type: ignore[misc]
    """The routed experts of one layer.

    balancer: shared by all layers with the same number of experts and group.
    layer_index: index of the layer in the balancer, in the order in which layers first run.
    last_plan: the plan of the last microbatch.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):  # type: ignore[misc]
        """The framework's configuration plus the arguments of the `Balancer`."""

        balancer_options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._options = config.balancer_options
        self.balancer: Balancer | None = None
        self.layer_index: int | None = None
        self.last_plan: AnyPlan | None = None
        self._handle = handle_of(self)

    def parallelize(self, parallel_dims: Any) -> None:
        """Parallelize like the framework, then connect to the other ranks."""
        mesh, library, options = parallel_dims.get_mesh("ep"), self.token_dispatcher, self._options
        if type(library).__name__ != ALL_TO_ALL:  # the balancer replaces only the all-to-all
            library.num_experts += mesh.size() * options["slots"]  # it allocates for all slots
            options = options | {"dispatcher": FrameworkDispatcher(library)}
        super().parallelize(parallel_dims)
        experts = self.inner_experts.num_experts
        self.balancer = shared_balancer(mesh.get_group(), experts, **options)

    def forward(  # the framework shards these tensors by argument name
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,  # noqa: ARG002
    ) -> torch.Tensor:
        """Map `[B, L, D]` to `[B, L, D]`, with `[B, L, K]` gates and expert ids."""
        with spmd_types.no_typecheck():
            tokens, ids, gates = (
                t.flatten(0, 1) for t in (x_BLD, topk_expert_ids_BLK, topk_scores_BLK)
            )
            weights = home_tensors(self.inner_experts)
            if torch.compiler.is_compiling():
                y = routed_experts(self._handle, tokens, ids, gates, list(weights.values()))
            else:
                y = self._stages(tokens, ids, gates, weights)
            return y.view(x_BLD.shape)

    def run_routed(
        self,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        gates: torch.Tensor,
        weights: Sequence[torch.Tensor],
        policy: str | None,  # noqa: ARG002
    ) -> torch.Tensor:
        """Run the experts with these weights; compiled graphs call it."""
        names = [name for name, _ in self.inner_experts.named_parameters(recurse=False)]
        with spmd_types.no_typecheck():
            return self._stages(tokens, ids, gates, dict(zip(names, weights, strict=True)))

    def _stages(
        self,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        gates: torch.Tensor,
        weights: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        if self.balancer is None:
            raise ConfigError("balanced experts need a process group: call parallelize() first")
        if self.layer_index is None:  # the framework parallelizes the last layer first
            self.layer_index = self.balancer.register_layer()
        if type(self.token_dispatcher).__name__ == DEEPEP:
            ids = ids.masked_fill(gates == 0, -1)  # rows that it leaves out
        network = partial(compute, self.inner_experts)
        layer = Layer(self.layer_index, weights, partial(serve, network))
        return run_layer(self, layer, ids, gates, tokens)


class FrameworkDispatcher:
    """A token dispatcher of the framework that moves the rows of a balancer by slot id.

    The framework's dispatchers multiply outputs by gates themselves.
    """

    ordered = True  # the framework's selective checkpointing keeps the rows that it received

    def __init__(self, library: Any) -> None:
        self._library = library
        self.padding = type(library).__name__ != HYBRIDEP  # the framework has none

    def __repr__(self) -> str:  # layers with equal dispatchers share a balancer
        library = self._library
        return f"{type(library).__name__}({library.num_experts}, top_k={library.top_k})"

    def check_slots(self, ranks: int, slots_per_rank: int) -> None:
        if type(self._library).__name__ == HYBRIDEP:
            check_slots(ranks_of_domain(ranks), slots_per_rank)

    def dispatch(
        self, tokens_TD: torch.Tensor, gates_TK: torch.Tensor, routes: SlotRoutes
    ) -> Received:
        chosen = routes.slots[routes.slots >= 0]
        counts = torch.bincount(chosen, minlength=routes.num_slots)
        rows, arrived, state = self._library.dispatch(tokens_TD, gates_TK, routes.slots, counts)
        return Received(rows, rows.new_ones(len(rows)), arrived, state)

    def combine(self, outputs_AD: torch.Tensor, received: Received) -> torch.Tensor:
        y_TD: torch.Tensor = self._library.combine(outputs_AD, received.state, None)
        return y_TD


def home_tensors(experts: nn.Module) -> dict[str, torch.Tensor]:
    """Return the local expert tensors, gathered by FSDP2 for this pass."""
    own = experts.named_parameters(recurse=False)
    return {name: p.to_local() if isinstance(p, DTensor) else p for name, p in own}


def compute(
    experts: nn.Module, rows: torch.Tensor, counts: list[int], tensors: dict[str, Any]
) -> torch.Tensor:
    """Run the framework's module on `[n, D]` rows with these tensors."""
    inputs = rows, moved(torch.tensor(counts), rows.device)
    outputs: torch.Tensor = torch.func.functional_call(experts, tensors, inputs)
    return outputs.to(rows.dtype)
