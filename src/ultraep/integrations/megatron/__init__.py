"""Balanced MoE layers of Megatron-Core.

BalancedMoELayer              replaces MoELayer in a ModuleSpec
balanced                      replaces all MoE layers of a spec
balanced_layers, balancers    the balanced layers of a model, and their balancers
"""

from typing import TYPE_CHECKING, Any

from ultraep.supported import MEGATRON

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
    from ultraep.integrations.megatron import layer  # imports Megatron-Core: seconds

    return getattr(layer, name)
