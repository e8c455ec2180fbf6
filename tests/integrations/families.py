"""A tiny random model of every family whose experts are in the registry of transformers."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import transformers

EXPERTS, VOCABULARY = 8, 128
# What families call their sizes; each takes those that it knows.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "moe_hidden_size": 16,
}
LATENT = {"num_key_value_heads": 4, "head_dim": None}  # attention with one low rank for all heads
FULL = {"layer_types": ["full_attention"] * 2}
# The class of a model, and what a family needs beside the sizes above.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("AfmoeForCausalLM", {}),
    "aria": ("AriaTextForCausalLM", {}),
    "axk1": ("AXK1ForCausalLM", LATENT),
    "axk2": ("AXK2ForCausalLM", LATENT),
    "bailing_hybrid": ("BailingHybridForCausalLM", LATENT),
    "beam": ("BeamForCausalLM", {"mlp_layer_types": ["sparse"] * 2}),
    "cohere2_moe": ("Cohere2MoeForCausalLM", {}),
    "deepseek_ocr2": ("DeepseekOcr2TextModel", {"mlp_layer_types": ["dense", "sparse"]}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", LATENT),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT),
    "deepseek_v32": ("DeepseekV32ForCausalLM", LATENT),
    "deepseek_v4": ("DeepseekV4ForCausalLM", {}),
    "diffusion_gemma": ("DiffusionGemmaEncoderTextModel", FULL),
    "dots1": ("Dots1ForCausalLM", {}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", {}),
    "ernie4_5_vl_moe": (
        "Ernie4_5_VLMoeTextModel",
        {
            "moe_intermediate_size": [24, 16],
            "rope_parameters": {
                "rope_theta": 1e4,
                "rope_type": "default",
                "mrope_section": [1, 1, 2],
            },
        },
    ),
    "exaone_moe": ("ExaoneMoeForCausalLM", {}),
    "flex_olmo": ("FlexOlmoForCausalLM", {}),
    "flint": ("FlintForCausalLM", {"mlp_only_layers": [0]}),
    "gemma4": (
        "Gemma4ForCausalLM",
        {
            **FULL,
            "enable_moe_block": True,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "glm4_moe": ("Glm4MoeForCausalLM", {}),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", LATENT),
    "glm4v_moe": (
        "Glm4vMoeTextModel",
        {
            "rope_parameters": {
                "rope_theta": 1e4,
                "rope_type": "default",
                "mrope_section": [1, 1, 0],
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    "glm5_next": (
        "Glm5NextTextModel",
        {
            **LATENT,
            "qk_rope_head_dim": 0,
            "layer_types": ["deepseek_sparse_attention"] * 2,
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", LATENT),
    "gpt_oss": ("GptOssForCausalLM", {}),
    "granitemoe": ("GraniteMoeForCausalLM", {}),
    "granitemoe_swa": ("GraniteMoeSWAForCausalLM", {}),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", {"layer_types": ["mamba", "attention"]}),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM", {}),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", {}),
    "hy_v3": ("HYV3ForCausalLM", {}),
    "hy_v4": ("HYV4ForCausalLM", {}),
    "inkling": ("InklingForCausalLM", {}),
    "jamba": ("JambaForCausalLM", {}),
    "kimi_linear": ("KimiLinearForCausalLM", LATENT),
    "kolibri1": ("Kolibri1ForCausalLM", LATENT),
    "laguna": ("LagunaForCausalLM", {}),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "mellum": ("MellumForCausalLM", {}),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", {}),
    "minimax": ("MiniMaxForCausalLM", {}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", {}),
    "minimax_m3_vl": ("MiniMaxM3VLForCausalLM", {}),
    "mistral4": ("Mistral4ForCausalLM", LATENT),
    "mistral_large4": ("MistralLarge4TextModel", LATENT),
    "mixtral": ("MixtralForCausalLM", {}),
    "muse_spark": ("MuseSparkTextModel", {}),
    "nemotron_h": ("NemotronHForCausalLM", {"layers_block_type": ["attention", "moe"]}),
    "olmoe": ("OlmoeForCausalLM", {}),
    "openai_privacy_filter": ("OpenAIPrivacyFilterForTokenClassification", {}),
    "phimoe": ("PhimoeForCausalLM", {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {}),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", FULL),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {}),
    "qwen3_next": ("Qwen3NextForCausalLM", FULL),
    "qwen3_omni_moe": ("Qwen3OmniMoeThinkerTextModel", {}),
    "qwen3_vl_moe": ("Qwen3VLMoeTextModel", {}),
    "qwen4_exp": (
        "Qwen4ExpForCausalLM",
        {
            **FULL,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
            "hc_lowrank": 8,
            "ple_layer_ids": [],
        },
    ),
    "solar_open": ("SolarOpenForCausalLM", {}),
    "unlimited_ocr": ("UnlimitedOcrTextModel", {"num_key_value_heads": 4}),
    "zaya": ("ZayaForCausalLM", {"num_experts_per_tok": 1}),
}
CONFIGS = {"MistralLarge4TextModel": "MistralLarge4TextConfig"}  # where the class does not say it
# Families that cannot be built from a small configuration, and why.
NOT_BUILT: dict[str, str] = {}


def families_of_the_library() -> set[str]:
    """The folders of models with a class of experts that is decorated for the registry."""
    folder = Path(transformers.__file__).parent / "models"
    return {
        path.parent.name
        for path in folder.glob("*/modeling_*.py")
        if "@use_experts_implementation" in path.read_text()
    }


# Older versions of the library have fewer.
FAMILIES = {name: FAMILIES[name] for name in FAMILIES.keys() & families_of_the_library()}


def config(family: str, **sizes: Any) -> Any:
    name, needs = FAMILIES[family]
    named = CONFIGS.get(name)
    kind = getattr(transformers, named) if named else getattr(transformers, name).config_class
    known = set(inspect.signature(kind).parameters)
    known |= {also for also, name in kind.attribute_map.items() if name not in SMALL}
    expected = {key: value for key, value in SMALL.items() if key in known} | needs | sizes
    return kind(**{key: value for key, value in expected.items() if value is not None})


def build(
    family: str, dtype: torch.dtype = torch.float32, experts: str = "eager", **sizes: Any
) -> Any:
    """A model that is drawn alike everywhere, with routers that like some experts."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, FAMILIES[family][0])._from_config(
            config(family, **sizes),
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation=experts,
        )
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                spread = 0.25 if parameter.ndim > 1 else 0.05
                drawn = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
                parameter.copy_(spread * drawn)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.copy_(0.1 * torch.rand(buffer.shape, generator=draw, dtype=torch.float64))
    return model.train()


def batch(rank: int, rows: int = 2, length: int = 9) -> torch.Tensor:
    """Ids of a rank: each has another number of tokens, and other words that it likes."""
    draw = torch.Generator().manual_seed(100 + rank)
    last = VOCABULARY if rank % 2 == 0 else 40
    return torch.randint(3, last, (rows + rank % 2, length + 2 * rank), generator=draw)


def outputs(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Logits, or what a model without a head makes of tokens; not in less than 32 bits."""
    found = model(input_ids=ids, use_cache=False, **options)
    values = found.logits if hasattr(found, "logits") else found.last_hidden_state
    return values.float() if values.dtype.itemsize < 4 else values


def loss(values: torch.Tensor) -> torch.Tensor:
    """A sum over tokens that depends on all outputs."""
    weights = torch.linspace(-1, 1, values.shape[-1], dtype=values.dtype)
    return (values * weights).tanh().sum() / 10
