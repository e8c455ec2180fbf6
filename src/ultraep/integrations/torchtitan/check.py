"""Check the settings of torchtitan.

The checks use only names of classes and mesh axes, and run while the model is configured: before
any communication and before any weight is allocated.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError
from ultraep.policies import running_policy
from ultraep.runtime.balancer import Balancer

ROUTED = "RoutedExperts"
ALL_TO_ALL, DEEPEP = "AllToAllTokenDispatcher", "DeepEPTokenDispatcher"
HYBRIDEP = "HybridEPTokenDispatcher"
DISPATCHERS = (ALL_TO_ALL, DEEPEP, HYBRIDEP)
EXPERTS = ("GroupedExperts", "GptOssGroupedExperts")
SET_BY_TORCHTITAN = ("group", "experts", "config", "dispatcher")
REASONS = {  # by prefix of the class name
    "TorchAO": "it pads tokens for FP8 experts, and replicas do not include scales",
    "MinimalAsyncEP": "its fixed number of rows is not tested with spare slots",
    "Float8": "replicas do not include FP8 scales",
    "MXFP8": "replicas do not include FP8 scales",
    "Fused": "its kernels are not tested with replicas",
}
SETTINGS = {  # of dispatchers
    "cudagraphable": "it delivers a fixed number of rows",
    "non_blocking_capacity_factor": "it may drop rows",
    "pad_multiple": "it pads the rows of each expert",
}


def check_layer(routed: str, dispatcher: str, experts: str) -> None:
    """Raise if a layer of these classes cannot be balanced."""
    if routed != ROUTED:
        raise ConfigError(f"{routed} cannot be balanced: use the framework's {ROUTED}")
    if dispatcher not in DISPATCHERS:
        raise ConfigError(
            f"{dispatcher} cannot be balanced, {_reason(dispatcher)}: use {ALL_TO_ALL} "
            '(moe_comm_backend="standard")'
        )
    if experts not in EXPERTS:
        raise ConfigError(
            f"{experts} cannot be balanced, {_reason(experts)}: use {' or '.join(EXPERTS)}"
        )


def check_dispatcher(dispatcher: str, settings: Any) -> None:
    """Raise if a dispatcher with these settings cannot serve spare slots."""
    for name, reason in SETTINGS.items():
        value = getattr(settings, name, None)
        if value:
            raise ConfigError(
                f"{dispatcher} with {name}={value} cannot be balanced, {reason}: leave it out"
            )


def _reason(name: str) -> str:
    return next((why for start, why in REASONS.items() if name.startswith(start)), "it is unknown")


def check_axes(axes: Collection[str]) -> None:
    """Raise unless the weights are sharded over the mesh axis of expert parallelism."""
    if "ep" not in axes:
        tensor = " (tensor-parallel experts cannot be balanced)" * ("tp" in axes)
        raise ConfigError(
            f"experts are sharded over the mesh axes {', '.join(axes) or 'none'}, not over ep"
            f"{tensor}: set parallelism.expert_parallel_degree to more than 1"
        )


def balancer_options(slots: int, policy: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the `Balancer`; options may include settings of `BalanceConfig`."""
    running_policy(policy)
    known = set(inspect.signature(Balancer).parameters) - {*SET_BY_TORCHTITAN, "slots", "policy"}
    planned = {field.name for field in fields(BalanceConfig)} - {"policy"}
    unknown = sorted(options.keys() - known - planned)
    if unknown:
        raise ConfigError(
            f"unknown options, or set by torchtitan: {', '.join(unknown)}; use "
            f"{', '.join(sorted(known | planned))}"
        )
    config = BalanceConfig(policy=policy, **{n: v for n, v in options.items() if n in planned})
    return {"slots": slots, "config": config} | {n: v for n, v in options.items() if n in known}
