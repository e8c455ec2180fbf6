"""The phases of one rank of the demo: training, prefill, layers. All calls are collective.

Experts are spread over the ranks. Every rank holds the rest of the model, whose gradients
DistributedDataParallel averages; `ultraep.parallel` does the same for experts.

Shapes: B sequences, T tokens, D model width.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from ultraep import __version__
from ultraep.backends import select
from ultraep.config import BalanceConfig
from ultraep.layer import BalancedMoE, Routing
from ultraep.parallel import (
    average_expert_gradients,
    clip_grad_norm,
    data_parallel,
    dense_parameters,
    expert_parameters,
)
from ultraep.runtime.balancer import Balancer
from ultraep.runtime.connect import ALONE
from ultraep.topology import even_homes
from ultraep_tools.demo.even import EvenTurns
from ultraep_tools.demo.model import ModelConfig, TinyMoE, next_byte_loss
from ultraep_tools.demo.prefill import Lengths, Prompt, Turn, answer, make_prompts
from ultraep_tools.demo.result import DemoResult, PolicyResult, Progress, trace_folder
from ultraep_tools.demo.sizes import Job, Sizes
from ultraep_tools.demo.text import Text
from ultraep_tools.launch.group import process_group, settle
from ultraep_tools.launch.processes import RankPlace


@dataclass(frozen=True)
class Trained:
    steps: list[Step]
    bytes_sent: int  # for replicas, by all ranks
    parameters: int  # of the model, with all experts
    state: dict[str, torch.Tensor]  # of this rank


def work(place: RankPlace, job: Job, report: Callable[[Progress], None]) -> DemoResult:
    """Run the demo as one rank. All ranks return the same result; only rank 0 reports events."""
    begin = time.perf_counter()
    settle(place)
    select()  # compiles the planner on a new machine, before ranks wait for each other
    with process_group(place):
        return Demo(job, report if place.rank == 0 else lambda _: None).run(begin)


class Demo:
    """The phases of the demo, in order."""

    def __init__(self, job: Job, report: Callable[[Progress], None]) -> None:
        self.job, self.report = job, report
        self.sizes, self.text = job.sizes, Text()
        self.group_tokens = job.sizes.tokens * dist.get_world_size()

    def run(self, begin: float) -> DemoResult:
        job, trainings = self.job, self.train()
        first = trainings[job.policies[0]]
        with self.balancer("none") as balancer:
            model = make_model(self.sizes, balancer, job.seed).eval()
            model.load_state_dict(first.state)  # all policies use these weights from here on
            requests = self.requests()
            answers = answer(
                model,
                requests,
                job.policies,
                budget=max(self.sizes.tokens, self.sizes.longest),
                rounds=self.sizes.rounds,
                report=self.report_turn,
            )
            speeds = layer_speeds(model, self.text, job, self.report_round)
        rows = [
            policy_result(policy, training, self.group_tokens, answers[policy], speeds)
            for policy, training in trainings.items()
        ]
        return DemoResult(
            version=__version__,
            python=platform.python_version(),
            machine=f"{platform.system()} {platform.machine()}",
            seed=job.seed,
            sizes=self.sizes,
            parameters=first.parameters,
            steps=len(first.steps),
            domains=[self.subject(step) for step in range(len(first.steps))],
            forced_tokens_per_second=speeds[FORCED],
            requests=len(requests),
            request_tokens=sum(len(request.ids) for request in requests),
            loss_difference=max(difference(row.losses, rows[0].losses) for row in rows),
            wall_seconds=time.perf_counter() - begin,
            notes=list(job.notes),
            policies=rows,
        )

    def balancer(self, policy: str, record: str | None = None) -> closing[Balancer]:
        """Make a balancer over all ranks with a process group of its own."""
        sizes = self.sizes
        balancer = Balancer(
            dist.new_group() if sizes.ranks > 1 else ALONE,  # the demo prints its own note for one
            experts=even_homes(sizes.experts, dist.get_world_size()),
            slots=sizes.slots,
            config=BalanceConfig(policy=policy, objective="balance"),
            record=record,
        )
        return closing(balancer)

    def train(self) -> dict[str, Trained]:
        """Train all policies in turns, so that all run on the same state of the machine."""
        job, policies = self.job, list(self.job.policies)
        steps: dict[str, list[Step]] = {policy: [] for policy in policies}
        with ExitStack() as stack:
            trainers = {}
            for policy in policies:
                folder = str(trace_folder(job.out, policy))
                balancer = stack.enter_context(self.balancer(policy, folder))
                trainers[policy] = Trainer(self.sizes, job.seed, balancer, self.text)
            while len(steps[policies[0]]) < self.sizes.steps:
                for policy in policies:
                    steps[policy].append(trainers[policy].step(self.sizes.steps))
                    self.report_step(policy, len(steps[policy]), steps[policy][-1])
                policies.reverse()
            return {policy: trained(steps[policy], trainers[policy]) for policy in job.policies}

    def subject(self, step: int) -> str:
        return self.text.main_subject(step, subject_steps(self.sizes.steps, self.text))

    def requests(self) -> list[Prompt]:
        """Return requests of all subjects that arrive at the same time."""
        count, longest = self.sizes.requests, self.sizes.longest
        lengths = Lengths(shortest=min(32, longest), longest=longest, burst=max(1, count // 12))
        return make_prompts([0.0] * count, lengths, [self.job.seed, 1], self.text.held_out)

    # -- progress --------------------------------------------------------------------------------

    def report_step(self, policy: str, number: int, step: Step) -> None:
        numbers = self.group_tokens / step.seconds, fmean(step.before), fmean(step.after)
        what = f"training, {policy}: {self.subject(number - 1)}, loss {step.loss:.3f}"
        self.report(Progress(number, self.sizes.steps, line(what, *numbers)))

    def report_turn(self, policy: str, number: int, turn: Turn) -> None:
        text = line(
            f"serving, {policy}", turn.tokens_per_second, turn.before or 1.0, turn.after or 1.0
        )
        self.report(Progress(number, self.sizes.rounds, text))

    def report_round(self, done: int, rounds: int) -> None:
        self.report(Progress(done, rounds, "measuring the MoE layers, each policy in turn"))


def line(what: str, speed: float, before: float, after: float) -> str:
    return f"{what}, {speed:,.0f} tokens/s, imbalance {before:.2f} -> {after:.2f}"


def policy_result(
    policy: str, training: Trained, tokens: int, answers: Turn, speeds: dict[str, float]
) -> PolicyResult:
    """Return the measurements of one policy. tokens: of a training step, all ranks."""
    steps, waited = training.steps, answers.waited
    losses, seconds = [step.loss for step in steps], [step.seconds for step in steps]
    before, after = (np.array([getattr(step, name) for step in steps]) for name in IMBALANCES)
    return PolicyResult(
        policy=policy,
        losses=losses,
        loss=fmean(losses[-max(1, len(steps) // 10) :]),
        seconds=seconds,
        tokens_per_second=tokens / median(seconds[1:] or seconds),  # 0 warms up
        before=before.mean(axis=1).tolist(),
        after=after.mean(axis=1).tolist(),
        imbalance_before=float(before.mean()),
        imbalance_before_worst=float(before.max()),
        imbalance_after=float(after.mean()),
        imbalance_after_worst=float(after.max()),
        replicas_per_layer=fmean(fmean(step.replicas) for step in steps),
        bytes_sent=training.bytes_sent,
        layer_tokens_per_second=speeds[policy],
        layer_share=speeds[policy] / speeds[FORCED],
        first_token_median=median(waited),
        first_token_p90=float(np.percentile(waited, 90)),
    )


def trained(steps: list[Step], trainer: Trainer) -> Trained:
    """Collect the results of a training from all ranks."""
    model, own = trainer.model, trainer.balancer.stats()
    mine = [
        own["weights_bytes_sent"] + own["gradients_bytes_sent"],
        sum(tensor.numel() for tensor in expert_parameters(model).values()),
    ]
    sent, in_experts = np.sum(trainer.balancer.comm.gather_objects(mine), axis=0).tolist()
    dense = sum(tensor.numel() for tensor in dense_parameters(model).values())
    return Trained(steps, sent, dense + in_experts, model.state_dict())


def difference(values: list[float], reference: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(values, reference, strict=True))


# -- training ------------------------------------------------------------------------------------

MAX_GRADIENT_NORM = 1.0
IMBALANCES = "before", "after"
WARMUP_ROUNDS = 1  # of the layer measurement
FORCED = "forced balance"


@dataclass(frozen=True, slots=True)
class Step:
    """One training step of all ranks. Lists have an entry for every layer."""

    loss: float
    seconds: float
    before: list[float]  # imbalance without replicas
    after: list[float]  # imbalance with replicas
    replicas: list[int]


def make_model(sizes: Sizes, balancer: Balancer, seed: int) -> TinyMoE:
    """Return the model, with the same weights on all ranks."""
    names = ("hidden", "ffn", "experts", "top_k", "layers", "heads")
    config = ModelConfig(**{name: getattr(sizes, name) for name in names})
    return TinyMoE(config, balancer, seed=seed).to(getattr(torch, sizes.dtype))


class Trainer:
    """One rank of the training. Constructing it is collective."""

    def __init__(self, sizes: Sizes, seed: int, balancer: Balancer, text: Text) -> None:
        self.sizes, self.seed, self.balancer, self.text = sizes, seed, balancer, text
        self.done, self.model = 0, make_model(sizes, balancer, seed)
        self.parallel = data_parallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=sizes.lr, betas=(0.9, 0.95))

    def step(self, steps: int) -> Step:
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        loss = next_byte_loss(self.parallel, self.batch(steps))
        plans = self.model.last_plans()
        (loss + self.sizes.even * self.model.unevenness).backward()
        total = loss.detach().double()
        self.update_weights(warmup=min(10, steps // 4))
        dist.all_reduce(total)
        seconds = time.perf_counter() - begin
        return Step(
            loss=total.item() / self.balancer.comm.size,
            seconds=seconds,
            before=[plan.initial_imbalance for plan in plans],
            after=[plan.imbalance for plan in plans],
            replicas=[plan.num_replicas for plan in plans],
        )

    def update_weights(self, warmup: int) -> None:
        """Average and clip gradients, then run the optimizer."""
        average_expert_gradients(self.model)
        clip_grad_norm(self.model, MAX_GRADIENT_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = self.sizes.lr * min(1.0, (self.done + 1) / (warmup + 1))
        self.optimizer.step()
        self.done += 1

    def batch(self, steps: int) -> torch.Tensor:
        """[B, T + 1] sequences of this rank; the ranks share the subject, not the text."""
        sizes = self.sizes
        rng = np.random.default_rng([self.seed, self.done, 0, self.balancer.rank])
        count = sizes.tokens // sizes.length
        subjects = self.text.subjects_at(rng, self.done, count, subject_steps(steps, self.text))
        return self.text.sequences(rng, subjects, sizes.length + 1)


def subject_steps(steps: int, text: Text) -> int:
    """Return the steps until the subject of the text changes; training visits each once."""
    return -(-steps // len(text.names))


# -- speed of the layers -------------------------------------------------------------------------


def layer_speeds(
    model: TinyMoE, text: Text, job: Job, report: Callable[[int, int], None]
) -> dict[str, float]:
    """Return tokens per second of all ranks through the MoE layers, forward and backward.

    The layers get the hidden states of held-out text, and their own routers choose. Forced balance
    is a reference: the same tokens and work, with experts assigned round-robin. The policies
    and forced balance alternate, and every call sends its replicas again.

    report: called after every round with its number and the number of rounds.
    """
    layers, rounds = model.layers, WARMUP_ROUNDS + job.sizes.layer_rounds
    comm, length = layers[0].balancer.comm, job.sizes.length
    inputs = []
    for number, subject in enumerate(text.names):
        rng = np.random.default_rng([job.seed, comm.rank, number])
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
        for moe in model.layers
    ]
    model(tokens_BT)
    for hook in hooks:
        hook.remove()
    return inputs


def time_layer(moe: BalancedMoE, states_BTD: torch.Tensor, policy: str) -> float:
    """Return the seconds of forward and backward on the slowest rank, after a barrier."""
    comm, x = moe.balancer.comm, states_BTD.clone().requires_grad_()
    moe.zero_grad(set_to_none=True)
    with route_evenly(moe) if policy == FORCED else nullcontext():
        comm.all_gather(torch.zeros(1))
        begin = time.perf_counter()
        y = moe(x, policy="none" if policy == FORCED else policy)
        y.backward(torch.ones_like(y))
        seconds = time.perf_counter() - begin
    return float(comm.all_gather(torch.tensor([seconds])).max())


def route_evenly(moe: BalancedMoE) -> RemovableHandle:
    """Replace the router's choices by experts of all ranks in turn, until the handle is removed."""
    even = EvenTurns(moe.balancer.topology, moe.balancer.rank)

    def replace_choices(_: Any, __: Any, routing: Routing) -> Routing:
        return routing._replace(ids=even.replace(routing.ids))

    return moe.router.register_forward_hook(replace_choices)
