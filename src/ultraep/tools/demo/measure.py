"""Throughput of the MoE layers, forward and backward: every policy beside forced balance.

The layers of a trained model get the hidden states of real text, and their own routers choose.
Forced balance, the ceiling, has the same tokens and does the same work, but its experts are dealt
out in turn. The variants take turns, and every call moves its copies again.

Shapes: B sequences, T tokens, D model width.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from ultraep.layer import BalancedMoE
from ultraep.parallel.full_state import moe_layers
from ultraep.routing import Routing
from ultraep.tools.demo.sizes import WARMUP, Job
from ultraep.tools.tiny.even import EvenTurns
from ultraep.tools.tiny.model import TinyMoE
from ultraep.tools.tiny.text import Text

FORCED = "forced balance"


def layer_speeds(
    model: TinyMoE, text: Text, job: Job, tell: Callable[[int, int], None]
) -> dict[str, float]:
    """Tokens per second of all ranks, by policy, and of forced balance; the same on all ranks.

    tell: called after every round with its number, and the number of rounds.
    """
    layers, rounds = list(moe_layers(model).values()), WARMUP + job.sizes.layer_rounds
    comm, length = layers[0].balancer.comm, job.sizes.length
    inputs = []
    for subject in range(len(text.names)):
        rng = np.random.default_rng([job.seed, comm.rank, subject])
        subjects = [subject] * (job.sizes.tokens // length)
        inputs.append(states(model, text.sequences(rng, subjects, length, held_out=True)))
    seconds: dict[str, list[float]] = {name: [] for name in (*job.policies, FORCED)}
    for turn in range(rounds):
        for name, times in seconds.items():
            took = [
                once(moe, x, name)
                for states_of_text in inputs
                for moe, x in zip(layers, states_of_text, strict=True)
            ]
            if turn >= WARMUP:
                times.append(sum(took) / len(took))
        tell(turn + 1, rounds)
    group_tokens = comm.size * inputs[0][0][..., 0].numel()
    return {name: group_tokens / median(times) for name, times in seconds.items()}


@torch.no_grad()
def states(model: TinyMoE, tokens_BT: torch.Tensor) -> list[torch.Tensor]:
    """[B, T, D] the input of every MoE layer for these tokens."""
    inputs: list[torch.Tensor] = []
    hooks = [
        moe.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach().clone()))
        for moe in moe_layers(model).values()
    ]
    model(tokens_BT.to(model.norm.weight.device))
    for hook in hooks:
        hook.remove()
    return inputs


def once(moe: BalancedMoE, states_BTD: torch.Tensor, variant: str) -> float:
    """Seconds of forward and backward from a common start, on the slowest rank."""
    comm, x = moe.balancer.comm, states_BTD.clone().requires_grad_()
    moe.zero_grad(set_to_none=True)
    with deal_evenly(moe) if variant == FORCED else nullcontext():
        comm.all_gather(torch.zeros(1, device=x.device))
        begin = time.perf_counter()
        y = moe(x, policy="none" if variant == FORCED else variant)
        y.backward(torch.ones_like(y))
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)
        took = time.perf_counter() - begin
    return float(comm.all_gather(torch.tensor([took], device=x.device)).max())


def deal_evenly(moe: BalancedMoE) -> RemovableHandle:
    """Deal the rows of a layer's router out to all ranks, and their experts, in turn."""
    even = EvenTurns(moe.balancer.topology, moe.balancer.rank)

    def replace_choices(_: Any, __: Any, routing: Routing) -> Routing:
        ids, gates, logits = routing
        return Routing(even.chosen(ids), gates, logits)

    return moe.router.register_forward_hook(replace_choices)
