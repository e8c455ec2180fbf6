"""MoE layers of Megatron-Core, balanced.

BalancedMoELayer              for a ModuleSpec, in place of MoELayer
balanced                      a whole spec, with all its MoE layers
balanced_layers, balancers    which layers of a model are balanced, and by whom
"""

from typing import TYPE_CHECKING, Any

from ultraep.integrations.library import MEGATRON

if TYPE_CHECKING:
    from ultraep.integrations.megatron.layer import (
        BalancedMoELayer,
        balanced,
        balanced_layers,
        balancers,
    )

__all__ = ["BalancedMoELayer", "balanced", "balanced_layers", "balancers"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    MEGATRON.check()
    from ultraep.integrations.megatron import layer  # it imports Megatron-Core, which takes seconds

    return getattr(layer, name)
