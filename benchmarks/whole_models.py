"""Whole models of frameworks as `bench_frameworks.py` measures them.

`whole_transformers.py`, `whole_megatron.py` and `whole_torchtitan.py` each have a function `build`
that makes one variant of a model: unmodified, or balanced with a policy.

Shapes: T tokens of a rank, K experts per token, E experts, D model width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from load_cases import Shape
from numpy.random import default_rng
from torch import nn

from ultraep.workload import Load
from ultraep_tools.demo.text import Text

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

VOCABULARY = 256  # bytes of text


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """A model, its load with one hot rank, and how it is measured."""

    hot: Load
    layers: int = 4
    heads: int = 16
    sequence_length: int = 2048
    rounds: int = 7
    steps: int = 3  # timed together


class Choices:
    """The experts that every layer's router chooses; None: the router decides."""

    def __init__(self) -> None:
        self.ids_TK: torch.Tensor | None = None

    def gates(self, logits_TE: torch.Tensor) -> torch.Tensor:
        """The router's probabilities of the chosen experts, normalised."""
        assert self.ids_TK is not None
        chosen = logits_TE.float().softmax(-1).gather(-1, self.ids_TK)
        return chosen / chosen.sum(-1, keepdim=True)


@dataclass(frozen=True)
class WholeModel:
    """One variant of a model."""

    loss: Callable[[], torch.Tensor]  # of this rank's batch, without backward
    step: Callable[[], object]  # forward and backward, and the optimizer if the framework steps it
    imbalance: Callable[[], tuple[float, float]]  # before and after balancing, of the last step


def text_batch(size: Size, rank: int, device: torch.device, number: int = 0) -> torch.Tensor:
    """[B, L + 1] bytes of Python's own library; every rank reads another subject."""
    text = Text()
    subjects = [text.names[rank % len(text.names)]] * (size.tokens // size.sequence_length)
    batch: torch.Tensor = text.sequences(
        default_rng(rank + size.ranks * number), subjects, size.sequence_length + 1
    )
    return batch.to(device)


def forward_and_backward(model: nn.Module, loss: Callable[[], torch.Tensor]) -> None:
    model.zero_grad(set_to_none=True)
    loss().backward()


def last_imbalance(balancer: Any) -> tuple[float, float]:
    stats = balancer.stats()
    balancer.reset_stats()
    return stats["imbalance_before"], stats["imbalance_after"]
