"""The size of the layer of level 3."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ultraep.errors import ConfigError, FileError
from ultraep.files.reading import read_text, reading
from ultraep_tools.sim.presets import check_range

# Names in the config.json of a checkpoint, in order of preference.
CONFIG_NAMES = {
    "hidden": ("hidden_size",),
    "ffn": ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
    "experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
}


@dataclass(frozen=True)
class LayerSize:
    """A layer, and the tokens of every rank."""

    hidden: int
    ffn: int
    experts: int
    top_k: int
    tokens: int

    def __post_init__(self) -> None:
        check_range(self, "hidden ffn experts top_k tokens", 1)
        if self.top_k > self.experts:
            raise ConfigError(f"top_k {self.top_k} is more than the {self.experts} experts")

    def __str__(self) -> str:
        return (
            f"{self.hidden} x {self.ffn}, {self.experts} experts, top-{self.top_k}, "
            f"{self.tokens} tokens per rank"
        )


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the sizes in the config.json of a checkpoint."""
    path, sizes = folder / "config.json", {}
    text = read_text(path)
    with reading(path, "JSON"):
        config = dict(json.loads(text))
        config = dict(config.get("text_config", config))
    for name, keys in CONFIG_NAMES.items():
        values = [config[key] for key in keys if isinstance(config.get(key), int)]
        if not values:
            raise FileError(f"{path}: has no {' or '.join(keys)}; pass --{name.replace('_', '-')}")
        sizes[name] = values[0]
    return sizes
