"""Beside DDP, FSDP2 and DCP: what is to be done because every rank has experts of its own.

    expert_parameters, dense_parameters   which parameters are a rank's own, and which are not
    data_parallel, leave_out_experts      DistributedDataParallel of all but the experts
    average_expert_gradients              experts at the scale that dense gradients have
    clip_grad_norm                        by the norm of all gradients of all ranks
    ShardedState                          model and optimizer for torch.distributed.checkpoint

What would damage experts in silence is refused: `wrapped.py` and `home.py`.
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
