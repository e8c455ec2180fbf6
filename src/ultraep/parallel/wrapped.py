"""DistributedDataParallel of a model with experts, and what would damage these is refused.

A wrapper takes a parameter to be the same on all its ranks: it overwrites all others by those of
its first rank when it is made, then averages gradients, or keeps a part of it on every rank. Torch
tells of every module that becomes part of another, and a wrapper takes its model before it writes.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ultraep.errors import ConfigError
from ultraep.parallel.home import expert_parameters, home_modules, strangers


def data_parallel(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """DistributedDataParallel with these options, of all parameters but those of experts."""
    leave_out_experts(model)
    return DistributedDataParallel(model, **options)


def leave_out_experts(model: nn.Module) -> None:
    """Let DistributedDataParallel ignore the experts of a model, whoever makes it."""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())  # as others have said
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, [*ignored, *expert_parameters(model)]
    )


def check_wrapper(wrapper: nn.Module, attribute: str, model: nn.Module) -> None:
    """Refuse a wrapper that takes experts of different ranks to be the same parameter."""
    around: Any = wrapper
    if isinstance(wrapper, DistributedDataParallel) and attribute == "module":
        ignored = {p for name, p in model.named_parameters() if name in around.parameters_to_ignore}
        way = "ultraep.parallel.data_parallel(model)"
    elif attribute == "_fsdp_wrapped_module":  # the older FSDP, whose import takes seconds
        ignored, way = around._ignored_params, "ignored_states=, or better by fully_shard"
    else:
        return
    together = dist.get_process_group_ranks(around.process_group)
    for name, module in home_modules(model).items():
        own = set(module.parameters())  # none: they are part of something larger already
        if strangers(together, module.ranks) and (not own or own - ignored):
            raise ConfigError(
                f"{type(wrapper).__name__} would take {name!r} to be the same on ranks {together}, "
                f"but each of ranks {list(module.ranks)} has other experts: leave them out by {way}"
            )


register_module_module_registration_hook(check_wrapper)
