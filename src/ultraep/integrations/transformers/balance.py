"""Balance a loaded model: every rank keeps its home experts and runs its own batch.

balancer = balance(model)              # all ranks of torch.distributed
...                                    # train, generate, model.save_pretrained
unbalance(model)                       # all experts on every rank again
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ultraep.comm import raise_together
from ultraep.errors import ConfigError
from ultraep.integrations.transformers.experts import (
    BalancedExperts,
    balanced_experts,
    is_registered,
    reunite,
    spread,
    stacked_tensors,
)
from ultraep.integrations.transformers.quantised import (
    QUANTISED,
    SUPPORTED,
    FP8Experts,
    check_fp8,
    quantiser_of,
)
from ultraep.integrations.transformers.save import save_pretrained
from ultraep.parallel.home import expert_parameters, mesh_of
from ultraep.parallel.wrapped import IGNORED_BY_DDP, leave_out_experts
from ultraep.runtime.balancer import Balancer
from ultraep.runtime.connect import GroupOrName, resolve_group
from ultraep.topology import even_homes


def balance(
    model: nn.Module,
    group: GroupOrName = None,
    *,
    slots: int = 1,
    policy: str | None = None,
    loaded: bool = True,
    **options: Any,
) -> Balancer:
    """Spread the experts of a model over the ranks of a group and balance every microbatch.

    group, slots, policy, options: see `Balancer`.
    loaded: False if the weights are still on the meta device and loaded later.

    Balances the experts in the registry of transformers. Every rank keeps its home experts and
    frees the others. Layers with different numbers of experts have different balancers; this
    returns the balancer of most layers, `balancers` returns all. Collective. If it raises, the
    model is unchanged.
    """
    modules = registered_experts(model)
    check_experts(model, modules, loaded)
    by_count = _make_balancers(modules, group, options | {"slots": slots, "policy": policy})
    for module in modules.values():
        spread(module, by_count[module.num_experts])
    leave_out_experts(model)
    _replace_methods(model)
    counts = [module.num_experts for module in modules.values()]
    return by_count[max(by_count, key=counts.count)]


def unbalance(model: nn.Module) -> None:
    """Restore all experts on every rank, and their original classes. Collective."""
    modules = balanced_experts(model)
    if not modules:
        raise ConfigError(f"{type(model).__name__} is not balanced; call balance(model) first")
    experts, owners = expert_parameters(model), balancers(model)
    lost = [name for name, parameter in experts.items() if parameter.grad is not None]
    text = "has a gradient of home experts: step the optimizer and call zero_grad() first"
    raise_together(owners[0].comm, ConfigError(f"{lost[0]!r} {text}") if lost else None)
    for parameter in experts.values():
        parameter.__dict__.pop("_ddp_ignored", None)
    ignored = getattr(model, IGNORED_BY_DDP, ())
    setattr(model, IGNORED_BY_DDP, [name for name in ignored if name not in experts])
    for module in modules.values():
        reunite(module)
    for part in model.modules():
        for name in REPLACED:
            part.__dict__.pop(name, None)
    for balancer in owners:
        balancer.close()


def balancers(model: nn.Module) -> list[Balancer]:
    """Return the balancers of a model: one for each number of experts of its layers."""
    return list(dict.fromkeys(module.balancer for module in balanced_experts(model).values()))


def _make_balancers(
    modules: dict[str, Any], group: GroupOrName, options: dict[str, Any]
) -> dict[int, Balancer]:
    """Return a balancer for each number of experts; close all of them if one fails."""
    process_group, by_count = resolve_group(group), dict[int, Balancer]()
    ranks = 1 if process_group is None else process_group.size()
    with ExitStack() as undo:
        for experts in sorted({module.num_experts for module in modules.values()}):
            homes = experts if experts % ranks == 0 else even_homes(experts, ranks)
            by_count[experts] = Balancer(group, experts=homes, **options)
            undo.callback(by_count[experts].close)
        undo.pop_all()
    return by_count


def generate(model: Any, *inputs: Any, synced_gpus: bool | None = None, **options: Any) -> Any:
    """Call `generate` of the library; every rank continues until all ranks are done.

    Disables the compilation that the library uses for static caches: ranks exchange messages.
    """
    if synced_gpus is None:
        synced_gpus = balancers(model)[0].topology.ranks > 1
    options = {"disable_compile": True, **options}
    return type(model).generate(model, *inputs, synced_gpus=synced_gpus, **options)


REPLACED = {"generate": generate, "save_pretrained": save_pretrained}


def _replace_methods(model: nn.Module) -> None:
    """Replace the methods that need all ranks, in the model and in its submodels."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and balanced_experts(part):
            for name, method in REPLACED.items():
                if hasattr(part, name):
                    setattr(part, name, MethodType(method, part))


