"""Qwen3-MoE of transformers, unmodified or balanced: part of `bench_frameworks.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from layers import PLAIN, qwen3_config
from torch import nn
from transformers import Qwen3MoeForCausalLM
from whole_models import (
    VOCABULARY,
    Choices,
    Size,
    WholeModel,
    forward_and_backward,
    last_imbalance,
    text_batch,
)

from ultraep.integrations.transformers import balance


class ChosenGate(nn.Module):
    """The library's router, with the choices of `Choices` where there are any."""

    def __init__(self, gate: nn.Module, choices: Choices) -> None:
        super().__init__()
        self.gate, self._choices = gate, choices

    def forward(self, tokens: torch.Tensor) -> Any:
        logits, gates, ids = self.gate(tokens)
        if self._choices.ids_TK is not None:
            ids, gates = self._choices.ids_TK, self._choices.gates(logits).to(gates.dtype)
        return logits, gates, ids


def build(
    size: Size,
    rank: int,
    device: torch.device,
    variant: str,
    choices: Choices,
    prepare: Callable[[nn.Module], None] = lambda _: None,
) -> WholeModel:
    """Qwen3-MoE of transformers. Unmodified, every rank holds all experts.

    prepare: changes the model before it is balanced.
    """
    config = qwen3_config(
        size,
        vocab_size=VOCABULARY,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 4,
        head_dim=size.hidden // size.heads,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = Qwen3MoeForCausalLM(config).to(dtype)
    prepare(model)
    for layer in model.model.layers:
        layer.mlp.gate = ChosenGate(layer.mlp.gate, choices)
    balancer = None if variant == PLAIN else balance(model, policy=variant, timeout=120.0)
    batch = text_batch(size, rank, device)

    def loss() -> torch.Tensor:
        answer: torch.Tensor = model(batch[:, :-1], labels=batch[:, :-1]).loss
        return answer

    step = partial(forward_and_backward, model, loss)
    return WholeModel(loss, step, partial(last_imbalance, balancer))
