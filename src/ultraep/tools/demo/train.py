"""One rank's training loop, and the speed of its MoE layers beside forced balance.

Experts are spread over the ranks. Every rank holds the rest of the model, whose gradients
DistributedDataParallel averages; `ultraep.parallel` does the same for experts.

Shapes: B sequences, T tokens, D model width.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from ultraep.layer import BalancedMoE
from ultraep.parallel import average_expert_gradients, clip_grad_norm, data_parallel
from ultraep.parallel.full_state import moe_layers
from ultraep.routing import Routing
from ultraep.runtime.balancer import Balancer
from ultraep.tools.demo.sizes import Job, Sizes
from ultraep.tools.tiny.even import EvenTurns
from ultraep.tools.tiny.model import ModelConfig, TinyMoE, next_byte_loss
from ultraep.tools.tiny.text import Text

MAX_GRADIENT_NORM = 1.0
HELD_OUT_SEQUENCES = 4  # of each subject
WARMUP_ROUNDS = 1  # of the layer measurement
FORCED = "forced balance"


@dataclass(frozen=True, slots=True)
class Step:
    """One training step of all ranks. Lists have an entry for every layer."""

    loss: float
    seconds: float
    before: list[float]  # imbalance without replicas
    after: list[float]  # imbalance with replicas
    bound: list[float]  # lower bound of any plan with these slots
    copies: list[int]


def make_model(sizes: Sizes, balancer: Balancer, seed: int, device: torch.device) -> TinyMoE:
    """Return the model on a device, with the same weights on all ranks."""
    names = ("hidden", "ffn", "experts", "top_k", "layers", "heads")
    config = ModelConfig(**{name: getattr(sizes, name) for name in names})
    model = TinyMoE(config, balancer, seed=seed)
    return model.to(device, getattr(torch, sizes.dtype))


class Trainer:
    """One rank of the training. Constructing it is collective."""

    def __init__(
        self, sizes: Sizes, seed: int, balancer: Balancer, text: Text, device: torch.device
    ) -> None:
        self.sizes, self.seed, self.balancer, self.text = sizes, seed, balancer, text
        self.device, self.done = device, 0
        self.model = make_model(sizes, balancer, seed, device)
        self.parallel = data_parallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=sizes.lr, betas=(0.9, 0.95))

    def step(self, steps: int) -> Step:
        """Run one step of a training of this many steps."""
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        loss = next_byte_loss(self.parallel, self.batch(steps))
        plans = self.model.last_plans()
        (loss + self.sizes.even * self.model.unevenness).backward()
        total = loss.detach().double().cpu()
        self.update_weights(warmup=min(10, steps // 4))
        dist.all_reduce(total)  # on the host: the device has finished by then
        seconds = time.perf_counter() - begin
        return Step(
            loss=total.item() / self.balancer.comm.size,
            seconds=seconds,
            before=[plan.initial_imbalance for plan in plans],
            after=[plan.imbalance for plan in plans],
            bound=[plan.lower_bound for plan in plans],
            copies=[plan.num_replicas for plan in plans],
        )

    def update_weights(self, warmup: int) -> None:
        """Average and clip gradients, then run the optimizer."""
        average_expert_gradients(self.model)
        clip_grad_norm(self.model, MAX_GRADIENT_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = self.sizes.lr * min(1.0, (self.done + 1) / (warmup + 1))
        self.optimizer.step()
        self.done += 1
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def batch(self, steps: int) -> torch.Tensor:
        """[B, T + 1] sequences of this rank; the ranks share the subject, not the text."""
        sizes = self.sizes
        rng = np.random.default_rng([self.seed, self.done, 0, self.balancer.rank])
        count = sizes.tokens // sizes.length
        subjects = self.text.shifting(rng, self.done, count, subject_steps(steps, self.text))
        return self.text.sequences(rng, subjects, sizes.length + 1).to(self.device)


def subject_steps(steps: int, text: Text) -> int:
    """Return the steps until the subject of the text changes; training visits each once."""
    return -(-steps // len(text.names))


@torch.no_grad()
def held_out_loss(model: TinyMoE, text: Text, length: int) -> float:
    """Return the loss on held-out text of all subjects, the same on every rank."""
    subjects = HELD_OUT_SEQUENCES * list(range(len(text.names)))
    rng = np.random.default_rng(0)
    tokens_BT = text.sequences(rng, subjects, length + 1, held_out=True)
    return next_byte_loss(model, tokens_BT.to(model.norm.weight.device)).item()


# -- speed of the layers -------------------------------------------------------------------------


def layer_speeds(
    model: TinyMoE, text: Text, job: Job, report: Callable[[int, int], None]
) -> dict[str, float]:
    """Return tokens per second of all ranks through the MoE layers, forward and backward.

    The layers get the hidden states of held-out text, and their own routers choose. Forced balance
    is the upper bound: the same tokens and work, with experts assigned round-robin. The policies
    and forced balance alternate, and every call sends its replicas again.

    report: called after every round with its number and the number of rounds.
    """
    layers, rounds = list(moe_layers(model).values()), WARMUP_ROUNDS + job.sizes.layer_rounds
    comm, length = layers[0].balancer.comm, job.sizes.length
    inputs = []
    for subject in range(len(text.names)):
        rng = np.random.default_rng([job.seed, comm.rank, subject])
        subjects = [subject] * (job.sizes.tokens // length)
        inputs.append(layer_inputs(model, text.sequences(rng, subjects, length, held_out=True)))
    seconds: dict[str, list[float]] = {name: [] for name in (*job.policies, FORCED)}
    for number in range(rounds):
        for name, times in seconds.items():
            calls = [
                time_layer(moe, x, name)
                for states in inputs
                for moe, x in zip(layers, states, strict=True)
            ]
            if number >= WARMUP_ROUNDS:
                times.append(sum(calls) / len(calls))
        report(number + 1, rounds)
    group_tokens = comm.size * inputs[0][0][..., 0].numel()
    return {name: group_tokens / median(times) for name, times in seconds.items()}


@torch.no_grad()
def layer_inputs(model: TinyMoE, tokens_BT: torch.Tensor) -> list[torch.Tensor]:
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


def time_layer(moe: BalancedMoE, states_BTD: torch.Tensor, policy: str) -> float:
    """Return the seconds of forward and backward on the slowest rank, after a barrier."""
    comm, x = moe.balancer.comm, states_BTD.clone().requires_grad_()
    moe.zero_grad(set_to_none=True)
    with route_evenly(moe) if policy == FORCED else nullcontext():
        comm.all_gather(torch.zeros(1, device=x.device))
        begin = time.perf_counter()
        y = moe(x, policy="none" if policy == FORCED else policy)
        y.backward(torch.ones_like(y))
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)
        seconds = time.perf_counter() - begin
    return float(comm.all_gather(torch.tensor([seconds], device=x.device)).max())


def route_evenly(moe: BalancedMoE) -> RemovableHandle:
    """Replace the router's choices by experts of all ranks in turn, until the handle is removed."""
    even = EvenTurns(moe.balancer.topology, moe.balancer.rank)

    def replace_choices(_: Any, __: Any, routing: Routing) -> Routing:
        return routing._replace(ids=even.chosen(routing.ids))

    return moe.router.register_forward_hook(replace_choices)
