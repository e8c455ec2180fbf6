"""Serving: prefill in chunks, forward only. In every iteration every rank has a full chunk.

Shapes: S iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ultraep_tools.sim.costs import Costs
from ultraep_tools.sim.layer import LayerTimes
from ultraep_tools.sim.model import ROW_BYTES, WEIGHT_BYTES, Model
from ultraep_tools.sim.presets import check_range
from ultraep_tools.sim.training import STORED_WIDTHS


@dataclass(frozen=True, kw_only=True)
class Serving:
    tokens: int = 8192  # chunk: per rank and iteration
    sequence: int = 8192  # tokens per prompt; a chunk may hold several prompts, or part of one
    iterations: int = 16

    name: ClassVar[str] = "prefill"
    unit: ClassVar[str] = "iteration"
    units: ClassVar[str] = "iterations"
    throughput_unit: ClassVar[str] = "tokens/s per device"
    trains: ClassVar[bool] = False
    pipeline: ClassVar[int] = 1
    groups: ClassVar[int] = 1
    recompute: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_range(self, "tokens sequence iterations", 1)

    @property
    def simulated(self) -> int:
        """Iterations with loads of their own."""
        return self.iterations

    @property
    def context(self) -> float:
        """Mean number of tokens before each token."""
        return self.sequence / 2

    def weight_bytes(self, model: Model, ranks: int) -> float:
        """Return the bytes of weights per device."""
        return WEIGHT_BYTES * (model.all_expert_weights / ranks + model.plain_weights)

    def activation_bytes(self, model: Model) -> float:
        """Return the bytes per device of the activations of one layer."""
        return ROW_BYTES * self.tokens * model.width * STORED_WIDTHS

    def throughput(
        self,
        costs: Costs,
        ranks: int,  # noqa: ARG002
        layers: Sequence[LayerTimes],
    ) -> tuple[float, float]:
        """Return tokens/s per device, as throughput and as tokens."""
        dense = costs.attention(self.tokens, self.context) + costs.dense_mlp(self.tokens)
        experts_S = np.sum([times.forward_seconds for times in layers], axis=0)
        rate = self.tokens / (costs.model.dense_layers * dense + float(experts_S.mean()))
        return rate, rate
