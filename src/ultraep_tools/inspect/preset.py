"""The sizes of an inspected model as TOML, for `ultraep advise --model`."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from ultraep_tools.inspect.blocks import Anatomy, num_experts
from ultraep_tools.sim.model import GATED


def preset(name: str, model: nn.Module, config: Any, anatomy: Anatomy, top_k: int) -> str:
    """Return the text of a file with one model."""
    layer, experts = next(iter(anatomy.experts.items()))
    width, count = config.hidden_size, num_experts(experts)
    block = anatomy.blocks[anatomy.block_of_layer[layer]]
    dense = set(anatomy.blocks) - set(anatomy.block_of_layer.values())
    table = {
        "title": name,
        "source": f"ultraep inspect, {type(model).__name__}",
        "layers": len(anatomy.blocks),
        "dense_layers": len(dense),
        "width": width,
        "experts": count,
        "top_k": top_k,
        "expert_width": max(1, parameters(experts) // (count * GATED * width)),
        "vocabulary": config.vocab_size,
        "shared_width": _shared_width(block, experts, width),
        "attention": _attention(config),
    }
    if dense:
        table["dense_width"] = int(getattr(config, "intermediate_size", 0) or 0)
    return "\n".join(["[inspected]", *(f"{key} = {_toml(table[key])}" for key in table)]) + "\n"


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shared_width(block: nn.Module, experts: nn.Module, width: int) -> int:
    """Parameters beside experts and router in their parent module, as the width of a gated MLP."""
    parent = next(m for m in block.modules() if any(child is experts for child in m.children()))
    count, own = num_experts(experts), set(experts.parameters())
    router = ((count, width), (count,))  # shapes
    shared = [p for p in parent.parameters() if p not in own and tuple(p.shape) not in router]
    return sum(p.numel() for p in shared) // (GATED * width)


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
