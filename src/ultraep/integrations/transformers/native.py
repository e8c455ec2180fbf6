"""Balance the library's own expert parallelism.

    enable(slots=1)
    config = DistributedConfig(fsdp_size=8, ep_size=8)
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)

The stages replace the library's dispatch; loading, FSDP2, gradients and checkpoints stay its own.
The library looks up its dispatcher in a registry when it builds a model.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

from ultraep.errors import ConfigError
from ultraep.integrations.transformers.experts import stacked_tensors, stages
from ultraep.integrations.transformers.quantised import freeze_fp8
from ultraep.policies import running_policy
from ultraep.runtime.balancer import Balancer
from ultraep.supported import OWN_EXPERT_PARALLELISM

OWN_EXPERT_PARALLELISM.check()  # before importing it

from transformers.distributed.expert_parallel import (  # noqa: E402
    ALL_PARALLEL_STYLES,
    EpDispatchExpertsParallel,
)

STYLE = "ep_dispatch_experts"


def enable(slots: int = 1, policy: str | None = None, **options: Any) -> BalancedDispatch:
    """Balance models created from now on with `DistributedConfig(ep_size=...)`.

    slots, policy, options: see `Balancer`. All ranks call it. The result lists the balancers; its
    `disable()` ends it for new models, existing models stay balanced.
    """
    if policy is not None:
        running_policy(policy)
    before = ALL_PARALLEL_STYLES[STYLE]
    if isinstance(before, BalancedDispatch):
        raise ConfigError("balancing is already enabled: call disable() on the earlier result")
    style = BalancedDispatch(before, {"slots": slots, "policy": policy, **options})
    ALL_PARALLEL_STYLES.register(STYLE, style)
    return style


class BalancedDispatch(EpDispatchExpertsParallel):  # type: ignore[misc]
    """The dispatcher in the library's registry.

    balancers: by group and number of experts.   experts: the balanced modules.
    """

    def __init__(self, before: Any, options: dict[str, Any]) -> None:
        self._before, self._options = before, options
        self.balancers: dict[Any, Balancer] = {}
        self.experts: list[Any] = []

    def disable(self) -> None:
        """Restore the library's dispatcher for new models."""
        ALL_PARALLEL_STYLES.register(STYLE, self._before)

    def install_forward(self, module: Any, ep_mesh: Any, *, tp_mesh: Any = None) -> Any:
        """Replace the forward of an experts module; called by the library after sharding."""
        group, experts = ep_mesh.get_group(), module.num_experts * ep_mesh.size()
        if (group, experts) not in self.balancers:
            self.balancers[group, experts] = Balancer(group, experts=experts, **self._options)
        balancer = self.balancers[group, experts]
        module.original_class, module.last_plan = type(module), None
        module.balancer, module.layer_index = balancer, balancer.register_layer()
        self.experts.append(module)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(module: Any, *inputs: torch.Tensor) -> torch.Tensor:
            freeze_fp8(module)
            tokens = len(inputs[0])  # before ranks with the same batch split it
            inputs, _ = self.transform_inputs_pre_forward(
                module, inputs, {}, ep_mesh, tp_mesh=tp_mesh
            )
            with self.context_around_forward(module, ep_mesh):
                y, module.last_plan = stages(module, stacked_tensors(module), *inputs)
            output: torch.Tensor = self.transform_output_post_forward(
                module, y, ep_mesh, tp_mesh=tp_mesh, num_tokens=tokens
            )
            return output

        module.forward = MethodType(forward, module)
        return module
