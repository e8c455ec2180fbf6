"""Gradients of experts beside dense ones: the same scale, and one norm.

The loss of a rank is a mean over its tokens; the loss of the job is the mean over all W ranks. DDP
and FSDP2 average dense gradients over W. Gradients of home experts arrive as sums over the losses
of the expert-parallel group; ranks of other groups that hold the same experts have sums of their
own. All of these together, divided by W, are the gradients of the loss of the job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm

from ultraep.errors import ConfigError
from ultraep.parallel.home import ranks_of_experts, strangers
from ultraep.parallel.tensors import local, mesh_of, pieces

SMALLEST = 1e-6  # a norm to divide by


@torch.no_grad()
def average_expert_gradients(
    model: nn.Module, dp_replicas: dist.ProcessGroup | None = None
) -> None:
    """Make the gradients of experts averages over all ranks; once a step, after the last backward.

    dp_replicas: the ranks with the same experts as this one, all of which call this; None: there are no
        others. Of parameters that `fully_shard` manages, it has averaged the gradients over them.
    """
    of_groups: dict[tuple[int, ...], list[torch.Tensor]] = defaultdict(list)
    for parameter, spread in ranks_of_experts(model).items():
        if parameter.grad is not None:
            of_groups[spread].append(parameter.grad)
    for spread, gradients in of_groups.items():
        plain = [gradient for gradient in gradients if mesh_of(gradient) is None]
        if plain:
            check_dp_replicas(dp_replicas, spread)
            add_up(plain, dp_replicas)
            torch._foreach_div_(
                plain, len(spread) * (dp_replicas.size() if dp_replicas is not None else 1)
            )
        sharded = [local(gradient) for gradient in gradients if mesh_of(gradient) is not None]
        if sharded:
            torch._foreach_div_(sharded, len(spread))


def check_dp_replicas(dp_replicas: dist.ProcessGroup | None, spread: Sequence[int]) -> None:
    """Whether these can be the ranks with the same experts, and all of them."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    if dp_replicas is None and size > len(spread):
        raise ConfigError(
            f"there are {size} ranks, and the experts are spread over {len(spread)}: pass dp_replicas=, "
            "the ranks with the same experts as this one; if there are no others, a group of one"
        )
    together = dist.get_process_group_ranks(dp_replicas) if dp_replicas is not None else []
    if strangers(together, spread):
        raise ConfigError(
            f"ranks {together} are not dp_replicas: the experts are spread over {list(spread)}"
        )


def add_up(gradients: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Sums over the ranks of a group, in place."""
    if group is None:
        return
    pending = [dist.all_reduce(gradient, group=group, async_op=True) for gradient in gradients]
    for work in pending:
        work.wait()


@torch.no_grad()
def clip_grad_norm(
    model: nn.Module, max_norm: float, *, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Limit the norm of all gradients to `max_norm`; what it was before, the same on all ranks.

    Every expert counts once, wherever it is at home and however many ranks have it, and so does
    every dense parameter, sharded or not. Comes after `average_expert_gradients`.

    group: all ranks of the job, among which one number is summed up; None: the default group.
    """
    gradients: dict[int, list[torch.Tensor]] = defaultdict(list)
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    spread = ranks_of_experts(model)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parts = len(spread.get(parameter, [0])) * pieces(parameter.grad)
            gradients[parts].append(local(parameter.grad))
    for parts, found in gradients.items():  # one of so many parts: size / parts ranks have it
        total += parts * get_total_norm(found).double().square()
    if dist.is_initialized():
        dist.all_reduce(total, group=group)
        total /= dist.get_world_size(group)
    norm = total.sqrt()
    factor = (max_norm / (norm + SMALLEST)).clamp(max=1.0)
    for found in gradients.values():
        torch._foreach_mul_(found, factor)
    return norm
