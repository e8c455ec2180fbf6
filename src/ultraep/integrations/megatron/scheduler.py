"""LoadPlanner: plans of ultraep for the MoE scheduler of Megatron-Core's development branch.

    scheduler = MoEScheduler(planner=LoadPlanner(slots=1), expert_dispatch=...)

The scheduler calls `update_placement` and `reroute` between router and token dispatcher. Its expert
dispatch sends the replicas and reduces their gradients. Every rank has H home experts, then S
replica slots. This module does not import Megatron-Core.

Shapes: T local tokens, E experts, R ranks of the expert-parallel group, S slots of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ultraep.arrays import PADDING
from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError
from ultraep.plan import Plan
from ultraep.plan import plan as make_plan
from ultraep.reroute import reroute_dense
from ultraep.topology import Topology


@dataclass(frozen=True, eq=False, slots=True)
class Placement:
    """The plan of one microbatch, from `update_placement` to `reroute`."""

    plan: Plan


class LoadPlanner(nn.Module):
    """A planner that meets the contract of `MoELoadPlanner`; the homes of experts stay fixed.

    slots: replica slots of a rank: `moe_scheduler_num_idle_experts` divided by the ranks.
    config: how to balance. Plans must not depend on measured rates, which the scheduler lacks.
    """

    planner_name = "ultra_ep"

    def __init__(self, slots: int = 1, config: BalanceConfig | None = None) -> None:
        super().__init__()
        self.slots = slots
        self.config = BalanceConfig(objective="balance") if config is None else config
        if self.config.objective == "time" and self.config.rates is None:
            raise ConfigError(
                "objective='time' needs rates, which the scheduler of Megatron-Core does not "
                "measure; use objective='balance', or pass rates="
            )

    def should_plan(
        self,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        context: Any,
        *,
        tokens_per_expert: torch.Tensor | None = None,
    ) -> bool:
        """Return whether replicas are possible: there are slots, and several ranks."""
        del probs, routing_map, tokens_per_expert
        return self.slots > 0 and context.ep_size > 1

    @torch.no_grad()
    def update_placement(
        self,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        context: Any,
        *,
        tokens_per_expert: torch.Tensor | None = None,
    ) -> tuple[None, torch.Tensor, Placement]:
        """Plan; return no home exchange, the `[R, S]` sources of all replicas, and the plan.

        A source is `rank * H + index` of its home expert; -1: empty. Collective.
        """
        topology = self._topology(routing_map, probs, context)
        loads = routing_map.sum(dim=0) if tokens_per_expert is None else tokens_per_expert
        loads_RE = gathered(loads, context)
        plan = make_plan(loads_RE.cpu().numpy(), topology, self.config)
        sources = torch.full((topology.ranks, self.slots), PADDING, dtype=torch.int32)
        for expert, host, slot in plan.replicas.tolist():
            sources[host, slot] = expert  # homes are contiguous, so this is rank * H + index
        return None, sources.to(routing_map.device), Placement(plan)

    def reroute(
        self,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        placement_result: Placement,
        context: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the `[T, R * (H + S)]` routing map and probabilities of the slots."""
        return reroute_dense(routing_map, probs, placement_result.plan, context.ep_rank)

    def step(self, completed_version: int | None = None) -> None:
        """Do nothing after an optimizer step: homes stay where they are."""
        if completed_version is not None:
            raise ConfigError(
                f"home exchange {completed_version} was completed, but this planner requests none"
            )

    def _topology(self, routing_map: torch.Tensor, probs: torch.Tensor, context: Any) -> Topology:
        experts, ranks = context.num_logical_experts, context.ep_size
        first = context.ep_rank * experts // ranks
        contiguous = tuple(range(first, first + experts // ranks))
        if tuple(context.local_expert_indices) != contiguous:
            raise ConfigError(
                f"rank {context.ep_rank} must hold experts {list(contiguous)}, but holds "
                f"{list(context.local_expert_indices)}"
            )
        if routing_map.shape != probs.shape or routing_map.shape[1] != experts:
            raise ConfigError(
                f"routing_map and probs must be [tokens, {experts}], got "
                f"{list(routing_map.shape)} and {list(probs.shape)}"
            )
        return _topology(ranks, experts, self.slots)


@lru_cache(maxsize=16)
def _topology(ranks: int, experts: int, slots: int) -> Topology:
    return Topology(ranks=ranks, experts=experts, slots=slots)


def gathered(loads_E: torch.Tensor, context: Any) -> torch.Tensor:
    """Return the `[R, E]` loads of all ranks of the expert-parallel group; collective."""
    loads_E = loads_E.to(torch.int64).contiguous()
    if context.ep_size == 1:
        return loads_E[None]
    each = [torch.empty_like(loads_E) for _ in range(context.ep_size)]
    dist.all_gather(each, loads_E, group=context.pg_collection.ep)
    return torch.stack(each)
