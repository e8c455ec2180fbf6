"""Helpers of the integrations: balancers shared by layers, modules with overrides, a log line."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist
from torch import Tensor

from ultraep.layer import run_stages
from ultraep.microbatch import Layer
from ultraep.runtime.balancer import Balancer
from ultraep.runtime.connect import idle_reason

logger = logging.getLogger("ultraep")
_balancers: WeakValueDictionary[Any, Balancer] = WeakValueDictionary()
_unannounced: WeakKeyDictionary[Balancer, int] = WeakKeyDictionary()  # number of new layers


def shared_balancer(group: Any, experts: int, **options: Any) -> Balancer:
    """Return the balancer of all layers with these options; create it if needed. Collective."""
    key = group, experts, repr(sorted(options.items(), key=lambda option: option[0]))
    balancer = _balancers.get(key)
    kept = [balancer is not None] * group.size()
    dist.all_gather_object(kept, balancer is not None, group)
    if balancer is None or not all(kept):  # a rank may still hold an old model
        balancer = _balancers[key] = Balancer(group, experts=experts, **options)
    expect_layer(balancer)
    return balancer


def expect_layer(balancer: Balancer) -> None:
    """Count a new layer of a balancer for the log line of its first microbatch."""
    _unannounced[balancer] = _unannounced.get(balancer, 0) + 1


def run_layer(module: Any, layer: Layer, *inputs: Tensor, policy: str | None = None) -> Tensor:
    """Run the stages of a module on ids, gates and tokens; keep the plan as `last_plan`."""
    balancer: Balancer = module.balancer
    outputs, plan = run_stages(balancer, layer, *inputs, policy=policy)
    if module.last_plan is None:
        announce(balancer, f"{balancer._device(outputs.device).choice.kind.name} plane")
    module.last_plan = plan
    return outputs


def stays_unchanged(balancer: Balancer) -> bool:
    """Return whether the library's own layer runs: nothing needs the stages. Log it once."""
    if balancer.needed:
        return False
    announce(balancer)
    return True


def announce(balancer: Balancer, plane: str = "") -> None:
    """Log once whether the new layers of a balancer are balanced."""
    if (layers := _unannounced.pop(balancer, 0)) and not balancer.rank:
        topology = balancer.topology
        reason = idle_reason(topology, balancer.config.policy)
        logger.info(outcome(layers, reason, plane, topology.slots))


def outcome(layers: int, reason: str, plane: str = "", slots: int = 0) -> str:
    """Return the log line of a model; `reason` says why nothing is balanced.

    >>> print(outcome(24, "", "mapped plane", 1))
    ultraep: 24 of 24 MoE layers balanced (mapped plane, 1 slot)
    """
    if reason:
        return f"ultraep: 0 of {layers} MoE layers balanced: {reason}"
    facts = ", ".join(filter(None, (plane, f"{slots} slot{'s' * (slots > 1)}")))
    return f"ultraep: {layers} of {layers} MoE layers balanced ({facts})"


class Overlay:
    """A module with some attributes replaced, to pass as `self` to functions of its library."""

    def __init__(self, module: Any, **attributes: Any) -> None:
        self.__dict__.update(attributes, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
