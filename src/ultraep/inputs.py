"""The inputs of a microbatch: a layer, and its routed tokens.

Shapes: T tokens, K experts per token, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch

from ultraep.bundle import Bundle
from ultraep.config import BalanceConfig
from ultraep.dispatch import Arrivals, Pack
from ultraep.passes import Passes
from ultraep.replicas import Replicas

NO_LAYER = -1  # layer index of synthetic microbatches
Serve: TypeAlias = Callable[[Arrivals, Replicas], torch.Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class Layer:
    """The home experts of this rank in one layer.

    index: the value that `Balancer.register_layer` returned.
    bundle: the weights to replicate; empty: nothing can be replicated.
    serve: stage 6. The balancer times it on synthetic rows if plans depend on rates. None: the
        planner optimises balance, unless `BalanceConfig(rates=...)` is set.
    pack: converts rows to bytes before the data plane sends them; a dispatcher sends plain rows.
    """

    index: int = 0
    bundle: Bundle = field(default_factory=dict)
    serve: Serve | None = None
    pack: Pack | None = None


class Inputs(NamedTuple):
    """The inputs of a microbatch."""

    passes: Passes
    layer: Layer
    config: BalanceConfig
    ids: torch.Tensor  # [T, K] experts of every token; -1: padding
    gates: torch.Tensor | None  # [T, K]
    tokens: torch.Tensor | None  # [T, D]
    shares_slots: bool  # whether other layers may overwrite the slots before backward
