"""A tiny random model of every family whose experts are in the registry of transformers."""

import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

EXPERTS, VOCABULARY = 8, 128
NAMED = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss"]
# Names of sizes in all families; a family takes the names that it knows.
SMALL: dict[str, Any] = {
    name: size
    for size, names in {
        1: "bos_token_id n_shared_experts topk_group first_k_dense_replace",
        2: "num_hidden_layers num_key_value_heads eos_token_id num_experts_per_tok top_k_experts "
        "moe_topk moe_k n_group index_n_heads linear_num_key_heads linear_num_value_heads "
        "linear_num_heads",
        4: "num_attention_heads qk_rope_head_dim mamba_n_heads mamba_num_heads",
        8: "head_dim kv_lora_rank qk_nope_head_dim v_head_dim index_head_dim linear_key_head_dim "
        "linear_value_head_dim linear_head_dim mamba_d_state mamba_head_dim ssm_state_size",
        12: "q_lora_rank",
        16: "shared_expert_intermediate_size mamba_d_head moe_hidden_size",
        24: "moe_intermediate_size",
        32: "hidden_size",
        48: "intermediate_size",
        256: "max_position_embeddings",
        VOCABULARY: "vocab_size",
    }.items()
    for name in names.split()
}
SMALL |= {"pad_token_id": 0, "tie_word_embeddings": False, "num_experts": EXPERTS}
SMALL |= {"num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "moe_num_experts": EXPERTS}
LATENT = {"num_key_value_heads": 4, "head_dim": None}  # low-rank attention
ROPE = {"rope_theta": 1e4, "rope_type": "default"}
FULL = {"layer_types": ["full_attention"] * 2}
# Classes of families without a causal language model in the library's table.
CLASSES = {
    "aria": "AriaTextForCausalLM",
    "deepseek_ocr2": "DeepseekOcr2TextModel",
    "diffusion_gemma": "DiffusionGemmaEncoderTextModel",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeTextModel",
    "gemma4": "Gemma4ForCausalLM",
    "glm4v_moe": "Glm4vMoeTextModel",
    "glm5_next": "Glm5NextTextModel",
    "inkling": "InklingForCausalLM",
    "inkling2": "Inkling2ForCausalLM",
    "minimax_m3_vl": "MiniMaxM3VLForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "mistral_large4": "MistralLarge4TextModel",
    "muse_spark": "MuseSparkTextModel",
    "openai_privacy_filter": "OpenAIPrivacyFilterForTokenClassification",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerTextModel",
    "qwen3_vl_moe": "Qwen3VLMoeTextModel",
    "unlimited_ocr": "UnlimitedOcrTextModel",
}
CONFIGS = {"MistralLarge4TextModel": "MistralLarge4TextConfig"}  # classes without `config_class`
LATENT_FAMILIES = """
axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 dots3_note glm4_moe_lite glm_moe_dsa
kimi_linear kolibri1 mistral4 mistral_large4
"""
# Settings besides the sizes above.
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(LATENT_FAMILIES.split(), LATENT),
    **dict.fromkeys(["diffusion_gemma", "qwen3_5_moe", "qwen3_next"], FULL),
    "beam": {"mlp_layer_types": ["sparse"] * 2},
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse"]},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [24, 16],
        "rope_parameters": ROPE | {"mrope_section": [1, 1, 2]},
    },
    "flint": {"mlp_only_layers": [0]},
    "gemma4": {
        **FULL,
        "enable_moe_block": True,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
    },
    "glm4v_moe": {
        "rope_parameters": ROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
    },
    "glm5_next": {
        **LATENT,
        "qk_rope_head_dim": 0,
        "layer_types": ["deepseek_sparse_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "nemotron_h": {"layers_block_type": ["attention", "moe"]},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "qwen4_exp": {
        **FULL,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
        "ple_layer_ids": [],
    },
    "unlimited_ocr": {"num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}


def families_of_the_library() -> set[str]:
    """Return the model folders of the library that have experts in its registry."""
    folder = Path(transformers.__file__).parent / "models"
    return {
        path.parent.name
        for path in folder.glob("*/modeling_*.py")
        if "@use_experts_implementation" in path.read_text()
    }


# Model classes by family. Versions of the library have different families.
FAMILIES: dict[str, str] = {
    family: name
    for family in families_of_the_library()
    if (name := CLASSES.get(family) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family))
}


def config(family: str, **sizes: Any) -> Any:
    name, settings = FAMILIES[family], SETTINGS.get(family, {})
    config_name = CONFIGS.get(name)
    cls = getattr(transformers, config_name or name)
    cls = cls if config_name else cls.config_class
    known = set(inspect.signature(cls).parameters)
    known |= {alias for alias, name in cls.attribute_map.items() if name not in SMALL}
    values = {key: value for key, value in SMALL.items() if key in known} | settings | sizes
    return cls(**{key: value for key, value in values.items() if value is not None})


def build(
    family: str, dtype: torch.dtype = torch.float32, experts: str = "eager", **sizes: Any
) -> Any:
    """Return a model with the same random weights in every process, and skewed routers."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, FAMILIES[family])._from_config(
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
    """Return the ids of a rank; number and distribution of tokens differ between ranks."""
    draw = torch.Generator().manual_seed(100 + rank)
    last = VOCABULARY if rank % 2 == 0 else 40
    return torch.randint(3, last, (rows + rank % 2, length + 2 * rank), generator=draw)


def outputs(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the logits, or the hidden states of a model without a head, in 32 bits or more."""
    result = model(input_ids=ids, use_cache=False, **options)
    values = result.logits if hasattr(result, "logits") else result.last_hidden_state
    return values.float() if values.dtype.itemsize < 4 else values


def loss(values: torch.Tensor) -> torch.Tensor:
    """Return a sum over tokens that depends on all outputs."""
    weights = torch.linspace(-1, 1, values.shape[-1], dtype=values.dtype)
    return (values * weights).tanh().sum() / 10


def training_arguments(folder: Path, batch_size: int, **options: Any) -> Any:
    """Return the arguments of a short training of the Trainer."""
    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": batch_size,
        "logging_steps": 1,
        "learning_rate": 3e-3,
        "max_grad_norm": 0.3,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
    }
    return transformers.TrainingArguments(**defaults | options)


def samples() -> list[dict[str, torch.Tensor]]:
    """Return 64 rows of random tokens, with labels."""
    rows = torch.randint(3, VOCABULARY, (64, 12), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in rows]
