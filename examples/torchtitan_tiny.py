"""A tiny Qwen3-MoE for torchtitan: settings, text, and a logger that stores the metrics.

For `torchtitan_train.py`, the tests and the benchmark. Import it before torchtitan: without a GPU,
it makes torchtitan run on CPU ranks (`torchtitan_cpu.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torchtitan_cpu

if not torch.cuda.is_available():
    torchtitan_cpu.use_cpu()

import torchtitan.models.qwen3 as qwen3
from numpy.random import default_rng
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import BaseLogger
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.override import OverrideConfig
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

from ultraep_tools.demo.text import Text

OVERRIDES = "ultraep.integrations.torchtitan"


class Bytes(BaseTokenizer):
    """A tokenizer with one token per byte."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        del config, tokenizer_path
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 256


class Library(BaseDataLoader):
    """Python's standard library; every rank reads another subject, which skews the loads."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        seed: int = 0

    def __init__(
        self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self._text, self._rng = Text(), default_rng([config.seed, dp_rank])
        self._subjects = [self._text.names[dp_rank % len(self._text.names)]] * local_batch_size
        self._length, self._key = seq_len, f"dp_rank_{dp_rank}"

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        positions = torch.arange(self._length).repeat(len(self._subjects), 1)
        while True:
            rows = self._text.sequences(self._rng, self._subjects, self._length + 1)
            tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
            yield {"input": tokens, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        return {self._key: json.dumps(self._rng.bit_generator.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rng.bit_generator.state = json.loads(state[self._key])


class Kept(BaseLogger):
    """A logger that stores the metrics of every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.steps.append({**metrics, "step": step})


def tiny_model(dim: int = 64, **layers: Any) -> Any:
    """Return a model of two layers of eight experts; `layers` overrides their settings."""
    usual = {
        "n_layers": 2,
        "moe_hidden_dim": 48,
        "num_experts": 8,
        "top_k": 2,
        "moe_comm_backend": "standard",
    }
    return qwen3.Qwen3Model.Config(
        vocab_size=256,
        dim=dim,
        norm=qwen3._qwen3_norm(dim),
        tok_embeddings=qwen3.Embedding.Config(
            num_embeddings=256, embedding_dim=dim, param_init=qwen3._EMBEDDING_INIT
        ),
        lm_head=qwen3.Linear.Config(
            in_features=dim, out_features=256, param_init=qwen3._LINEAR_INIT
        ),
        layers=qwen3._build_qwen3_moe_layers(
            fuse_qkv=True,
            dim=dim,
            n_heads=4,
            n_kv_heads=2,
            head_dim=16,
            attn_backend="flex",
            rope=qwen3.CosSinRoPE.Config(dim=16, max_seq_len=512, theta=1e6),
            **(usual | layers),
        ),
    )


def tiny(*overrides: Any, steps: int, folder: str) -> Any:
    """Return the settings of a run with these overrides."""
    config = qwen3_moe_debug()
    config.model_spec = replace(config.model_spec, model=tiny_model())
    config.loss.loss_fn.global_vocab_size = 256
    config.tokenizer, config.dataloader = Bytes.Config(), Library.Config()
    config.training = replace(
        config.training,
        seq_len=64,
        local_batch_size=4,
        steps=steps,
        disable_cuda_graphs=True,
        mixed_precision_param="float32",
    )
    config.parallelism.expert_parallel_degree = dist.get_world_size()
    config.parallelism.spmd_backend = "partial_dtensor"  # the usual one needs torch 2.14
    config.checkpoint.enable, config.debug.seed, config.dump_folder = False, 1, folder
    config.override = OverrideConfig(imports=list(overrides))
    return config


def train(config: Any) -> list[dict[str, float]]:
    """Train and return the metrics of every step."""
    trainer = config.build()
    trainer.metrics_processor.logger = kept = Kept()
    trainer.train()
    trainer.close()
    return kept.steps
