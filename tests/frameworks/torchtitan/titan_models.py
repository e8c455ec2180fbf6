"""Tiny models of three families, and settings of short runs on CPU ranks."""

from dataclasses import replace

import torchtitan_tiny as tiny  # first: on CPUs it replaces modules that the framework imports

# isort: split
import torchtitan.models.deepseek_v3 as deepseek
import torchtitan.models.gpt_oss as gpt_oss
from torchtitan.config import CompileConfig
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

DIM, EXPERTS, VOCABULARY = 64, 8, 256
BALANCED, METRICS = f"{tiny.OVERRIDES}.balanced", f"{tiny.OVERRIDES}.metrics"
RECOMPUTE = {
    "none": lambda: None,
    "full": FullAC.Config,
    "selective": SelectiveAC.Config,
    "memory budget": lambda: MemoryBudgetAC.Config(memory_budget=0.2),
}


def around(family, model, layers, last, norm):
    embedding = family.Embedding.Config(
        num_embeddings=VOCABULARY, embedding_dim=DIM, param_init=family._EMBEDDING_INIT
    )
    head = family.Linear.Config(in_features=DIM, out_features=VOCABULARY, param_init=last)
    return model.Config(
        vocab_size=VOCABULARY,
        dim=DIM,
        tok_embeddings=embedding,
        norm=norm,
        lm_head=head,
        layers=layers,
    )


def deepseek_v3():
    """Return a model with a dense layer, and a layer with shared experts and sigmoid gates."""
    layers = deepseek._build_dsv3_layers(
        n_layers=2,
        n_dense_layers=1,
        dim=DIM,
        n_heads=4,
        q_lora_rank=0,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        mscale=0.7,
        dense_hidden_dim=96,
        moe_hidden_dim=48,
        num_experts=EXPERTS,
        num_shared_experts=2,
        router_top_k=3,
        router_score_func="sigmoid",
        router_num_expert_groups=4,
        router_num_limited_groups=2,
        router_route_scale=2.0,
        router_route_norm=True,
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=deepseek.ComplexRoPE.Config(dim=16, max_seq_len=512, theta=10000.0),
    )
    norm = deepseek.RMSNorm.Config(normalized_shape=DIM, param_init=deepseek._NORM_INIT)
    last = deepseek._output_linear_init(DIM)
    return around(deepseek, deepseek.DeepSeekV3Model, layers, last, norm)


def gpt_oss_small():
    """Return a model whose experts have biases and a clamped activation."""
    layers = gpt_oss._build_gptoss_layers(
        dim=DIM,
        n_layers=2,
        hidden_dim=48,
        num_experts=EXPERTS,
        top_k=2,
        load_balance_coeff=1e-3,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=gpt_oss.CosSinRoPE.Config(dim=64, max_seq_len=512, theta=150000.0),
    )
    norm = gpt_oss.RMSNorm.Config(normalized_shape=DIM, param_init=gpt_oss._NORM_INIT)
    last = gpt_oss._output_linear_init(DIM)
    return around(gpt_oss, gpt_oss.GptOssModel, layers, last, norm)


def spec(family, dispatcher="standard"):
    if family == "qwen3":
        model = tiny.tiny_model(moe_comm_backend=dispatcher)
        return replace(tiny.qwen3.model_registry("debugmodel_moe"), model=model)
    if family == "deepseek_v3":
        return replace(deepseek.model_registry("debugmodel"), model=deepseek_v3())
    return replace(gpt_oss.model_registry("debugmodel"), model=gpt_oss_small())


def settings(
    family,
    *overrides,
    folder,
    steps=2,
    recompute="none",
    ranks_of_experts=2,
    accumulate=1,
    backend="partial_dtensor",
    forced=False,
    bfloat16=False,
    compiler=None,
    dispatcher="standard",
    **parallel,
):
    config = tiny.tiny(*overrides, steps=steps, folder=str(folder))
    config.model_spec = spec(family, dispatcher)
    config.activation_checkpoint = RECOMPUTE[recompute]()
    config.parallelism.expert_parallel_degree = ranks_of_experts
    config.parallelism.spmd_backend = backend
    for name, value in parallel.items():
        setattr(config.parallelism, name, value)
    config.training.seq_len, config.training.local_batch_size = 32, 2
    if accumulate > 1:
        config.training.global_batch_size = 2 * accumulate * tiny.dist.get_world_size()
    if bfloat16:
        config.training.mixed_precision_param = "bfloat16"
    if compiler is not None:
        config.compile = CompileConfig(enable=True, components=["model"], backend=compiler)
    config.debug.moe_force_load_balance = forced
    return config
