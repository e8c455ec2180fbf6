"""Which modules of a model are experts, and whether they can be spread over ranks.

Nothing is changed here: a model that cannot be balanced is refused as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ultraep.errors import ConfigError
from ultraep.integrations.transformers.experts import (
    BalancedExperts,
    is_registered,
    stacked_tensors,
)
from ultraep.parallel.tensors import mesh_of


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """All modules that the library's registry of experts knows, by name; at least one."""
    found = {name: module for name, module in model.named_modules() if is_registered(module)}
    if found:
        return found
    others = sorted(
        {type(m).__name__ for m in model.modules() if "expert" in type(m).__name__.lower()}
    )
    reason = f"{', '.join(others)} cannot be balanced" if others else "there are none at all"
    raise ConfigError(
        f"{type(model).__name__} has no experts of the registry of transformers "
        f"(use_experts_implementation): {reason}"
    )


def num_experts(module: nn.Module) -> int:
    """How many experts a module of the registry has, on all ranks."""
    experts: Any = module.num_experts
    return int(experts)


def check_experts(model: nn.Module, modules: dict[str, nn.Module], loaded: bool) -> None:
    """Raise, and say which and why, if one of these modules cannot be balanced."""
    holders: dict[int, str] = {}
    for name, module in modules.items():
        if isinstance(module, BalancedExperts):
            raise ConfigError(f"{type(model).__name__} is balanced already: {name!r}")
        _check_adapters(model, name)
        for key, tensor in stacked_tensors(module).items():
            path = f"{name}.{key}"
            if loaded and tensor.device.type == "meta":
                raise ConfigError(f"{path!r} is on the meta device: load its weights before")
            _check_tensor(path, tensor, num_experts(module))
            first = holders.setdefault(tensor.data_ptr() or id(tensor), path)
            if first != path:
                raise ConfigError(
                    f"{first!r} and {path!r} are tied: experts of one layer are needed"
                )
    _check_once(model, modules)


def _check_tensor(path: str, tensor: torch.Tensor, experts: int) -> None:
    """Raise if it is not stacked over experts, or not what a copy can be made of."""
    if mesh_of(tensor) is not None:
        raise ConfigError(f"{path!r} is a DTensor of ranks {mesh_of(tensor).mesh.tolist()} already")
    if (
        not tensor.is_floating_point()
        or tensor.dtype.itemsize < 2
        or type(tensor.data) is not torch.Tensor
    ):
        raise ConfigError(
            f"{path!r} is quantised ({type(tensor.data).__name__}, {tensor.dtype}), and its scales "
            "are not known: experts must be of 16 bits or more"
        )
    if not tensor.ndim or len(tensor) != experts:
        raise ConfigError(
            f"{path!r} must be stacked over {experts} experts, got shape {list(tensor.shape)}"
        )
    if tensor.grad is not None:
        raise ConfigError(f"{path!r} has a gradient, of all experts: zero_grad() before")


def _check_adapters(model: nn.Module, name: str) -> None:
    """Raise if an adapter is around the experts: its tensors are of all experts."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        around = model.get_submodule(".".join(parts[:end]))
        if hasattr(around, "base_layer") and parts[end] == "base_layer":
            raise ConfigError(
                f"{type(around).__name__} adapts {name!r}: adapters of experts cannot be balanced, "
                "those of other layers can"
            )


def _check_once(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    """Raise if a module is used by two layers."""
    names = {id(module): name for name, module in modules.items()}
    for name, module in model.named_modules(remove_duplicate=False):
        first = names.get(id(module), name)
        if first != name:
            raise ConfigError(f"{first!r} and {name!r} are tied: experts of one layer are needed")
