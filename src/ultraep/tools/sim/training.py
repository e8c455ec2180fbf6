"""Training under the clock: microbatches in a pipeline, then the step that waits for all groups.

The layers are dealt out to the parts of a pipeline. Every part runs one forward, one backward in
turn (1F1B) once it is full. Data-parallel groups work at their own loads and meet at the end of a
step; then the optimizer passes over the weights. Messages of the pipeline and of data
parallelism are taken to be hidden.

Shapes: S microbatches, P parts, G groups.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ultraep.errors import ConfigError
from ultraep.tools.sim.costs import Costs
from ultraep.tools.sim.model import Model
from ultraep.tools.sim.presets import check_least

FloatArray = NDArray[np.float64]

OPTIMIZER_BYTES = 30  # read and written per weight: gradient, master copy and two moments; weight


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained.

    tokens: of every rank in a microbatch.
    sequence: tokens per sequence; a microbatch holds several.
    """

    tokens: int = 8192
    sequence: int = 8192
    pipeline: int = 1  # parts that the layers are dealt out to
    groups: int = 1  # data-parallel expert-parallel groups
    microbatches: int = 8  # of one step and group
    steps: int = 8
    recompute: bool = True

    name: ClassVar[str] = "training"
    unit: ClassVar[str] = "microbatch"
    units: ClassVar[str] = "microbatches"
    trains: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_least(self, "tokens sequence pipeline groups microbatches steps", 1)

    @property
    def simulated(self) -> int:
        """Microbatches of all groups and steps."""
        return self.steps * self.microbatches * self.groups

    @property
    def context(self) -> float:
        """Tokens before each token, on average."""
        return min(self.sequence, self.tokens) / 2


def part_of_layer(model: Model, parts: int) -> list[int]:
    """The part of every layer: contiguous, the first ones one longer where it does not divide.

    Dense layers come first, as in the model.
    """
    if parts > model.layers:
        raise ConfigError(f"{model.layers} layers cannot be dealt out to {parts} pipeline parts")
    bounds = np.cumsum([len(some) for some in np.array_split(np.arange(model.layers), parts)])
    return [int(np.searchsorted(bounds, layer, side="right")) for layer in range(model.layers)]


def plain_seconds(costs: Costs, training: Training) -> tuple[FloatArray, FloatArray]:
    """[P] forward and backward seconds of what has no experts: dense layers, and the head."""
    parts = part_of_layer(costs.model, training.pipeline)
    forward, backward = np.zeros(training.pipeline), np.zeros(training.pipeline)
    tokens, context = training.tokens, training.context
    dense = costs.attention_forward(tokens, context) + costs.dense_mlp(tokens)
    dense_back = costs.attention_backward(tokens, context) + 2 * costs.dense_mlp(tokens)
    again = dense if training.recompute else 0.0
    for layer in range(costs.model.dense_layers):
        forward[parts[layer]] += dense
        backward[parts[layer]] += dense_back + again
    forward[-1] += costs.head(tokens)
    backward[-1] += 2 * costs.head(tokens)
    return forward, backward


def pipeline_seconds(forward_SP: FloatArray, backward_SP: FloatArray) -> float:
    """Until the last backward of a step is done, one forward and one backward in turn.

    Two parts, three microbatches, one second forward and two backward: the last part is busy for
    nine seconds, after one of waiting, and the first part ends two seconds later.

    >>> pipeline_seconds(np.ones((3, 2)), np.full((3, 2), 2.0))
    12.0
    """
    count, parts = forward_SP.shape
    # Row 0 is forward, row 1 backward. The input of the first forward is there at once; the output
    # of the last forward is the input of its backward.
    seconds = (forward_SP, backward_SP)
    ends = np.full((2, count, parts + 2), np.nan)
    ends[0, :, 0] = 0.0
    free = np.zeros(parts)
    turns = [_turns(count, parts, part) for part in range(parts)]
    while any(turns):
        for part, left in enumerate(turns):
            while left:
                back, number = left[0]
                ready = ends[back, number, part + 2 if back else part]
                if np.isnan(ready):
                    break
                free[part] = max(free[part], ready) + seconds[back][number, part]
                ends[back, number, part + 1] = free[part]
                if part == parts - 1 and not back:
                    ends[1, number, parts + 1] = free[part]
                left.popleft()
    return float(free.max())


def _turns(count: int, parts: int, part: int) -> deque[tuple[int, int]]:
    """What a part does, in order: some forwards, then one backward and one forward in turn.

    Pairs: 0 for forward or 1 for backward, and the microbatch.
    """
    warm = min(count, parts - part)
    turns = deque((0, number) for number in range(warm))
    for number in range(count):
        turns.append((1, number))
        if warm + number < count:
            turns.append((0, warm + number))
    return turns


def optimizer_seconds(costs: Costs, training: Training, ranks: int) -> float:
    """Seconds of one pass over this device's share of the weights and their optimizer state."""
    model = costs.model
    experts = model.moe_layers * model.experts * model.expert_weights / ranks / training.pipeline
    plain = model.plain_weights / training.pipeline / ranks / training.groups
    size = OPTIMIZER_BYTES * (experts / training.groups + plain)
    return size / (costs.cluster.memory_rate * costs.rates.memory)
