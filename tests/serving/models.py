"""Tiny checkpoints: with experts, and without."""

import torch

from ultraep_tools.inspect.library import transformers

TINY = {
    "vocab_size": 128,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def save_tiny(folder, *, experts=True):
    """Save a random model of two layers, which is fast to serve."""
    library = transformers()
    torch.manual_seed(0)
    if experts:
        model = library.Qwen3MoeForCausalLM(library.Qwen3MoeConfig(**TINY, **EXPERTS))
    else:
        model = library.Qwen3ForCausalLM(library.Qwen3Config(**TINY))
    model.save_pretrained(folder)
    return str(folder)
