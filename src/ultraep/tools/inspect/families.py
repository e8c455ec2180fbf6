"""Small random models of transformers' families, to try `ultraep inspect`.

The number of experts and of experts per token are the family's; all other sizes are small.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ultraep.errors import ConfigError
from ultraep.tools.inspect.blocks import Anatomy
from ultraep.tools.inspect.library import build_model, transformers

SMALL: dict[str, int] = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALWAYS = {"head_dim", "pad_token_id", "bos_token_id", "eos_token_id"}  # also without a default
LATENT: dict[str, int] = {  # for multi-head latent attention
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 16,
    "num_key_value_heads": 4,
}
MORE: dict[str, dict[str, Any]] = {  # sizes without a default
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
}
FAMILIES = (
    *("afmoe", "axk1", "bailing_hybrid", "cohere2_moe", "deepseek_v2", "deepseek_v3"),
    *("deepseek_v32", "deepseek_v4", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo"),
    *("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "granitemoe", "hy_v3"),
    *("jamba", "minimax", "minimax_m2", "mixtral", "nemotron_h", "olmoe"),
    *("phimoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "solar_open"),
)


def small_config(family: str) -> Any:
    """The configuration of a small model of this family."""
    if family not in FAMILIES:
        raise ConfigError(f"unknown family {family!r}; known families: {', '.join(FAMILIES)}")
    library = transformers()
    if family not in library.CONFIG_MAPPING:
        raise ConfigError(
            f"transformers {library.__version__} does not have family {family!r}; install a newer "
            "version, or choose another family"
        )
    defaults = library.AutoConfig.for_model(family).to_dict()
    sizes = SMALL | (LATENT if "kv_lora_rank" in defaults else {})
    sizes = {name: size for name, size in sizes.items() if name in defaults or name in ALWAYS}
    return library.AutoConfig.for_model(family, **(sizes | MORE.get(family, {})))


class RandomModel:
    """A small model of a family with random weights in memory; used like a `Checkpoint`."""

    def __init__(
        self, family: str, *, device: torch.device, dtype: torch.dtype | None, seed: int
    ) -> None:
        self.config, self.device, self.dtype = small_config(family), device, dtype or torch.float32
        torch.manual_seed(seed)
        self.model = build_model(self.config, torch.float32).to(device, self.dtype)
        self.anatomy = Anatomy.of(self.model)

    def loaded(self, _: str) -> AbstractContextManager[None]:
        """The weights are always in memory."""
        return nullcontext()

    def bytes_to_read(self, _: list[str]) -> int:
        """0: there are no files."""
        return 0

    def bytes_in_memory(self) -> int:
        """Bytes of all weights."""
        return sum(parameter.nbytes for parameter in self.model.parameters())
