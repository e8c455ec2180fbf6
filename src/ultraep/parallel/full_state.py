"""State of model and optimizer with the experts of all ranks, which loads on any number of ranks.

Gathering is collective: all ranks call it, also those that do not keep the result.
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
    """Return the `state_dict` of a model on the host, with the experts of all ranks.

    keep: False: take part in the collective, but return nothing.
    """
    state = dict(model.state_dict()) if keep else {}
    for prefix, moe in moe_layers(model).items():
        layer_state = moe.full_state_dict()
        if keep:
            state |= {prefix + name: tensor for name, tensor in layer_state.items()}
    return {name: tensor.cpu() for name, tensor in state.items()}


def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load a `full_state_dict`, saved on any number of ranks."""
    own = dict(state)
    for prefix, moe in moe_layers(model).items():
        part = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
        moe.load_full_state_dict(part)
        own |= {prefix + name: tensor for name, tensor in moe.state_dict().items()}
    model.load_state_dict(own)


def full_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, keep: bool = True
) -> dict[str, State]:
    """Return the optimizer state of every parameter, by name; see `full_state_dict`."""
    balancers, full_state = balancer_of_experts(model), {}
    for name, parameter in model.named_parameters():
        state: State = dict(optimizer.state.get(parameter, {}))
        if name in balancers:
            state = {
                k: gather_experts(t, balancers[name]) if t.ndim else t for k, t in state.items()
            }
        if keep:
            full_state[name] = {key: tensor.cpu() for key, tensor in state.items()}
    return full_state


def load_full_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, State]
) -> None:
    """Load a `full_optimizer_state`, saved on any number of ranks."""
    balancers = balancer_of_experts(model)
    for name, parameter in model.named_parameters():
        if name not in state:
            raise ConfigError(f"the optimizer state has no parameter {name!r}")
        own: dict[str, Any] = state[name]
        if name in balancers:
            topology, rank = balancers[name].topology, balancers[name].rank
            home_experts = topology.home_experts(rank).tolist()
            own = {key: t[home_experts] if t.ndim else t for key, t in own.items()}
        optimizer.state[parameter] = {
            key: tensor.to(parameter.device if tensor.ndim else "cpu", copy=True)
            for key, tensor in own.items()
        }


def moe_layers(model: nn.Module) -> dict[str, BalancedMoE]:
    """Return the balanced layers, by the prefix of their parameters."""
    named = model.named_modules()
    return {f"{name}." if name else "": m for name, m in named if isinstance(m, BalancedMoE)}


def balancer_of_experts(model: nn.Module) -> dict[str, Balancer]:
    """Return the balancer of each expert parameter, by name."""
    layers = moe_layers(model).items()
    return {
        prefix + name: moe.balancer for prefix, moe in layers for name in expert_parameters(moe)
    }
