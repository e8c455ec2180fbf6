"""Variants of torchtitan's Trainer, timed in turn on one rank: part of `bench_torchtitan.py`.

Shapes: B sequences, L tokens of each, K experts per token, E experts, D model width.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_torchtitan import SMALL, Scale
from layers import FORCED, PLAIN, RATIO, Facts, timed_steps
from load_cases import Shape, skewed_ids

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import torchtitan_tiny as tiny  # type: ignore[import-not-found]  # replaces CUDA on CPUs

# isort: split
from torchtitan.config.override import derive, override
from torchtitan.models.common.moe import TokenChoiceTopKRouter

from ultraep.integrations.torchtitan import balancers

LENGTH = 128  # sequence length


class FixedRouter(TokenChoiceTopKRouter):  # type: ignore[misc]
    """The framework's router with fixed choices."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):  # type: ignore[misc]
        tokens: int

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        shape = replace(SMALL, experts=config.num_experts, top_k=config.top_k, tokens=config.tokens)
        with torch.device("cpu"):  # the framework creates models on the meta device
            self._ids = skewed_ids(shape, RATIO)[dist.get_rank()]

    def forward(self, x_BLD: torch.Tensor, _: Any = None) -> tuple[Any, Any, Any]:
        scores_BLE = self.gate(x_BLD).softmax(-1)
        ids_BLK = self._ids.view(*x_BLD.shape[:2], -1)
        gates_BLK = scores_BLE.gather(-1, ids_BLK)
        return gates_BLK / gates_BLK.sum(-1, keepdim=True), ids_BLK, scores_BLE


@override(target=TokenChoiceTopKRouter.Config, description="choices with a skew")  # type: ignore[untyped-decorator]
def skewed(cfg: Any, *, tokens: int) -> Any:
    return derive(cfg, FixedRouter.Config, tokens=tokens)


def overrides(name: str, shape: Shape) -> list[Any]:
    """The overrides of the framework for a variant."""
    if name == FORCED:
        return []
    given: list[Any] = [(f"{skewed.__module__}.skewed", {"tokens": shape.tokens})]
    if name != PLAIN:
        given.append((f"{tiny.OVERRIDES}.balanced", {"policy": name}))
    return given


def trainer(name: str, scale: Scale, folder: str) -> Any:
    """Create the Trainer of one variant."""
    shape = scale.shape
    config = tiny.tiny(*overrides(name, shape), steps=1000, folder=folder)
    model = tiny.tiny_model(
        dim=shape.hidden,
        n_layers=scale.layers,
        moe_hidden_dim=shape.ffn,
        num_experts=shape.experts,
        top_k=shape.top_k,
    )
    config.model_spec = replace(config.model_spec, model=model)
    config.training.seq_len = LENGTH
    config.training.local_batch_size = shape.tokens // LENGTH
    config.debug.moe_force_load_balance = name == FORCED
    config.activation_checkpoint = None
    config.metrics.log_freq = 1 << 30
    return config.build()


def measure(rank: int, scale: Scale) -> dict[str, Facts]:
    """Time all variants in turn, in one process; the slowest rank counts."""
    os.environ["LOCAL_RANK"] = str(rank)
    logging.getLogger().setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    names = (PLAIN, "none", "ultraep", FORCED)
    with tempfile.TemporaryDirectory() as folder:
        made = {name: trainer(name, scale, folder) for name in names}
    batches = {name: made[name].batch_generator(made[name].dataloader) for name in names}

    def train(name: str) -> None:
        made[name].step = 2  # no logging
        made[name].train_step(batches[name])

    def imbalance(name: str) -> tuple[float, float]:
        if name in (PLAIN, FORCED):
            return (RATIO, RATIO) if name == PLAIN else (1.0, 1.0)
        (owner,) = balancers(made[name].model_parts)
        stats = owner.stats()
        return stats["imbalance_before"], stats["imbalance_after"]

    return timed_steps({name: partial(train, name) for name in names}, scale.rounds, imbalance)
