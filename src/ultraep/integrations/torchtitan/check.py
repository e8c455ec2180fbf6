"""Which settings of torchtitan can be balanced; others are refused by name.

Everything here is decided by names of classes and of mesh axes, while the configuration of a model
is made: before a process group is asked for anything, and before a weight exists.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError
from ultraep.policies import get_policy
from ultraep.runtime.balancer import Balancer

ROUTED = "RoutedExperts"
DISPATCHER = "AllToAllTokenDispatcher"
EXPERTS = ("GroupedExperts", "GptOssGroupedExperts")
OF_THE_FRAMEWORK = ("group", "experts", "homes", "config", "communicator", "peers", "share")
WHY = {  # of what the framework has, by the beginning of its name
    "TorchAO": "it pads tokens for experts of 8 bits, whose scales are not copied",
    "DeepEP": "it is fused, and knows no spare slots",
    "HybridEP": "it is fused, and knows no spare slots",
    "MinimalAsyncEP": "it is fused, and knows no spare slots",
    "Float8": "what the scales of 8 bits belong to is not known",
    "MXFP8": "what the scales of 8 bits belong to is not known",
    "Fused": "its kernels have not been tried on copies",
}


def check_layer(routed: str, dispatcher: str, experts: str) -> None:
    """Raise if a layer of these classes cannot be balanced."""
    if routed != ROUTED:
        raise ConfigError(f"{routed} cannot be balanced, it is not the framework's {ROUTED}")
    if dispatcher != DISPATCHER:
        raise ConfigError(
            f"{dispatcher} cannot be balanced, {_reason(dispatcher)}: use {DISPATCHER} "
            '(moe_comm_backend="standard")'
        )
    if experts not in EXPERTS:
        raise ConfigError(
            f"{experts} cannot be balanced, {_reason(experts)}: use {' or '.join(EXPERTS)}"
        )


def _reason(name: str) -> str:
    return next((why for start, why in WHY.items() if name.startswith(start)), "it is not known")


def check_axes(axes: Collection[str]) -> None:
    """Raise if these are not the mesh axes of weights that expert parallelism spreads."""
    if "ep" not in axes:
        tensor = " (tensor-parallel experts cannot be balanced)" * ("tp" in axes)
        raise ConfigError(
            f"experts are spread over the mesh axes {', '.join(axes) or 'none'}, not over ep"
            f"{tensor}: set parallelism.expert_parallel_degree to more than 1"
        )


def balancer_options(slots: int, policy: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a `Balancer` is made with; settings of `BalanceConfig` may be among the options."""
    get_policy(policy)
    known = set(inspect.signature(Balancer).parameters) - {*OF_THE_FRAMEWORK, "slots", "policy"}
    planned = {field.name for field in fields(BalanceConfig)} - {"policy"}
    unknown = sorted(options.keys() - known - planned)
    if unknown:
        raise ConfigError(
            f"unknown or not to be set here: {', '.join(unknown)}; known are "
            f"{', '.join(sorted(known | planned))}"
        )
    config = BalanceConfig(policy=policy, **{n: v for n, v in options.items() if n in planned})
    return {"slots": slots, "config": config} | {n: v for n, v in options.items() if n in known}
