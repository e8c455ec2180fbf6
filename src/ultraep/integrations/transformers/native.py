"""The library's own expert parallelism, with our stages in place of its dispatch.

    enable(slots=1)
    config = DistributedConfig(fsdp_size=8, ep_size=8)
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)

Loading, sharding by FSDP2, gradients and checkpoints stay the library's. It asks a registry how to
dispatch tokens when it makes a model: an entry of ours answers.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from ultraep.errors import ConfigError
from ultraep.integrations.library import OWN_EXPERT_PARALLELISM
from ultraep.integrations.transformers.experts import stacked_tensors, stages
from ultraep.policies import get_policy
from ultraep.runtime.balancer import Balancer

OWN_EXPERT_PARALLELISM.check()  # before what needs it

from transformers.distributed.expert_parallel import (  # noqa: E402
    ALL_PARALLEL_STYLES,
    EpDispatchExpertsParallel,
)

STYLE = "ep_dispatch_experts"


def enable(slots: int = 1, policy: str = "ultraep", **options: Any) -> BalancedDispatch:
    """Balance the models that are made from now on with `DistributedConfig(ep_size=...)`.

    slots, policy, options: see `Balancer`. All ranks call it. What is returned knows the balancers,
    and `disable()` ends it; models that were made meanwhile stay balanced.
    """
    get_policy(policy)
    before = ALL_PARALLEL_STYLES[STYLE]
    if isinstance(before, BalancedDispatch):
        raise ConfigError("balancing is enabled already: disable() what enable returned before")
    style = BalancedDispatch(before, {"slots": slots, "policy": policy, **options})
    ALL_PARALLEL_STYLES.register(STYLE, style)
    return style


class BalancedDispatch(EpDispatchExpertsParallel):  # type: ignore[misc]
    """How tokens reach experts, for the library's registry.

    balancers: by their group and number of experts.   experts: the modules that it balances.
    """

    def __init__(self, before: Any, options: dict[str, Any]) -> None:
        self._before, self._options = before, options
        self.balancers: dict[Any, Balancer] = {}
        self.experts: list[NativeExperts] = []

    def disable(self) -> None:
        """Let the library dispatch tokens of the models that are made from now on."""
        ALL_PARALLEL_STYLES.register(STYLE, self._before)

    def install_forward(self, module: Any, ep_mesh: Any, *, tp_mesh: Any = None) -> Any:
        """Called by the library, for every module of experts, when each rank has its part."""
        group, experts = ep_mesh.get_group(), module.num_experts * ep_mesh.size()
        if (group, experts) not in self.balancers:
            made = Balancer(group, experts=experts, **self._options)
            self.balancers[group, experts] = made
        self.experts.append(NativeExperts(module, self.balancers[group, experts]))
        module.forward = MethodType(self._forward_of(self.experts[-1], ep_mesh, tp_mesh), module)
        return module

    def _forward_of(self, experts: NativeExperts, ep_mesh: Any, tp_mesh: Any) -> Any:
        """The forward of a module: the library's way in and out, and our stages between."""

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(module: Any, *given: torch.Tensor) -> torch.Tensor:
            tokens = len(given[0])  # before ranks that have the same batch split it
            given, _ = self.transform_inputs_pre_forward(
                module, given, {}, ep_mesh, tp_mesh=tp_mesh
            )
            with self.context_around_forward(module, ep_mesh):
                y, experts.last_plan = stages(experts, stacked_tensors(module), *given)
            ours: torch.Tensor = self.transform_output_post_forward(
                module, y, ep_mesh, tp_mesh=tp_mesh, num_tokens=tokens
            )
            return ours

        return forward


class NativeExperts:
    """A module of experts that the library spread over ranks, and who balances it."""

    def __init__(self, module: nn.Module, balancer: Balancer) -> None:
        self.kind, self._module = type(module), module
        self.balancer, self.layer_index = balancer, balancer.register_layer()
        self.last_plan: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
