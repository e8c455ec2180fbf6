"""Parameters of home experts: under one name, every rank of the group has others.

What replicates a parameter, or shards it, takes all ranks to hold the same. So these carry the
ranks over which the experts are spread, and refuse to become one tensor of several such ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from ultraep.errors import ConfigError
from ultraep.parallel.tensors import mesh_of


class HomeModule(nn.Module):
    """A module whose parameters are stacked over the home experts of this rank.

    home_experts: which they are, in the order of the stack.
    ranks: over which all experts are spread, as torch.distributed counts; every parameter carries
        them as `expert_ranks`.
    """

    home_experts: tuple[int, ...]
    ranks: tuple[int, ...] = (0,)

    def spread_over(self, balancer: Any) -> None:
        """Say who has the other experts."""
        group = balancer.group
        every = dist.get_process_group_ranks(group) if group else range(balancer.topology.ranks)
        self.ranks = tuple(every)
        self._mark()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As any module, unless the parameter is one with those of ranks that have other experts.

        A DTensor is what `fully_shard`, `distribute_module` and their like put in its place.
        """
        mesh = None if param is None else mesh_of(param)
        together = [] if mesh is None else mesh.mesh.flatten().tolist()
        if strangers(together, self.ranks):
            raise ConfigError(
                f"{name!r} of home experts would be one DTensor of ranks {together}, but each "
                f"of ranks {list(self.ranks)} has other experts: leave them out, fully_shard(..., "
                "ignored_params=set(ultraep.parallel.expert_parameters(model).values())), "
                "or shard them over ranks that have the same experts"
            )
        super().register_parameter(name, param)
        self._mark()

    def __setattr__(self, name: str, value: Any) -> None:
        # Only a module that has a method of this name is told of parameters that fully_shard sets.
        super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark()  # copies of parameters come without

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> HomeModule:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark()  # on another kind of device they are new ones
        return self

    def check_stacked(self) -> None:
        """Raise if a parameter holds one expert, so that nobody knows which by its name."""

    def home_parameters(self) -> list[nn.Parameter]:
        """All that the home experts consist of, also where other modules hold them."""
        return list(self.parameters())

    def _mark(self) -> None:
        for parameter in self.home_parameters():
            parameter.expert_ranks = self.ranks  # type: ignore[attr-defined]


def strangers(together: Sequence[int], spread: Sequence[int]) -> bool:
    """Whether ranks that hold something together have different experts, spread over `spread`."""
    return len(set(together) & set(spread)) > 1


def home_modules(model: nn.Module) -> dict[str, HomeModule]:
    """Where the experts of a model are, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, HomeModule)}


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of home experts, by name: every rank has others."""
    experts = {id(parameter) for parameter in ranks_of_experts(model)}
    return {name: p for name, p in model.named_parameters() if id(p) in experts}


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All other parameters, by name: the same on every rank."""
    experts = expert_parameters(model)
    return {name: p for name, p in model.named_parameters() if name not in experts}


def ranks_of_experts(model: nn.Module) -> dict[nn.Parameter, tuple[int, ...]]:
    """For each parameter of experts, the ranks over which these are spread."""
    modules = home_modules(model).values()
    return {parameter: m.ranks for m in modules for parameter in m.home_parameters()}
