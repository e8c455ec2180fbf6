"""Train with DDP, FSDP2 and DCP when every rank holds different experts.

    expert_parameters, dense_parameters   parameters that differ between ranks, and all others
    data_parallel, leave_out_experts      DistributedDataParallel without the experts
    average_expert_gradients              scale expert gradients like dense gradients
    clip_grad_norm                        clip by the norm of all gradients of all ranks
    ShardedState                          model and optimizer for torch.distributed.checkpoint

Wrappers that would silently damage experts are refused (`wrapped.py`, `home.py`).
"""

from ultraep.parallel.checkpoint import ShardedState
from ultraep.parallel.gradients import average_expert_gradients, clip_grad_norm
from ultraep.parallel.home import HomeModule, dense_parameters, expert_parameters
from ultraep.parallel.wrapped import data_parallel, leave_out_experts

__all__ = [
    "HomeModule",
    "ShardedState",
    "average_expert_gradients",
    "clip_grad_norm",
    "data_parallel",
    "dense_parameters",
    "expert_parameters",
    "leave_out_experts",
]
