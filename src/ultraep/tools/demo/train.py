"""One rank's training loop.

Experts are spread over the ranks. The rest of the model is on every rank, where
DistributedDataParallel averages its gradients; `ultraep.parallel` does the same for experts.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
import torch.distributed as dist

from ultraep.parallel import average_expert_gradients, clip_grad_norm, data_parallel
from ultraep.plan import Plan
from ultraep.runtime.balancer import Balancer
from ultraep.tools.serving.engine import from_first
from ultraep.tools.tiny.model import ModelConfig, TinyMoE, next_byte_loss
from ultraep.tools.tiny.text import Text

LARGEST_NORM = 1.0  # of the gradient
CHECKED = 4  # held-out sequences of each subject


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to train; tokens are those of one rank in one microbatch."""

    tokens: int = 1024
    length: int = 64
    accumulate: int = 1
    period: int = 20  # steps until the subject changes
    lr: float = 3e-3
    warmup: int = 0  # steps until the learning rate is reached
    even: float = 0.0  # weight of the auxiliary loss that asks the router to be even
    seed: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Step:
    """One step of all ranks; imbalance over all its layers and microbatches."""

    loss: float
    before: float  # mean imbalance without copies
    after: float  # mean imbalance with them
    bound: float  # what no plan with these slots could go below, mean
    worst_before: float
    worst_after: float
    copies: int
    seconds: float


class Trainer:
    """One rank of the training. To make one is collective."""

    def __init__(
        self,
        config: ModelConfig,
        options: TrainingOptions,
        balancer: Balancer,
        text: Text,
        device: torch.device | None = None,
    ) -> None:
        self.options, self.balancer, self.text, self.done = options, balancer, text, 0
        self.device = device or torch.device("cpu")
        self.model = TinyMoE(config, balancer, seed=options.seed)
        self.model.to(self.device, options.dtype)
        self.parallel = data_parallel(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=options.lr, betas=(0.9, 0.95)
        )

    def step(self) -> Step:
        """One step of the optimizer, over all its microbatches."""
        begin, parts = time.perf_counter(), self.options.accumulate
        plans: list[Plan] = []
        total = torch.zeros((), dtype=torch.float64)
        self.optimizer.zero_grad()
        for part in range(parts):
            tokens = self.batch(part)
            last = part == parts - 1
            with nullcontext() if last else self.parallel.no_sync():
                loss = next_byte_loss(self.parallel, tokens) / parts
                plans += self.model.last_plans()
                (loss + self.options.even / parts * self.model.unevenness).backward()
            total += loss.detach().cpu()
        self.descend()
        dist.all_reduce(total)  # on the host: the device has finished by then
        before = [plan.initial_imbalance for plan in plans]
        after = [plan.imbalance for plan in plans]
        return Step(
            loss=total.item() / self.balancer.comm.size,
            before=fmean(before),
            after=fmean(after),
            bound=fmean(plan.lower_bound for plan in plans),
            worst_before=max(before),
            worst_after=max(after),
            copies=sum(plan.num_replicas for plan in plans),
            seconds=time.perf_counter() - begin,
        )

    def descend(self) -> None:
        """Change the weights by the gradients of this step."""
        average_expert_gradients(self.model)
        clip_grad_norm(self.model, LARGEST_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * min(1.0, (self.done + 1) / (self.options.warmup + 1))
        self.optimizer.step()
        self.done += 1
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def batch(self, part: int) -> torch.Tensor:
        """[B, T + 1] sequences of this rank: another text, but the same subject, on every rank."""
        options = self.options
        rng = np.random.default_rng([options.seed, self.done, part, self.balancer.rank])
        count = options.tokens // options.length
        subjects = self.text.shifting(rng, self.done, count, options.period)
        return self.text.sequences(rng, subjects, options.length + 1).to(self.device)


def train(
    trainers: Mapping[str, Trainer],
    steps: int,
    tell: Callable[[str, int, Step], None],
    seconds: float | None = None,
) -> dict[str, list[Step]]:
    """Let several trainers take turns, step by step, so that all see the same machine.

    tell: called after every step with the trainer's name, the number of the step, and the step.
    seconds: after which no other turn begins, by the clock of rank 0.
    """
    begin = time.perf_counter()
    done: dict[str, list[Step]] = {name: [] for name in trainers}
    for number in range(steps):
        if seconds is not None and from_first(time.perf_counter() - begin > seconds):
            break
        names = list(trainers)
        for name in names if number % 2 == 0 else reversed(names):
            done[name].append(trainers[name].step())
            tell(name, trainers[name].done, done[name][-1])
    return done


def held_out_text(text: Text, length: int) -> torch.Tensor:
    """[B, T + 1] some sequences of every subject, the same on every rank."""
    subjects = CHECKED * list(range(len(text.names)))
    return text.sequences(np.random.default_rng(0), subjects, length + 1, held_out=True)
