"""Routers: tokens -> expert ids, gates and logits. Any module that returns a `Routing` will do.

Shapes: T tokens, K experts per token, E experts, D model width.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear, logsigmoid

from ultraep.config import check_choice
from ultraep.errors import ConfigError

SCORES = ("softmax", "sigmoid")
NOTHING = nullcontext()


class Routing(NamedTuple):
    """The decision of a router for the tokens of this rank."""

    ids: torch.Tensor  # [T, K] chosen experts; -1: padding
    gates: torch.Tensor  # [T, K] factor of each expert output
    logits: torch.Tensor | None = None  # [T, E] for auxiliary losses


class Router(nn.Module):
    """A linear router that selects the `top_k` experts of each token.

    scores: "softmax" over all experts, or "sigmoid" of each.
    normalize: scale the gates of each token to sum to one.
    bias: add a buffer to the scores when selecting experts; it does not change the gates.
    """

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        scores: str = "softmax",
        normalize: bool = True,
        bias: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ConfigError(f"top_k must lie between 1 and {experts} experts, got {top_k}")
        check_choice("scores", scores, SCORES)
        self.top_k, self.scores, self.normalize = top_k, scores, normalize
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(experts, hidden, generator=generator, dtype=torch.float64)
        weight = torch.empty(experts, hidden, **options)
        self.weight = nn.Parameter(weight.copy_(drawn / math.sqrt(hidden)))
        self.register_buffer("bias", torch.zeros(experts, **options) if bias else None)
        self.bias: torch.Tensor | None

    def forward(self, tokens_TD: torch.Tensor) -> Routing:
        """Return ids, gates and logits of every token."""
        wide = torch.promote_types(tokens_TD.dtype, torch.float32)
        device = tokens_TD.device.type
        autocast = torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False) if autocast else NOTHING:
            logits = linear(tokens_TD.to(wide), self.weight.to(wide))
        softmax = self.scores == "softmax"
        if softmax and self.normalize and self.bias is None:  # gates of the largest logits
            chosen, ids = logits.topk(self.top_k, dim=-1)
            return Routing(ids, chosen.softmax(dim=-1), logits)
        scores = logits.softmax(dim=-1) if softmax else logits.sigmoid()
        choice = scores if self.bias is None else scores + self.bias
        ids = choice.topk(self.top_k, dim=-1).indices
        if not self.normalize:
            return Routing(ids, scores.gather(-1, ids), logits)
        # Normalise in log space: the scores of the chosen experts may all underflow.
        logs = logits if softmax else logsigmoid(logits)
        return Routing(ids, logs.gather(-1, ids).softmax(dim=-1), logits)
