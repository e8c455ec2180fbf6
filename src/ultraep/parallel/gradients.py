"""Scale and clip the gradients of experts together with dense gradients.

The loss of a rank is the mean over its tokens; the loss of the job is the mean over all W ranks.
DDP and FSDP2 average dense gradients over W. Gradients of home experts arrive as sums over their
expert-parallel group. Summed over the DP replicas of that group and divided by W, they are the
gradients of the loss of the job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm

from ultraep.errors import ConfigError
from ultraep.parallel.home import (
    hold_different_experts,
    local,
    mesh_of,
    num_shards,
    ranks_of_experts,
)

SMALLEST = 1e-6  # added to the norm before dividing


@torch.no_grad()
def average_expert_gradients(
    model: nn.Module, dp_replicas: dist.ProcessGroup | None = None
) -> None:
    """Average the gradients of experts over all ranks. Call once per step, after backward.

    dp_replicas: the group of ranks that hold the same experts as this rank, all of which make this
        call. None: no other rank holds them. Gradients under `fully_shard` are already averaged
        over this group.
    """
    gradients_by_ranks: dict[tuple[int, ...], list[torch.Tensor]] = defaultdict(list)
    for parameter, ranks in ranks_of_experts(model).items():
        if parameter.grad is not None:
            gradients_by_ranks[ranks].append(parameter.grad)
    for ranks, gradients in gradients_by_ranks.items():
        plain = [gradient for gradient in gradients if mesh_of(gradient) is None]
        if plain:
            _check_dp_replicas(dp_replicas, ranks)
            if dp_replicas is not None:
                pending = [dist.all_reduce(g, group=dp_replicas, async_op=True) for g in plain]
                for work in pending:
                    work.wait()
            torch._foreach_div_(plain, len(ranks) * (dp_replicas.size() if dp_replicas else 1))
        sharded = [local(gradient) for gradient in gradients if mesh_of(gradient) is not None]
        if sharded:
            torch._foreach_div_(sharded, len(ranks))


def _check_dp_replicas(dp_replicas: dist.ProcessGroup | None, expert_ranks: Sequence[int]) -> None:
    """Raise unless this group can be all ranks that hold the same experts."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if dp_replicas is None and world > len(expert_ranks):
        raise ConfigError(
            f"the job has {world} ranks, but the experts are spread over {len(expert_ranks)}: pass "
            "dp_replicas=, the group of ranks with the same experts, or a group of this rank alone"
        )
    group = dist.get_process_group_ranks(dp_replicas) if dp_replicas is not None else []
    if hold_different_experts(group, expert_ranks):
        raise ConfigError(
            f"dp_replicas must be ranks that hold the same experts, but ranks {group} belong to "
            f"one expert-parallel group, ranks {list(expert_ranks)}, and hold different experts"
        )


@torch.no_grad()
def clip_grad_norm(
    model: nn.Module, max_norm: float, *, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; return the norm before.

    The norm is the same on all ranks: it counts every expert and every dense parameter once,
    however they are sharded. Call after `average_expert_gradients`.

    group: all ranks of the job; None: the default group. One number is all-reduced.
    """
    gradients_by_parts: dict[int, list[torch.Tensor]] = defaultdict(list)
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    expert_ranks = ranks_of_experts(model)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parts = len(expert_ranks.get(parameter, [0])) * num_shards(parameter.grad)
            gradients_by_parts[parts].append(local(parameter.grad))
    # Each of `parts` parts is on world / parts ranks.
    for parts, gradients in gradients_by_parts.items():
        total += parts * get_total_norm(gradients).double().square()
    if dist.is_initialized():
        dist.all_reduce(total, group=group)
        total /= dist.get_world_size(group)
    norm = total.sqrt()
    factor = (max_norm / (norm + SMALLEST)).clamp(max=1.0)
    for gradients in gradients_by_parts.values():
        torch._foreach_mul_(gradients, factor)
    return norm
