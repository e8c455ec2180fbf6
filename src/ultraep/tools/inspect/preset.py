"""The model's sizes as a table for the simulator: `ultraep advise --model OUT/model.toml`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from ultraep.files.writing import write_text
from ultraep.tools.inspect.run import Inspection
from ultraep.tools.sim.model import GATED

NAME = "inspected"


def write_preset(path: Path, inspection: Inspection, top_k: int) -> None:
    """A table with the sizes, as far as the simulator knows them."""
    lines = [f"{name} = {_toml(value)}" for name, value in sizes(inspection, top_k).items()]
    write_text(path, "\n".join([f"[{NAME}]", *lines]) + "\n")


def sizes(inspection: Inspection, top_k: int) -> dict[str, Any]:
    """Sizes of the model, from its configuration and the shapes of its weights."""
    opened, anatomy = inspection.opened, inspection.opened.anatomy
    config, experts = (
        opened.config.get_text_config(),
        next(iter(inspection.anatomy.experts.values())),
    )
    width, count = config.hidden_size, inspection.topology.experts
    layer = next(iter(inspection.anatomy.block_of_layer))
    dense = set(anatomy.blocks) - set(anatomy.block_of_layer.values())
    table = {
        "title": inspection.options.name,
        "source": f"ultraep inspect, {type(opened.model).__name__}",
        "layers": len(anatomy.blocks),
        "dense_layers": len(dense),
        "width": width,
        "experts": count,
        "top_k": top_k,
        "expert_width": max(1, _weights(experts) // (count * GATED * width)),
        "vocabulary": config.vocab_size,
        "shared_width": _shared(anatomy.blocks[anatomy.block_of_layer[layer]], experts, width),
        "attention": _attention(config),
    }
    if dense:
        table["dense_width"] = int(getattr(config, "intermediate_size", 0) or 0)
    return table


def _weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shared(block: nn.Module, experts: nn.Module, width: int) -> int:
    """What stands beside experts and router in their parent, as the width of a gated MLP."""
    parent = next(m for m in block.modules() if any(child is experts for child in m.children()))
    count, own = len(next(experts.parameters())), set(experts.parameters())
    router = ((count, width), (count,))  # shapes
    beside = [p for p in parent.parameters() if p not in own and tuple(p.shape) not in router]
    return sum(p.numel() for p in beside) // (GATED * width)


def _attention(config: Any) -> dict[str, Any]:
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None) and getattr(config, "q_lora_rank", None):
        return {
            "kind": "latent",
            "heads": heads,
            "query_rank": config.q_lora_rank,
            "kv_rank": config.kv_lora_rank,
            "plain_width": config.qk_nope_head_dim,
            "rotary_width": config.qk_rope_head_dim,
            "value_width": config.v_head_dim,
        }
    return {
        "kind": "grouped",
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_width": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(entry)}" for name, entry in value.items()) + " }"
    return json.dumps(value)
