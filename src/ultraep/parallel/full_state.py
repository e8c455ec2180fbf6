"""State of a model and its optimizer with the experts of all ranks, for any number of ranks.

To gather one is collective: all ranks call it, also those that do not keep what is found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ultraep.errors import ConfigError
from ultraep.layer import BalancedMoE
from ultraep.parallel import expert_parameters
from ultraep.runtime.balancer import Balancer
from ultraep.runtime.state import gather_experts

State = dict[str, torch.Tensor]


def full_state_dict(model: nn.Module, *, keep: bool = True) -> State:
    """The `state_dict` of a model on the host, with the experts of all ranks in their order.

    keep: whether this rank wants it; else it takes part, and gets nothing.
    """
    state = dict(model.state_dict()) if keep else {}
    for prefix, moe in moe_layers(model).items():
        whole = moe.full_state_dict()
        if keep:
            state |= {prefix + name: tensor for name, tensor in whole.items()}
    return {name: tensor.cpu() for name, tensor in state.items()}


def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load a `full_state_dict`, also one of another number of ranks."""
    own = dict(state)
    for prefix, moe in moe_layers(model).items():
        part = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
        moe.load_full_state_dict(part)
        own |= {prefix + name: tensor for name, tensor in moe.state_dict().items()}
    model.load_state_dict(own)


def full_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, keep: bool = True
) -> dict[str, State]:
    """What the optimizer knows of every parameter, by its name; as `full_state_dict`."""
    balancers, found = balancer_of_experts(model), {}
    for name, parameter in model.named_parameters():
        known: State = dict(optimizer.state.get(parameter, {}))
        if name in balancers:
            known = {
                k: gather_experts(t, balancers[name]) if t.ndim else t for k, t in known.items()
            }
        if keep:
            found[name] = {key: tensor.cpu() for key, tensor in known.items()}
    return found


def load_full_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, State]
) -> None:
    """Load a `full_optimizer_state`, also one of another number of ranks."""
    balancers = balancer_of_experts(model)
    for name, parameter in model.named_parameters():
        if name not in state:
            raise ConfigError(f"the state of the optimizer has no parameter {name!r}")
        known: dict[str, Any] = state[name]
        if name in balancers:
            topology, rank = balancers[name].topology, balancers[name].rank
            mine = topology.home_experts(rank).tolist()
            known = {key: t[mine] if t.ndim else t for key, t in known.items()}
        optimizer.state[parameter] = {
            key: tensor.to(parameter.device if tensor.ndim else "cpu", copy=True)
            for key, tensor in known.items()
        }


def moe_layers(model: nn.Module) -> dict[str, BalancedMoE]:
    """The layers with experts, by the prefix of their parameters."""
    named = model.named_modules()
    return {f"{name}." if name else "": m for name, m in named if isinstance(m, BalancedMoE)}


def balancer_of_experts(model: nn.Module) -> dict[str, Balancer]:
    """For each parameter of home experts, by name, who knows their ranks."""
    layers = moe_layers(model).items()
    return {
        prefix + name: moe.balancer for prefix, moe in layers for name in expert_parameters(moe)
    }