# Checks. They change nothing, so a model that cannot be balanced stays as it was.


def registered_experts(model: nn.Module) -> dict[str, Any]:
    """Return the modules in the library's registry of experts, by name; raise if none."""
    named = model.named_modules(remove_duplicate=False)  # `check_experts` refuses duplicates
    modules = {name: module for name, module in named if is_registered(module)}
    if modules:
        return modules
    names = {type(m).__name__ for m in model.modules() if "expert" in type(m).__name__.lower()}
    reason = f"{', '.join(sorted(names))} cannot be balanced" if names else "it has no experts"
    if quantiser_of(model) is not None:
        reason += f"; it is quantised by {quantiser_of(model)}, and {SUPPORTED} can be balanced"
    raise ConfigError(
        f"{type(model).__name__} has no experts in the registry of transformers "
        f"(use_experts_implementation): {reason}"
    )


def check_experts(model: nn.Module, modules: dict[str, Any], loaded: bool) -> None:
    """Raise if one of these modules cannot be balanced, naming it and the reason."""
    first_path: dict[int, str] = {}
    check_formats(model, modules)
    for name, module in modules.items():
        if isinstance(module, BalancedExperts):
            raise ConfigError(f"{type(model).__name__} is already balanced: {name!r}")
        _check_adapters(model, name)
        for key, tensor in stacked_tensors(module).items():
            path = f"{name}.{key}"
            if loaded and tensor.device.type == "meta":
                raise ConfigError(f"{path!r} is on the meta device: load the weights first")
            _check_tensor(path, tensor, module.num_experts)
            first = first_path.setdefault(tensor.data_ptr() or id(tensor), path)
            if first != path:
                raise ConfigError(
                    f"{first!r} and {path!r} are tied; each layer needs its own experts"
                )


def _check_tensor(path: str, tensor: torch.Tensor, experts: int) -> None:
    """Raise if a tensor is not stacked over experts, sharded, or has a gradient."""
    if mesh_of(tensor) is not None:
        raise ConfigError(
            f"{path!r} is already a DTensor of ranks {mesh_of(tensor).mesh.tolist()}; balance the "
            "model before sharding it"
        )
    if not tensor.ndim or len(tensor) != experts:
        raise ConfigError(
            f"{path!r} must be stacked over {experts} experts, got shape {list(tensor.shape)}"
        )
    if tensor.grad is not None:
        raise ConfigError(f"{path!r} has a gradient for all experts: call zero_grad() first")


def check_formats(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Raise if experts are quantised in an unknown way, or if FP8 scales do not fit."""
    for name, module in modules.items():
        if isinstance(module, FP8Experts):
            check_fp8(name, module)
        tensors = {} if isinstance(module, QUANTISED) else stacked_tensors(module)
        for key, tensor in tensors.items():
            plain = type(tensor.data) is torch.Tensor or mesh_of(tensor) is not None
            if not tensor.is_floating_point() or tensor.dtype.itemsize < 2 or not plain:
                raise ConfigError(
                    f"'{name}.{key}' is quantised by {quantiser_of(model) or 'an unknown method'} "
                    f"({type(tensor.data).__name__}, {tensor.dtype}), and its scales are unknown: "
                    f"use {SUPPORTED}, or experts of 16 bits or more"
                )


def _check_adapters(model: nn.Module, name: str) -> None:
    """Raise if an adapter wraps the experts: its tensors cover all experts."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        parent = model.get_submodule(".".join(parts[:end]))
        if hasattr(parent, "base_layer") and parts[end] == "base_layer":
            raise ConfigError(
                f"{type(parent).__name__} adapts {name!r}: adapters of experts cannot be balanced; "
                "adapt other layers only"
            )
