"""Throughput of the MoE layers, forward and backward: every policy beside forced balance.

The layers of a trained model get the hidden states of real text, and their own routers choose.
Forced balance, the ceiling, has the same tokens and does the same work, but its experts are dealt
out in turn. The variants take turns, and every call moves its copies again.

Shapes: B sequences, T tokens, K experts per token, D model width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import numpy as np
import torch
from torch import nn

from ultraep.layer import BalancedMoE
from ultraep.parallel.full_state import moe_layers
from ultraep.routing import Routing
from ultraep.runtime.balancer import Balancer
from ultraep.tools.demo.sizes import WARMUP
from ultraep.tools.tiny.even import EvenTurns
from ultraep.tools.tiny.model import TinyMoE
from ultraep.tools.tiny.text import Text

FORCED = "forced balance"


class EvenRouter(nn.Module):
    """Does what the router does, then hands its rows to all ranks, and their experts, in turn."""

    def __init__(self, router: nn.Module, balancer: Balancer) -> None:
        super().__init__()
        self.router, self.even = router, EvenTurns(balancer.topology, balancer.rank)

    def forward(self, tokens: torch.Tensor) -> Routing:
        ids, gates, logits = self.router(tokens)
        return Routing(self.even.chosen(ids), gates, logits)


def layer_speeds(
    model: TinyMoE,
    text: Text,
    policies: Sequence[str],
    *,
    tokens: int,
    length: int,
    rounds: int,
    seed: int = 0,
    tell: Callable[[int, int], None] = lambda *_: None,
) -> dict[str, float]:
    """Tokens per second of all ranks, by policy, and of forced balance; the same on all ranks.

    tokens: of a rank.   tell: called after every round with its number, and the number of rounds.
    """
    layers = list(moe_layers(model).values())
    comm = layers[0].balancer.comm
    inputs = [
        states(model, sequences(text, tokens, length, seed, comm.rank, subject))
        for subject in range(len(text.names))
    ]
    seconds: dict[str, list[float]] = {name: [] for name in (*policies, FORCED)}
    for turn in range(WARMUP + rounds):
        for name, times in seconds.items():
            took = [
                once(moe, x, name)
                for states_of_text in inputs
                for moe, x in zip(layers, states_of_text, strict=True)
            ]
            if turn >= WARMUP:
                times.append(sum(took) / len(took))
        tell(turn + 1, WARMUP + rounds)
    group_tokens = comm.size * inputs[0][0][..., 0].numel()
    return {name: group_tokens / median(times) for name, times in seconds.items()}


def sequences(
    text: Text, tokens: int, length: int, seed: int, rank: int, subject: int
) -> torch.Tensor:
    """[B, T] held-out text of one subject, another one on every rank."""
    rng = np.random.default_rng([seed, rank, subject])
    return text.sequences(rng, [subject] * (tokens // length), length, held_out=True)


@torch.no_grad()
def states(model: TinyMoE, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The input of every MoE layer for these tokens."""
    kept: list[torch.Tensor] = []
    hooks = [
        moe.register_forward_pre_hook(lambda _, args: kept.append(args[0].detach().clone()))
        for moe in moe_layers(model).values()
    ]
    model(tokens.to(model.norm.weight.device))
    for hook in hooks:
        hook.remove()
    return kept


def once(moe: BalancedMoE, states_BTD: torch.Tensor, variant: str) -> float:
    """Seconds of forward and backward from a common start, on the slowest rank."""
    comm, x = moe.balancer.comm, states_BTD.clone().requires_grad_()
    moe.zero_grad(set_to_none=True)
    with routed(moe, even=variant == FORCED):
        comm.all_gather(torch.zeros(1, device=x.device))
        begin = time.perf_counter()
        y = moe(x, policy="none" if variant == FORCED else variant)
        y.backward(torch.ones_like(y))
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)
        took = time.perf_counter() - begin
    return float(comm.all_gather(torch.tensor([took], device=x.device)).max())


@contextmanager
def routed(moe: BalancedMoE, *, even: bool) -> Iterator[None]:
    """The layer with its own router, or with even choices."""
    own = moe.router
    if even:
        moe.router = EvenRouter(own, moe.balancer)
    try:
        yield
    finally:
        moe.router = own
