"""Helpers of the integrations: balancers shared by layers, and modules with overrides."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch.distributed as dist

from ultraep.runtime.balancer import Balancer

_balancers: WeakValueDictionary[Any, Balancer] = WeakValueDictionary()


def shared_balancer(group: Any, experts: int, **options: Any) -> Balancer:
    """Return the balancer of all layers with these options; create it if needed. Collective."""
    key = group, experts, repr(sorted(options.items(), key=lambda option: option[0]))
    balancer = _balancers.get(key)
    kept = [balancer is not None] * group.size()
    dist.all_gather_object(kept, balancer is not None, group)
    if balancer is None or not all(kept):  # a rank may still hold an old model
        balancer = _balancers[key] = Balancer(group, experts=experts, **options)
    return balancer


class Overlay:
    """A module with some attributes replaced, to pass as `self` to functions of its library."""

    def __init__(self, module: Any, **attributes: Any) -> None:
        self.__dict__.update(attributes, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
