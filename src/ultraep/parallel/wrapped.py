"""DistributedDataParallel for models with experts; refuses wrappers that would damage experts.

DDP and FSDP assume that a parameter is the same on all ranks: they broadcast it from the first rank
and average its gradients, or shard it. A torch hook sees every module that a wrapper takes over,
before the wrapper writes anything.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ultraep.errors import ConfigError
from ultraep.parallel.home import expert_parameters, hold_different_experts, home_modules

IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"


def data_parallel(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """Wrap a model in DistributedDataParallel without its expert parameters."""
    leave_out_experts(model)
    return DistributedDataParallel(model, **options)


def leave_out_experts(model: nn.Module) -> None:
    """Make DistributedDataParallel ignore the experts of a model, wherever it is wrapped."""
    ignored = [*getattr(model, IGNORED_BY_DDP, ()), *expert_parameters(model)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)


def check_wrapper(wrapper: Any, attribute: str, model: nn.Module) -> None:
    """Refuse a wrapper that treats the experts of different ranks as one parameter."""
    if isinstance(wrapper, DistributedDataParallel) and attribute == "module":
        names = wrapper.parameters_to_ignore
        ignored = {p for name, p in model.named_parameters() if name in names}
        fix = "ultraep.parallel.data_parallel(model)"
    elif attribute == "_fsdp_wrapped_module":  # FSDP1, which takes seconds to import
        ignored, fix = wrapper._ignored_params, "ignored_states=, or better with fully_shard"
    else:
        return
    ranks = dist.get_process_group_ranks(wrapper.process_group)
    for name, module in home_modules(model).items():
        own = set(module.parameters())  # empty if they are already part of a flat parameter
        if hold_different_experts(ranks, module.ranks) and (not own or own - ignored):
            raise ConfigError(
                f"{type(wrapper).__name__} would treat {name!r} as the same on ranks {ranks}, but "
                f"each of ranks {list(module.ranks)} has other experts: exclude them with {fix}"
            )


register_module_module_registration_hook(check_wrapper)
