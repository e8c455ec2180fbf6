"""DistributedDataParallel of a model with experts of a rank's own."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ultraep.errors import ConfigError
from ultraep.parallel.home import expert_parameters, ranks_of_experts, strangers

_checked: WeakSet[DistributedDataParallel] = WeakSet()


def data_parallel(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """DistributedDataParallel with these options, of all parameters but those of experts."""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())  # by whoever else said so
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, [*ignored, *expert_parameters(model)]
    )
    return DistributedDataParallel(model, **options)


def check_data_parallel() -> None:
    """Refuse a DistributedDataParallel around this forward pass that takes experts for replicas."""
    around = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if around is None or around in _checked:
        return
    together = dist.get_process_group_ranks(around.process_group)
    ranks = ranks_of_experts(around.module)
    for name, parameter in expert_parameters(around.module).items():
        spread = ranks[parameter]
        if name not in around.parameters_to_ignore and strangers(together, spread):
            raise ConfigError(
                f"DistributedDataParallel takes {name!r} to be the same on ranks {together}, but "
                f"each of ranks {list(spread)} has other experts. When it was made, it wrote the "
                "experts of its first rank over all others: make the model anew, and wrap it by "
                "ultraep.parallel.data_parallel(model)"
            )
    _checked.add(around)
