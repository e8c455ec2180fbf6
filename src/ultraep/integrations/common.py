"""What integrations share: a balancer for all layers of a model, and modules with other tensors."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from ultraep.runtime.balancer import Balancer

_balancers: WeakValueDictionary[Any, Balancer] = WeakValueDictionary()


def shared_balancer(group: Any, experts: int, **options: Any) -> Balancer:
    """That of all layers with these options, as long as there is one; collective."""
    key = group, experts, repr(sorted(options.items(), key=lambda option: option[0]))
    balancer = _balancers.get(key)
    if balancer is None:
        balancer = _balancers[key] = Balancer(group, experts=experts, **options)
    return balancer


class InPlaceOf:
    """A module with other tensors or numbers: what functions of its library see as `self`."""

    def __init__(self, module: Any, **others: Any) -> None:
        self.__dict__.update(others, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
