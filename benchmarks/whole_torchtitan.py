"""Qwen3-MoE in torchtitan's Trainer, unmodified or balanced: part of `bench_frameworks.py`.

Shapes: B sequences, L tokens of each, K experts per token, E experts, D model width.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from layers import PLAIN
from whole_models import Choices, Size, WholeModel, last_imbalance

from torchtitan_cpu import use_gloo  # type: ignore[import-not-found]  # isort: skip

if torch.cuda.is_available():
    use_gloo()  # ranks share the GPU

import torchtitan_tiny as tiny  # type: ignore[import-not-found]  # isort: skip  # replaces CUDA on CPUs

from torchtitan.components.optimizer import default_adamw
from torchtitan.config.override import derive, override
from torchtitan.models.common.moe import TokenChoiceTopKRouter

from ultraep.integrations.torchtitan import balancers

LONGEST = 512  # tokens of a sequence, by the positions of the tiny model


class ChosenRouter(TokenChoiceTopKRouter):  # type: ignore[misc]
    """The framework's router, with the choices of `choices` where there are any."""

    choices: Choices  # set before a model is built

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):  # type: ignore[misc]
        pass

    def forward(self, x_BLD: torch.Tensor, bias: Any = None) -> Any:
        gates_BLK, ids_BLK, scores_BLE = super().forward(x_BLD, bias)
        if self.choices.ids_TK is not None:
            ids_BLK = self.choices.ids_TK.view(ids_BLK.shape).to(ids_BLK.dtype)
            chosen = scores_BLE.gather(-1, ids_BLK.long())
            gates_BLK = (chosen / chosen.sum(-1, keepdim=True)).to(gates_BLK.dtype)
        return gates_BLK, ids_BLK, scores_BLE


@override(target=TokenChoiceTopKRouter.Config, description="given choices")  # type: ignore[untyped-decorator]
def given_choices(cfg: Any) -> Any:
    return derive(cfg, ChosenRouter.Config)


def build(
    size: Size, rank: int, device: torch.device, variant: str, choices: Choices
) -> WholeModel:
    """Qwen3-MoE in torchtitan's Trainer, with FSDP2 and the optimizer.

    Heads are narrow: the dense parameters that FSDP2 gathers pass through the host on one card.
    """
    ChosenRouter.choices = choices
    os.environ["LOCAL_RANK"] = "0" if device.type == "cuda" else str(rank)
    overrides: list[Any] = [f"{__name__}.given_choices"]
    if variant != PLAIN:
        overrides.append((f"{tiny.OVERRIDES}.balanced", {"policy": variant}))
    with tempfile.TemporaryDirectory() as folder:
        config = tiny.tiny(*overrides, steps=1000, folder=folder)
        model = tiny.tiny_model(
            dim=size.hidden,
            n_layers=size.layers,
            moe_hidden_dim=size.ffn,
            num_experts=size.experts,
            top_k=size.top_k,
        )
        # Without the update of router biases, every step has the same routing.
        config.model_spec = replace(config.model_spec, model=model, post_optimizer_build_fn=None)
        length = min(size.sequence_length, LONGEST)
        config.training.seq_len = length
        config.training.local_batch_size = size.tokens // length
        config.activation_checkpoint = None
        config.optimizer = default_adamw(lr=0.0)
        config.metrics.log_freq = 1 << 30
        trainer = config.build()
    inputs, labels = next(trainer.batch_generator(trainer.dataloader))
    batches = (({**inputs}, labels) for _ in itertools.count())  # the trainer moves them to the GPU
    valid = torch.tensor(dist.get_world_size() * labels.numel(), device=device)

    def loss() -> torch.Tensor:
        trainer.optimizers.zero_grad()
        on_device = {name: value.to(device) for name, value in inputs.items()}
        answer: torch.Tensor = trainer.forward_backward_step(
            input_dict=on_device, labels=labels.to(device), global_valid_tokens=valid
        )
        return answer

    def step() -> None:
        trainer.step = 2  # nothing is logged
        trainer.train_step(batches)

    def imbalance() -> tuple[float, float]:
        return last_imbalance(balancers(trainer.model_parts)[0])

    return WholeModel(loss, step, imbalance)
