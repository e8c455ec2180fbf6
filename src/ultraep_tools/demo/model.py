"""A small Mixture-of-Experts language model whose MLPs are `BalancedMoE` layers.

The demo trains and serves it; the examples train it.

Shapes: B sequences, T tokens, D model width, H heads, C width of a head, V vocabulary, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from ultraep.errors import ConfigError
from ultraep.layer import BalancedMoE
from ultraep.microbatch import AnyPlan
from ultraep.plan import Plan
from ultraep.runtime.balancer import Balancer

VOCABULARY = 256  # bytes


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the model, stored in checkpoints."""

    hidden: int = 64
    ffn: int = 128
    experts: int = 16
    top_k: int = 2
    layers: int = 3
    heads: int = 4

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads):
            raise ConfigError(
                f"the width of a head must be even: hidden={self.hidden}, heads={self.heads}; "
                f"make hidden a multiple of {2 * self.heads}"
            )


class TinyMoE(nn.Module):
    """A model of bytes that returns the logits of the next byte."""

    def __init__(
        self, config: ModelConfig, balancer: Balancer, *, seed: int = 0, checkpointing: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)  # the same weights on all ranks
        self.config, self.checkpointing = config, checkpointing
        self.unevenness = torch.zeros(())  # sum of all layers in the last forward pass
        self.embedding = nn.Embedding(VOCABULARY, config.hidden)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(
            Block(config, balancer, seed=1000 * seed + 2 * layer) for layer in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(
        self, tokens_BT: torch.Tensor, positions_BT: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[B, T, V] logits. A position 0 begins another text in the same sequence."""
        mask = None
        if positions_BT is None:
            positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
            positions_BT = positions.expand_as(tokens_BT)
        else:
            text = (positions_BT == 0).cumsum(dim=1)
            mask = (text[:, None, :, None] == text[:, None, None, :]).tril()
        x, uneven = self.embedding(tokens_BT), []
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                x, loss = checkpoint(block, x, positions_BT, mask, use_reentrant=False)
            else:
                x, loss = block(x, positions_BT, mask)
            uneven.append(loss)
        self.unevenness = torch.stack(uneven).sum()
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    @property
    def layers(self) -> list[BalancedMoE]:
        return [block.moe for block in self.blocks]  # type: ignore[misc]

    def last_plans(self) -> list[Plan]:
        """Return the plan of every layer in the last forward pass."""
        plans = (moe.last_plan for moe in self.layers)
        return [plan.to_host() for plan in plans if plan is not None]


class Block(nn.Module):
    """Attention and experts, with residual connections."""

    def __init__(self, config: ModelConfig, balancer: Balancer, *, seed: int) -> None:
        super().__init__()
        self.heads = config.heads
        self.norms = nn.ModuleList(nn.RMSNorm(config.hidden) for _ in range(2))
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)
        self.moe = BalancedMoE.swiglu(
            config.hidden, config.ffn, config.experts, config.top_k, balancer=balancer, seed=seed
        )

    def forward(
        self, x_BTD: torch.Tensor, positions_BT: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, T, D] outputs, and the auxiliary loss of this block."""
        x_BTD = x_BTD + self.attend(self.norms[0](x_BTD), positions_BT, mask)
        y_BTD, routing = self.moe(self.norms[1](x_BTD), with_routing=True)
        return x_BTD + y_BTD, unevenness(self.moe.last_plan, routing.logits)

    def attend(
        self, x_BTD: torch.Tensor, positions_BT: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        q, k, v = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, positions_BT), rotate(k, positions_BT)
        y_BHTC = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        out: torch.Tensor = self.out(y_BHTC.transpose(1, 2).flatten(2))
        return out


def unevenness(plan: AnyPlan | None, logits_TE: torch.Tensor) -> torch.Tensor:
    """Return the usual auxiliary loss: loads of the experts times their mean probabilities.

    The loads of the whole group come from the plan of this microbatch.
    """
    if not torch.is_grad_enabled() or plan is None or not plan.to_host().total:
        return logits_TE.new_zeros(())
    loads_E = plan.to_host().loads.sum(axis=0)
    chosen_E = torch.from_numpy(loads_E / loads_E.sum()).to(logits_TE)
    probable_E = logits_TE.softmax(dim=-1).mean(dim=0)
    return len(chosen_E) * (chosen_E * probable_E).sum()


def rotate(x_BHTC: torch.Tensor, positions_BT: torch.Tensor) -> torch.Tensor:
    """Apply rotary position embeddings; angles are too large for reduced precision."""
    left, right = x_BHTC.chunk(2, dim=-1)
    width, wide = left.shape[-1], torch.promote_types(x_BHTC.dtype, torch.float32)
    steps = torch.arange(width, dtype=wide, device=x_BHTC.device)
    speeds = 10_000 ** (-steps / width)
    angles = positions_BT[:, None, :, None] * speeds
    cos, sin = angles.cos().to(x_BHTC.dtype), angles.sin().to(x_BHTC.dtype)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


def next_byte_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of all bytes but the first."""
    logits = model(tokens[:, :-1])
    return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
