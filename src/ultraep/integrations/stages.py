"""What integrations share: the stages around experts of another library, and its balancers.

Shapes: T tokens, K experts per token, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch

from ultraep.bundle import Bundle
from ultraep.combine import combine
from ultraep.dispatch import Arrivals, dispatch
from ultraep.plane import AnyPlan, Copies
from ultraep.runtime.balancer import Balancer

Serve: TypeAlias = Callable[[Arrivals, Copies], torch.Tensor]
_balancers: WeakValueDictionary[Any, Balancer] = WeakValueDictionary()


def run_stages(
    balancer: Balancer,
    serve: Serve,
    bundle: Bundle,
    tokens: torch.Tensor,
    ids: torch.Tensor,
    gates: torch.Tensor,
    *,
    layer: int,
    policy: str | None = None,
) -> tuple[torch.Tensor, AnyPlan]:
    """[T, D] -> [T, D] and the plan; `[T, K]` ids of experts and gates.

    serve: stage 6, on the rows that arrive, with home weights and with copies.
    """
    loads = balancer.gather(ids, layer=layer, bundle=bundle, rows=tokens, gates=gates)
    balancer.learn_rates(loads, serve, bundle, tokens, gates, policy=policy)
    plan: AnyPlan = balancer.plan(loads, policy=policy)
    with balancer.replicate(plan, loads, bundle) as copies:
        exchange = balancer.reroute(ids, plan, loads)
        outputs = serve(dispatch(tokens, gates, exchange), copies)
    return combine(outputs, exchange), plan


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
