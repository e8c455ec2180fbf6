"""Memory of a device: weights, optimizer, spare slots, and the rows of the fullest rank.

Counted per device in bytes: what training or prefill keeps, without fragmentation, caches of the
allocator, keys and values of requests, and buffers of communication libraries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ultraep.tools.sim.model import WEIGHT_BYTES, Model
from ultraep.tools.sim.serving import Serving
from ultraep.tools.sim.training import Training

GRADIENT = 4  # bytes of a gradient: FP32
OPTIMIZER = 12  # bytes of a master copy and two moments: FP32
ROW = 2  # bytes of an element of an activation: BF16
KEPT_WIDTHS = 10  # vectors of the model's width that a layer keeps per token without recompute


@dataclass(frozen=True)
class Memory:
    """Bytes of the device that needs most."""

    weights: float  # with gradients and optimizer state
    slots: float
    kept: float  # activations that wait for backward
    rows: float  # rows, hidden and outputs of the layer at work, on the fullest rank

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.slots + self.kept + self.rows


def row_bytes(model: Model) -> int:
    """Bytes that one row of an expert takes while it is at work: in, gate and up, hidden, out."""
    return ROW * (2 * model.width + 3 * model.expert_width)


def slot_bytes(model: Model, *, training: bool) -> int:
    """Bytes of one spare slot; all layers share it."""
    return model.expert_weights * (WEIGHT_BYTES + (GRADIENT if training else 0))


def weight_bytes(model: Model, ranks: int, job: Training | Serving) -> float:
    """Bytes of a device's weights, gradients and optimizer state."""
    experts = model.moe_layers * model.experts * model.expert_weights / ranks / job.pipeline
    plain = model.plain_weights / job.pipeline
    if not job.trains:
        return WEIGHT_BYTES * (experts + plain)
    held = (WEIGHT_BYTES + GRADIENT) * (experts + plain)
    return held + OPTIMIZER * (experts / job.groups + plain / (ranks * job.groups))


def memory_of(
    model: Model, ranks: int, slots: int, job: Training | Serving, fullest: float
) -> Memory:
    """Return the memory of the device whose fullest layer serves `fullest` rows."""
    spare = float(slots * slot_bytes(model, training=job.trains))
    kept = _kept_bytes(model, job)
    return Memory(weight_bytes(model, ranks, job), spare, kept, fullest * row_bytes(model))


def _kept_bytes(model: Model, job: Training | Serving) -> float:
    """Return the bytes of activations that wait for backward, or of one layer in prefill."""
    vector = ROW * job.tokens * model.width
    if isinstance(job, Serving):
        return vector * KEPT_WIDTHS
    layers = math.ceil(model.layers / job.pipeline) * min(job.pipeline, job.microbatches)
    if job.recompute:
        return vector * layers + vector * KEPT_WIDTHS
    rows = job.tokens * model.top_k * row_bytes(model)
    return KEPT_WIDTHS * vector * layers + (layers - 1) * rows
