"""Model: the sizes of a Mixture-of-Experts transformer, and the counts that follow from them.

All counts are per token and layer unless the name says otherwise. A product with n weights takes
2n operations per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ultraep.errors import ConfigError
from ultraep_tools.sim.presets import as_record, check_range, load_table

WEIGHT_BYTES = 2  # BF16
GRADIENT_BYTES = 4  # FP32
ROW_BYTES = 2  # per element of a row or an activation: BF16
GATED = 3  # matrices of a gated MLP: gate, up, down
MAX_LAYERS = 1 << 12


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Fields of every attention type."""

    kind: str
    heads: int
    window: int = 0  # tokens that a windowed layer attends to
    windowed_layers: int = 0


@dataclass(frozen=True, kw_only=True)
class GroupedAttention(Attention):
    """Grouped-query attention: groups of heads share keys and values."""

    kv_heads: int
    head_width: int

    def weights(self, width: int) -> int:
        """Return the weights of the projections of one layer."""
        return width * self.head_width * (2 * self.heads + 2 * self.kv_heads)

    @property
    def core(self) -> int:
        """Operations per pair of tokens: scores, then values."""
        return 2 * self.heads * 2 * self.head_width


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Attention):
    """Multi-head latent attention: keys and values come from a narrow latent vector."""

    query_rank: int
    kv_rank: int
    plain_width: int
    rotary_width: int
    value_width: int

    def weights(self, width: int) -> int:
        key_width = self.plain_width + self.rotary_width
        query = self.query_rank * (width + self.heads * key_width)
        keys = width * (self.kv_rank + self.rotary_width)
        values = self.kv_rank * self.heads * (self.plain_width + self.value_width)
        return query + keys + values + self.heads * self.value_width * width

    @property
    def core(self) -> int:
        return 2 * self.heads * (self.plain_width + self.rotary_width + self.value_width)


ATTENTION: dict[Any, Any] = {"grouped": GroupedAttention, "latent": LatentAttention}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A transformer with `dense_layers` dense layers, then layers with experts."""

    name: str
    title: str
    source: str
    layers: int
    dense_layers: int
    width: int
    experts: int
    top_k: int
    expert_width: int
    vocabulary: int
    attention: GroupedAttention | LatentAttention
    dense_width: int = 0
    shared_width: int = 0

    def __post_init__(self) -> None:
        where = f"model {self.name}: "
        check_range(self, "layers", 1, MAX_LAYERS, where)
        check_range(self, "width experts top_k expert_width vocabulary", 1, where=where)
        if not 0 <= self.dense_layers < self.layers:
            raise ConfigError(
                f"{where}dense_layers must lie in 0..{self.layers - 1}, got {self.dense_layers}"
            )
        if self.top_k > self.experts:
            raise ConfigError(f"{where}top_k {self.top_k} is more than its {self.experts} experts")
        check_range(self.attention, "heads", 1, where=where)
        check_range(self.attention, "windowed_layers", 0, self.layers, where)
        check_range(self.attention, "window", int(self.attention.windowed_layers > 0), where=where)

    @property
    def expert_layers(self) -> range:
        return range(self.dense_layers, self.layers)

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def expert_weights(self) -> int:
        return GATED * self.width * self.expert_width

    @property
    def row_bytes(self) -> int:
        """Bytes that an expert holds for one row: input, gate and up, hidden, output."""
        return ROW_BYTES * (2 * self.width + 3 * self.expert_width)

    def slot_bytes(self, *, training: bool) -> int:
        """Return the bytes of a spare slot: weights, and gradients in training."""
        return self.expert_weights * (WEIGHT_BYTES + (GRADIENT_BYTES if training else 0))

    @property
    def attention_weights(self) -> int:
        return self.attention.weights(self.width)

    @property
    def shared_weights(self) -> int:
        """Weights of the shared experts and the router of one layer."""
        return GATED * self.width * self.shared_width + self.width * self.experts

    @property
    def plain_weights(self) -> int:
        """All weights except the experts: every rank of an expert-parallel group holds them."""
        dense = self.dense_layers * GATED * self.width * self.dense_width
        embeddings = 2 * self.vocabulary * self.width
        shared = self.moe_layers * self.shared_weights
        return self.layers * self.attention_weights + dense + shared + embeddings

    @property
    def all_expert_weights(self) -> int:
        return self.moe_layers * self.experts * self.expert_weights

    @property
    def weights(self) -> int:
        return self.plain_weights + self.all_expert_weights

    @property
    def active_weights(self) -> int:
        """Weights used for one token, without the input embedding."""
        active = self.plain_weights - self.vocabulary * self.width
        return active + self.moe_layers * self.top_k * self.expert_weights

    def attended(self, context: float) -> float:
        """Return how many of `context` preceding tokens a token attends to, mean over layers."""
        attention = self.attention
        near = min(context, attention.window) * attention.windowed_layers
        return (near + context * (self.layers - attention.windowed_layers)) / self.layers

    def training_operations(self, sequence: int) -> float:
        """Return the operations per token, forward and backward without recompute."""
        core = self.layers * self.attention.core * self.attended(sequence / 2)
        return 3 * (2 * self.active_weights + core)


def load_model(name: str) -> Model:
    table, where = load_table("models", name), f"model {name}"
    attention = table.get("attention")
    if not isinstance(attention, dict) or attention.get("kind") not in tuple(ATTENTION):
        raise ConfigError(f"{where}: attention must be a table with kind grouped or latent")
    record = as_record(ATTENTION[attention["kind"]], attention, f"{where}, attention")
    return as_record(Model, {**table, "attention": record}, where)
