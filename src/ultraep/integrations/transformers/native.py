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
from torch.distributed.tensor import DTensor, Replicate, Shard

from ultraep.errors import ConfigError
from ultraep.integrations.common import expect_layer, logger, outcome
from ultraep.integrations.transformers.experts import bundle_of, stages
from ultraep.integrations.transformers.quantised import check_native, freeze_fp8
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
        if not self.experts:
            logger.info(outcome(0, "no model was created with DistributedConfig(ep_size=...)"))
        ALL_PARALLEL_STYLES.register(STYLE, self._before)

    def install_forward(
        self, module: Any, ep_mesh: Any, *, tp_mesh: Any = None, ep_implementation: str = "auto"
    ) -> Any:
        """Replace the forward of an experts module; called by the library after sharding."""
        if ep_implementation != "auto":
            raise ConfigError(
                f"enable() replaces ep_implementation={ep_implementation!r} of DistributedConfig: "
                'leave it at "auto", or call disable() first'
            )
        check_native(module)
        group, experts = ep_mesh.get_group(), module.num_experts * ep_mesh.size()
        if (group, experts) not in self.balancers:
            self.balancers[group, experts] = Balancer(group, experts=experts, **self._options)
        balancer = self.balancers[group, experts]
        module.original_class, module.last_plan = type(module), None
        module.balancer, module.layer_index = balancer, balancer.register_layer()
        self.experts.append(module)
        expect_layer(balancer)
        split = tp_mesh is not None and tp_mesh.size() > 1  # ranks with the same batch

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(module: Any, *inputs: torch.Tensor) -> torch.Tensor:
            freeze_fp8(module)
            own = [t.to_local() if isinstance(t, DTensor) else t for t in inputs]
            own = [_slice(t, tp_mesh) for t in own] if split else own
            with self.context_around_forward(module, ep_mesh):
                y = stages(module, bundle_of(module), *own)
            return _join(y, len(inputs[0]), tp_mesh) if split else y

        module.forward = MethodType(forward, module)
        return module


def _slice(batch: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Return the rows of this rank; the ranks of a mesh have the same batch."""
    whole = DTensor.from_local(batch, mesh, [Replicate()], run_check=False)
    return whole.redistribute(mesh, [Shard(0)]).to_local()


def _join(rows: torch.Tensor, tokens: int, mesh: Any) -> torch.Tensor:
    """Undo `_slice`, also for slices of different lengths."""
    width = rows.shape[-1]
    shape, stride = torch.Size((tokens, width)), (width, 1)
    slices = DTensor.from_local(rows.contiguous(), mesh, [Shard(0)], shape=shape, stride=stride)
    return slices.full_tensor()
