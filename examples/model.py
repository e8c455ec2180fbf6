"""A tiny Mixture-of-Experts language model whose MLPs are `BalancedMoE` layers, and its options.

Shapes: B sequences, T tokens, D model width, H heads, C width of a head, V vocabulary.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import ultraep

VOCABULARY = 256  # bytes
DTYPES = {"float32": torch.float32, "float64": torch.float64}
State = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the model; checkpoints carry it."""

    hidden: int = 64
    ffn: int = 128
    experts: int = 16
    top_k: int = 2
    layers: int = 3
    heads: int = 4
    tied: bool = True  # the head is the embedding

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads):
            raise ultraep.ConfigError(
                f"heads have an even width: hidden {self.hidden}, heads {self.heads}"
            )


class TinyMoE(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(
        self,
        config: ModelConfig,
        balancer: ultraep.Balancer,
        *,
        seed: int = 0,
        checkpointing: bool = False,
        bitwise: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)  # all ranks draw the same
        self.config, self.checkpointing = config, checkpointing
        self.embedding = nn.Embedding(VOCABULARY, config.hidden)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(
            Block(config, balancer, seed=1000 * seed + 2 * layer, bitwise=bitwise)
            for layer in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, VOCABULARY, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens_BT: torch.Tensor,
        positions_BT: torch.Tensor | None = None,
        policy: str | None = None,
    ) -> torch.Tensor:
        """[B, T, V]. Positions that start anew at 0 begin another text in the same sequence."""
        mask = None
        if positions_BT is None:
            positions_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
        else:
            text = (positions_BT == 0).cumsum(dim=1)
            mask = (text[:, None, :, None] == text[:, None, None, :]).tril()
        x = self.embedding(tokens_BT)
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, positions_BT, mask, policy, use_reentrant=False)
            else:
                x = block(x, positions_BT, mask, policy)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def moe_layers(self) -> dict[str, ultraep.BalancedMoE]:
        """The layers with experts, by the prefix of their parameters."""
        named = self.named_modules()
        return {f"{name}.": m for name, m in named if isinstance(m, ultraep.BalancedMoE)}

    def last_plans(self) -> list[ultraep.Plan]:
        """The plan of every layer in the last forward pass."""
        plans = (moe.last_plan for moe in self.moe_layers().values())
        return [plan for plan in plans if plan is not None]

    def full_state(self) -> State:
        """The state with all experts of all ranks; collective."""
        state = self.state_dict()
        for prefix, moe in self.moe_layers().items():
            state |= {prefix + name: value for name, value in moe.full_state_dict().items()}
        return state

    def load_full_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load a `full_state`, of any number of ranks."""
        own = dict(state)
        for prefix, moe in self.moe_layers().items():
            part = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
            moe.load_full_state_dict(part)
            own |= {prefix + name: value for name, value in moe.state_dict().items()}
        self.load_state_dict(own)


class Block(nn.Module):
    """Attention, then experts, each added to what came in."""

    def __init__(
        self, config: ModelConfig, balancer: ultraep.Balancer, *, seed: int, bitwise: bool
    ) -> None:
        super().__init__()
        self.heads = config.heads
        self.norms = nn.ModuleList(nn.RMSNorm(config.hidden) for _ in range(2))
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)
        self.moe = ultraep.BalancedMoE(
            config.hidden,
            config.ffn,
            config.experts,
            config.top_k,
            balancer=balancer,
            bitwise=bitwise,
            seed=seed,
        )

    def forward(
        self,
        x_BTD: torch.Tensor,
        positions_BT: torch.Tensor,
        mask: torch.Tensor | None,
        policy: str | None,
    ) -> torch.Tensor:
        x_BTD = x_BTD + self.attend(self.norms[0](x_BTD), positions_BT, mask)
        out: torch.Tensor = x_BTD + self.moe(self.norms[1](x_BTD), policy=policy)
        return out

    def attend(
        self, x_BTD: torch.Tensor, positions_BT: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        q, k, v = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, positions_BT), rotate(k, positions_BT)
        y_BHTC = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        out: torch.Tensor = self.out(y_BHTC.transpose(1, 2).flatten(2))
        return out


def rotate(x_BHTC: torch.Tensor, positions_BT: torch.Tensor) -> torch.Tensor:
    """Rotary positions."""
    left, right = x_BHTC.chunk(2, dim=-1)
    width = left.shape[-1]
    speeds = 10_000 ** (-torch.arange(width, dtype=x_BHTC.dtype) / width)
    angles = positions_BT[:, None, :, None] * speeds
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


@contextmanager
def process_group() -> Iterator[dist.ProcessGroup]:
    """The ranks that torchrun started; without it, a group of this process alone."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@contextmanager
def balancer_of(
    args: argparse.Namespace, config: ModelConfig, policy: str
) -> Iterator[ultraep.Balancer]:
    """A balancer over all ranks, whether or not the experts divide evenly among them."""
    ranks = dist.get_world_size()
    balancer = ultraep.Balancer(
        dist.new_group(),  # its messages do not mix with those of the rest of the model
        experts=config.experts,
        slots=args.slots,
        homes=[expert * ranks // config.experts for expert in range(config.experts)],
        config=ultraep.BalanceConfig(policy=policy, tolerance=args.tolerance),
        relay=args.relay,
        transport=args.transport,
    )
    try:
        yield balancer
    finally:
        balancer.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    """What both examples ask for: the shape of the model, and how to balance it."""
    shape = parser.add_argument_group("model; of the checkpoint, if there is one")
    for field in fields(ModelConfig):
        name = f"--{field.name.replace('_', '-')}"
        if field.type == "bool":
            shape.add_argument(name, action=argparse.BooleanOptionalAction)
        else:
            shape.add_argument(name, type=int, metavar="N", help=f"default {field.default}")
    shape.add_argument("--dtype", choices=DTYPES, default="float32")
    balance = parser.add_argument_group("balance")
    balance.add_argument("--slots", type=int, default=1, help="spare slots of a rank (%(default)s)")
    balance.add_argument("--relay", choices=("auto", "direct", "chain"), default="auto")
    balance.add_argument("--transport", choices=("auto", "shared", "sockets"), default="auto")
    balance.add_argument(
        "--tolerance", type=float, default=0.0, help="imbalance above 1 that may stay (%(default)s)"
    )


def model_config(args: argparse.Namespace, saved: Mapping[str, Any] | None) -> ModelConfig:
    """The shape that was asked for; with a checkpoint, its shape."""
    names = [field.name for field in fields(ModelConfig)]
    asked = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if saved is None:
        return ModelConfig(**asked)
    wrong = {name: value for name, value in asked.items() if value != saved[name]}
    if wrong:
        raise ultraep.ConfigError(f"the checkpoint has {dict(saved)}, not {wrong}")
    return ModelConfig(**saved)
