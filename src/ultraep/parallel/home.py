"""Modules of home experts, whose parameters differ from rank to rank.

DDP and FSDP assume that a parameter is the same on all ranks. Expert parameters therefore carry
the ranks that the experts are spread over, and refuse to become one DTensor of several such ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ultraep.errors import ConfigError


class HomeModule(nn.Module):
    """A module whose parameters are stacked over the home experts of this rank.

    home_experts: the experts, in the order of the stack.
    ranks: the global ranks that all experts are spread over. Every parameter has them as its
        attribute `expert_ranks`.
    """

    home_experts: tuple[int, ...]
    ranks: tuple[int, ...] = (0,)

    def spread_over(self, balancer: Any) -> None:
        """Record the ranks of the balancer as the ranks of the experts."""
        group = balancer.group
        ranks = dist.get_process_group_ranks(group) if group else range(balancer.topology.ranks)
        self.ranks = tuple(ranks)
        self._mark()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; refuse a DTensor that spans ranks with different experts.

        `fully_shard`, `distribute_module` and others replace parameters by DTensors.
        """
        mesh = None if param is None else mesh_of(param)
        mesh_ranks = [] if mesh is None else mesh.mesh.flatten().tolist()
        if hold_different_experts(mesh_ranks, self.ranks):
            raise ConfigError(
                f"{name!r} of home experts would become one DTensor of ranks {mesh_ranks}, but "
                f"each of ranks {list(self.ranks)} has other experts: exclude them with "
                "fully_shard(..., "
                "ignored_params=set(ultraep.parallel.expert_parameters(model).values())), "
                "or shard them over ranks that have the same experts"
            )
        super().register_parameter(name, param)
        self._mark()

    def __setattr__(self, name: str, value: Any) -> None:
        # fully_shard calls register_parameter only on modules that define __setattr__.
        super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark()  # copied parameters lose their attributes

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> HomeModule:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark()  # moving to another device type creates new parameters
        return self

    def check_stacked(self) -> None:
        """Raise if the parameters are not stacked over the home experts."""

    def home_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the home experts, including those that other modules own."""
        return list(self.parameters())

    def _mark(self) -> None:
        for parameter in self.home_parameters():
            parameter.expert_ranks = self.ranks  # type: ignore[attr-defined]


def hold_different_experts(ranks: Sequence[int], expert_ranks: Sequence[int]) -> bool:
    """Return whether two of `ranks` hold different experts, spread over `expert_ranks`."""
    return len(set(ranks) & set(expert_ranks)) > 1


def home_modules(model: nn.Module) -> dict[str, HomeModule]:
    """Return the modules of home experts, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, HomeModule)}


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of home experts, by name. They differ between ranks."""
    experts = {id(parameter) for parameter in ranks_of_experts(model)}
    return {name: p for name, p in model.named_parameters() if id(p) in experts}


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return all other parameters, by name. They are the same on every rank."""
    experts = expert_parameters(model)
    return {name: p for name, p in model.named_parameters() if name not in experts}


def ranks_of_experts(model: nn.Module) -> dict[nn.Parameter, tuple[int, ...]]:
    """Return, for each expert parameter, the ranks that the experts are spread over."""
    modules = home_modules(model).values()
    return {parameter: m.ranks for m in modules for parameter in m.home_parameters()}


# -- local parts of DTensors, without importing DTensor (one second) -----------------------------


def mesh_of(tensor: torch.Tensor) -> Any:
    """Return the device mesh of a DTensor; None for other tensors."""
    return getattr(tensor, "device_mesh", None)


def local(tensor: Any) -> torch.Tensor:
    """Return the part of a tensor on this rank."""
    part: torch.Tensor = tensor if mesh_of(tensor) is None else tensor.to_local()
    return part


def num_shards(tensor: Any) -> int:
    """Return the number of parts that a tensor is split into."""
    if mesh_of(tensor) is None:
        return 1
    sizes = zip(mesh_of(tensor).shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_shard())
