"""The size of the layer of level 3."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ultraep.errors import FileError
from ultraep.files.reading import read_text

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
    dtype: str

    def __str__(self) -> str:
        return (
            f"{self.hidden} x {self.ffn}, {self.experts} experts, top-{self.top_k}, "
            f"{self.tokens} tokens per rank, {self.dtype}"
        )


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the sizes in the config.json of a checkpoint."""
    path = folder / "config.json"
    try:
        config = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise FileError(f"{path}: is not JSON: {error}") from None
    config = config.get("text_config", config)
    sizes = {}
    for name, keys in CONFIG_NAMES.items():
        values = [config[key] for key in keys if isinstance(config.get(key), int)]
        if not values:
            raise FileError(f"{path}: has no {' or '.join(keys)}; pass --{name.replace('_', '-')}")
        sizes[name] = values[0]
    return sizes
