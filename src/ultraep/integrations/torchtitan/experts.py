"""Routed experts of torchtitan, balanced: its router and experts, with our stages between them.

Parameters stay those of the framework's own module, which computes all rows: on home weights as the
framework has spread them, and on copies. FSDP2, checkpoints and the norm of gradients see the same
parameters as before.

Shapes: B sequences, L tokens of each, K experts per token, D model width, n rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import spmd_types
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import RoutedExperts

from ultraep.comm import moved
from ultraep.errors import ConfigError
from ultraep.experts.loan import serve
from ultraep.integrations.common import shared_balancer
from ultraep.layer import run_stages
from ultraep.microbatch import AnyPlan, Layer
from ultraep.runtime.balancer import Balancer

COMPILED = (
    "ranks speak to each other inside of balanced experts, which cannot be compiled: leave 'model' "
    "out of --compile.components"
)


class BalancedRoutedExperts(RoutedExperts):  # type: ignore[misc]
    """The routed experts of one layer.

    balancer: of all layers with as many experts, in the same expert-parallel group.
    layer_index: its number there, in the order in which layers first run.
    last_plan: of the last microbatch.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):  # type: ignore[misc]
        """That of the framework, and what a `Balancer` is made with."""

        balancer_options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._options = config.balancer_options
        self.balancer: Balancer | None = None
        self.layer_index: int | None = None
        self.last_plan: AnyPlan | None = None

    def parallelize(self, parallel_dims: Any) -> None:
        """Spread the experts as the framework does, and meet the other ranks."""
        super().parallelize(parallel_dims)
        group = parallel_dims.get_mesh("ep").get_group()
        self.balancer = shared_balancer(group, self.inner_experts.num_experts, **self._options)

    @torch.compiler.disable(reason=COMPILED)  # type: ignore[untyped-decorator]
    def forward(  # the names are part of how the framework spreads these tensors
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,  # noqa: ARG002
    ) -> torch.Tensor:
        """[B, L, D] -> [B, L, D]; `[B, L, K]` gates and ids of experts."""
        with spmd_types.no_typecheck():
            flat = (t.flatten(0, 1) for t in (x_BLD, topk_expert_ids_BLK, topk_scores_BLK))
            return self._stages(*flat).view(x_BLD.shape)

    def _stages(self, tokens: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        if self.balancer is None:
            raise ConfigError("balanced experts run only after parallelize, in their group")
        if self.layer_index is None:
            self.layer_index = self.balancer.register_layer()
        network = partial(compute, self.inner_experts)
        layer = Layer(self.layer_index, home_tensors(self.inner_experts), partial(serve, network))
        outputs, self.last_plan = run_stages(self.balancer, layer, ids, gates, tokens)
        return outputs


def home_tensors(experts: nn.Module) -> dict[str, torch.Tensor]:
    """What this rank has of the experts, gathered by FSDP2 for this pass."""
    own = experts.named_parameters(recurse=False)
    return {name: p.to_local() if isinstance(p, DTensor) else p for name, p in own}


def compute(
    experts: nn.Module, rows: torch.Tensor, counts: list[int], tensors: dict[str, Any]
) -> torch.Tensor:
    """[n, D] -> [n, D] by the framework's module, with these tensors in place of its own."""
    given = rows, moved(torch.tensor(counts), rows.device)
    outputs: torch.Tensor = torch.func.functional_call(experts, tensors, given)
    return outputs.to(rows.dtype)
