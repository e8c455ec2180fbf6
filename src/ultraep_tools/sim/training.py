"""Training: microbatches in a pipeline, data-parallel groups, and the optimizer step.

Layers are split into pipeline stages, which alternate one forward and one backward (1F1B) once the
pipeline is full. Data-parallel groups have loads of their own and synchronise at the end of a step.
Then the optimizer updates the weights. Pipeline and data-parallel messages are assumed hidden.

Shapes: S microbatches, P pipeline stages.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ultraep.arrays import IntArray
from ultraep.errors import ConfigError
from ultraep_tools.sim.costs import Costs, FloatArray
from ultraep_tools.sim.layer import LayerTimes
from ultraep_tools.sim.model import GRADIENT_BYTES, ROW_BYTES, WEIGHT_BYTES, Model
from ultraep_tools.sim.presets import check_range

STORED_WIDTHS = 10  # vectors of the model's width that a layer stores per token without recompute
OPTIMIZER_STATE_BYTES = 12  # per weight: FP32 master weight and two moments
OPTIMIZER_BYTES = 30  # moved per weight: gradient, master weight, two moments, weight


@dataclass(frozen=True, kw_only=True)
class Training:
    tokens: int = 8192  # per rank and microbatch
    sequence: int = 8192  # tokens per sequence; a microbatch may hold several sequences
    pipeline: int = 1  # stages
    groups: int = 1  # data-parallel expert-parallel groups
    microbatches: int = 8  # per step and group
    steps: int = 8
    recompute: bool = True

    name: ClassVar[str] = "training"
    unit: ClassVar[str] = "microbatch"
    units: ClassVar[str] = "microbatches"
    throughput_unit: ClassVar[str] = "TFLOP/s per device"
    trains: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range(self, "tokens sequence pipeline groups microbatches steps", 1)

    @property
    def simulated(self) -> int:
        """Microbatches of all groups and steps."""
        return self.steps * self.microbatches * self.groups

    @property
    def context(self) -> float:
        """Mean number of tokens before each token."""
        return min(self.sequence, self.tokens) / 2

    def weight_bytes(self, model: Model, ranks: int) -> float:
        """Return the bytes per device of weights, gradients and optimizer state."""
        held = (model.all_expert_weights / ranks + model.plain_weights) / self.pipeline
        state = OPTIMIZER_STATE_BYTES * self._updated_weights(model, ranks)
        return (WEIGHT_BYTES + GRADIENT_BYTES) * held + state

    def _updated_weights(self, model: Model, ranks: int) -> float:
        """Return the weights that a device updates: all devices share the optimizer state."""
        return model.weights / (ranks * self.pipeline * self.groups)

    def activation_bytes(self, model: Model) -> float:
        """Return the bytes per device of activations stored for backward."""
        vector = ROW_BYTES * self.tokens * model.width
        layers = math.ceil(model.layers / self.pipeline) * min(self.pipeline, self.microbatches)
        if self.recompute:
            return vector * layers + vector * STORED_WIDTHS
        rows = self.tokens * model.top_k * model.row_bytes
        return STORED_WIDTHS * vector * layers + (layers - 1) * rows

    def throughput(
        self, costs: Costs, ranks: int, layers: Sequence[LayerTimes]
    ) -> tuple[float, float]:
        """Return TFLOP/s and tokens/s, both per device."""
        shape = (self.steps, self.microbatches, self.groups)
        forward, backward = (np.tile(part, (*shape, 1)) for part in self.dense_seconds(costs))
        stages = stage_of_layer(costs.model, self.pipeline)[costs.model.dense_layers :]
        for stage, times in zip(stages, layers, strict=True):
            forward[..., stage] += times.forward_seconds.reshape(shape)
            backward[..., stage] += times.backward_seconds.reshape(shape)
        seconds = self.steps * self.optimizer_seconds(costs, ranks)
        for step in range(self.steps):
            seconds += max(
                pipeline_seconds(forward[step, :, group], backward[step, :, group])
                for group in range(self.groups)
            )
        tokens = self.steps * self.microbatches * self.tokens / self.pipeline / seconds
        operations = costs.model.training_operations(min(self.sequence, self.tokens))
        return tokens * operations / 1e12, tokens

    def dense_seconds(self, costs: Costs) -> tuple[FloatArray, FloatArray]:
        """[P] forward and backward seconds of dense layers and of the output embedding."""
        mlp, head = costs.dense_mlp(self.tokens), costs.head(self.tokens)
        forward = costs.attention(self.tokens, self.context) + mlp
        backward = costs.attention(self.tokens, self.context, backward=True) + 2 * mlp
        backward += forward if self.recompute else 0.0
        stages = stage_of_layer(costs.model, self.pipeline)[: costs.model.dense_layers]
        dense_P = np.bincount(stages, minlength=self.pipeline).astype(float)
        forward_P, backward_P = dense_P * forward, dense_P * backward
        forward_P[-1] += head
        backward_P[-1] += 2 * head
        return forward_P, backward_P

    def optimizer_seconds(self, costs: Costs, ranks: int) -> float:
        """Return the seconds to update this device's share of the weights."""
        size = OPTIMIZER_BYTES * self._updated_weights(costs.model, ranks)
        return size / (costs.cluster.memory_rate * costs.rates.memory)


def stage_of_layer(model: Model, stages: int) -> IntArray:
    """Return the pipeline stage of every layer. The first stages get the remainder."""
    if stages > model.layers:
        raise ConfigError(
            f"{model.layers} layers cannot be split into {stages} pipeline stages; use at most "
            f"{model.layers}"
        )
    parts = np.array_split(np.arange(model.layers), stages)
    return np.repeat(np.arange(stages), [len(part) for part in parts])


def pipeline_seconds(forward_SP: FloatArray, backward_SP: FloatArray) -> float:
    """Return the seconds of one step with a 1F1B schedule.

    Two stages, three microbatches, one second forward and two backward: the last stage is busy for
    nine seconds, after one second of waiting, and the first stage ends two seconds later.

    >>> pipeline_seconds(np.ones((3, 2)), np.full((3, 2), 2.0))
    12.0
    """
    count, stages = forward_SP.shape
    # ends[0] are forwards and ends[1] backwards; column p + 1 is stage p. The first forward has
    # its input at once, and the last forward's output is the input of its backward.
    seconds = (forward_SP, backward_SP)
    ends = np.full((2, count, stages + 2), np.nan)
    ends[0, :, 0] = 0.0
    free_P = np.zeros(stages)
    schedules = [_schedule(count, stages - stage) for stage in range(stages)]
    while any(schedules):
        for stage, left in enumerate(schedules):
            while left:
                backward, number = left[0]
                ready = ends[backward, number, stage + 2 if backward else stage]
                if np.isnan(ready):
                    break
                free_P[stage] = max(free_P[stage], ready) + seconds[backward][number, stage]
                ends[backward, number, stage + 1] = free_P[stage]
                if stage == stages - 1 and not backward:
                    ends[1, number, stages + 1] = free_P[stage]
                left.popleft()
    return float(free_P.max())


def _schedule(count: int, in_flight: int) -> deque[tuple[int, int]]:
    """Return the passes of a stage in order: (0 forward or 1 backward, microbatch)."""
    warm_up = min(count, in_flight)
    passes = deque((0, number) for number in range(warm_up))
    for number in range(count):
        passes.append((1, number))
        if warm_up + number < count:
            passes.append((0, warm_up + number))
    return passes
