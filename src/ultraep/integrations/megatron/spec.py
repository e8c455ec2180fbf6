"""A whole spec at once: all MoE layers of a model, and who balances a model that is built."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

from ultraep.errors import ConfigError
from ultraep.integrations.megatron.experts import check_spec
from ultraep.integrations.megatron.layer import BalancedMoELayer
from ultraep.integrations.megatron.settings import check_options, check_settings
from ultraep.runtime.balancer import Balancer


def balanced(spec: Any, config: Any, **options: Any) -> Any:
    """A spec with a `BalancedMoELayer` wherever this one, of a layer or a block, has a MoELayer.

    config: what the model is to be built with; it is refused now if it cannot be balanced.
    options: see `BalancedMoELayer`.   The spec that is given stays as it is.
    """
    check_settings(config)
    check_options(options)
    found: list[Any] = []
    made = _replaced(spec, options, found)
    if not found:
        raise ConfigError(f"there is no MoELayer in this {type(spec).__name__}")
    return made


def balanced_layers(model: nn.Module | Iterable[nn.Module]) -> list[BalancedMoELayer]:
    """The balanced layers of a model, or of its chunks, in their order."""
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    return [m for chunk in chunks for m in chunk.modules() if isinstance(m, BalancedMoELayer)]


def balancers(model: nn.Module | Iterable[nn.Module]) -> list[Balancer]:
    """Who balances a model, or its chunks: one for each set of options."""
    return list({id(layer.balancer): layer.balancer for layer in balanced_layers(model)}.values())


def _replaced(part: Any, options: dict[str, Any], found: list[Any]) -> Any:
    """A part of a spec, with all that is in it; MoE layers of it go to `found`."""
    if isinstance(part, list):
        return [_replaced(one, options, found) for one in part]
    if isinstance(part, ModuleSpec) and part.module is MoELayer:
        check_spec(part.submodules.experts)
        found.append(part)
        return replace(part, module=BalancedMoELayer, params={**part.params, **options})
    if not is_dataclass(part) or isinstance(part, type):
        return part
    changed = {f.name: _replaced(getattr(part, f.name), options, found) for f in fields(part)}
    return replace(part, **changed)
