"""GPT of Megatron-Core, unmodified or balanced: part of `bench_frameworks.py`.

With the settings `BF16` or `FP8` it has layers of Transformer Engine.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import megatron.core.transformer.moe.moe_utils as moe_utils
import torch
from layers import PLAIN
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from whole_models import (
    VOCABULARY,
    Choices,
    Size,
    WholeModel,
    forward_and_backward,
    last_imbalance,
    text_batch,
)

from ultraep.integrations.megatron import balanced, balancers
from ultraep.integrations.megatron.experts import parts_of

OF_ENGINE = {
    "moe_grouped_gemm": True,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "pipeline_dtype": torch.bfloat16,
}
BF16: dict[str, Any] = OF_ENGINE
FP8 = OF_ENGINE | {"fp8": "e4m3", "fp8_recipe": "blockwise"}


def configured(size: Size, *, on_card: bool, **engine: Any) -> Any:
    return TransformerConfig(
        **engine,
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        num_moe_experts=size.experts,
        moe_router_topk=size.top_k,
        moe_ffn_hidden_size=size.ffn,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=size.ranks,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        use_cpu_initialization=not on_card,
        bf16=on_card,
        params_dtype=torch.bfloat16 if on_card else torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def chosen_router(choices: Choices) -> type:
    """The library's router, with the choices of `choices` where there are any."""

    class ChosenRouter(TopKRouter):  # type: ignore[misc]
        def routing(self, logits: torch.Tensor, **options: Any) -> Any:
            if choices.ids_TK is None:
                return super().routing(logits, **options)
            logits = logits.view(-1, logits.shape[-1])
            chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, choices.ids_TK, True)
            return logits.masked_fill(~chosen, -torch.inf).softmax(dim=-1), chosen

    return ChosenRouter


def model_of(
    size: Size,
    device: torch.device,
    variant: str,
    choices: Choices,
    engine: dict[str, Any] | None = None,
) -> Any:
    """GPT of Megatron-Core; unmodified, it dispatches rows by all-to-all.

    engine: further settings; layers are those of Transformer Engine if they have grouped products.
    """
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 reads it even without Transformer Engine
        moe_utils.te_general_gemm = None
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=size.ranks)
    get_cuda_rng_tracker().reset()
    model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    config = configured(size, on_card=device.type == "cuda", **engine or {})
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=config.moe_grouped_gemm)
    for layer in spec.layer_specs:
        parts_of(layer.submodules.mlp)[1].router = chosen_router(choices)
    if variant != PLAIN:
        spec = balanced(spec, config, policy=variant, timeout=120.0)
    length = size.sequence_length
    model = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=length)
    return model.to(device, config.params_dtype)


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """The loss of `[B, L + 1]` tokens."""
    length, device = batch.shape[1] - 1, batch.device
    positions = torch.arange(length, device=device).expand(len(batch), -1)
    mask = torch.ones(length, length, device=device).triu(1).bool()[None, None]
    losses: torch.Tensor = model(batch[:, :-1], positions, mask, labels=batch[:, 1:])
    return losses.mean()


def build(
    size: Size,
    rank: int,
    device: torch.device,
    variant: str,
    choices: Choices,
    engine: dict[str, Any] | None = None,
) -> WholeModel:
    model = model_of(size, device, variant, choices, engine)
    loss = partial(loss_of, model, text_batch(size, rank, device))

    def imbalance() -> tuple[float, float]:
        return last_imbalance(balancers(model)[0])

    return WholeModel(loss, partial(forward_and_backward, model, loss), imbalance)
