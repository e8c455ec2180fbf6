"""The phases of one rank of the demo: training, requests, layers. All calls are collective.

Experts are spread over the ranks. Every rank holds the rest of the model, whose gradients
DistributedDataParallel averages; `ultraep.parallel` does the same for experts.

Shapes: B sequences, T tokens, D model width.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from ultraep import __version__
from ultraep.backends import wait_until_compiled
from ultraep.config import BalanceConfig
from ultraep.layer import BalancedMoE
from ultraep.parallel import average_expert_gradients, clip_grad_norm, data_parallel
from ultraep.parallel.full_state import State, full_state_dict, load_full_state_dict, moe_layers
from ultraep.routing import Routing
from ultraep.runtime.balancer import Balancer
from ultraep.runtime.connect import ALONE
from ultraep.topology import even_homes
from ultraep_tools.demo.result import DemoResult, Event, Note, PolicyResult, Progress, trace_folder
from ultraep_tools.demo.sizes import Job, Sizes
from ultraep_tools.launch.group import process_group, settle
from ultraep_tools.launch.processes import RankPlace
from ultraep_tools.serving.engine import EvenTurns, from_first
from ultraep_tools.serving.measure import Turn
from ultraep_tools.tiny.model import ModelConfig, TinyMoE, next_byte_loss
from ultraep_tools.tiny.prefill import Answers, Queue, answer, make_requests
from ultraep_tools.tiny.text import Text

TRIAL_STEPS = 3  # steps that show how long the training takes
FEWEST_STEPS = 12


@dataclass(frozen=True)
class Trained:
    """The training of one policy."""

    steps: list[Step]
    weights_bytes: int  # sent by all ranks
    gradients_bytes: int
    state: State  # of the model, with all experts


def work(place: RankPlace, job: Job, report: Callable[[Event], None]) -> DemoResult:
    """Run the demo as one rank. All ranks return the same result; only rank 0 reports events."""
    begin = time.perf_counter()
    device = settle(place, job.device)
    wait_until_compiled()
    with process_group(place, job.device):
        demo = Demo(from_first(job), device, report if place.rank == 0 else lambda _: None)
        return demo.run(begin)


class Demo:
    """The phases of the demo, in order."""

    def __init__(self, job: Job, device: torch.device, report: Callable[[Event], None]) -> None:
        self.job, self.device, self.report = job, device, report
        self.sizes, self.notes, self.text = job.sizes, list(job.notes), Text()
        self.group_tokens = job.sizes.tokens * dist.get_world_size()

    def run(self, begin: float) -> DemoResult:
        trainings = self.train()
        first = trainings[self.job.policies[0]]
        held_out = {}
        with self.balancer("none") as balancer:
            model = make_model(self.sizes, balancer, self.job.seed, self.device).eval()
            for policy, training in trainings.items():
                load_full_state_dict(model, training.state)
                held_out[policy] = held_out_loss(model, self.text, self.sizes.length)
            load_full_state_dict(model, first.state)  # all policies use these weights from here on
            queue = self.queue()
            requests = make_requests(self.text, queue)
            answers = answer(model, requests, queue, self.job.policies, self.report_turn)
            speeds = layer_speeds(model, self.text, self.job, self.report_round)
        rows = [
            self.row(policy, training, held_out[policy], answers[policy], speeds)
            for policy, training in trainings.items()
        ]
        steps = len(first.steps)
        return DemoResult(
            version=__version__,
            python=platform.python_version(),
            machine=f"{platform.system()} {platform.machine()}",
            device=self.job.device,
            seed=self.job.seed,
            sizes=self.sizes,
            parameters=sum(tensor.numel() for tensor in first.state.values()),
            steps=steps,
            domains=[self.subject(step) for step in range(steps)],
            forced_tokens_per_second=speeds[FORCED],
            requests=len(requests),
            request_tokens=sum(request.tokens for request in requests),
            loss_difference=max(difference(row.losses, rows[0].losses) for row in rows),
            loss_difference_last=max(difference([row.loss], [rows[0].loss]) for row in rows),
            wall_seconds=time.perf_counter() - begin,
            notes=self.notes,
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
                trainers[policy] = Trainer(self.sizes, job.seed, balancer, self.text, self.device)
            while len(steps[policies[0]]) < self.sizes.steps:
                for policy in policies:
                    steps[policy].append(trainers[policy].step(self.sizes.steps))
                    self.report_step(policy, len(steps[policy]), steps[policy][-1])
                if len(steps[policies[0]]) == TRIAL_STEPS:
                    self.limit_steps(steps)
                policies.reverse()
            return {policy: trained(steps[policy], trainers[policy]) for policy in job.policies}

    def limit_steps(self, trial: dict[str, list[Step]]) -> None:
        """Reduce the steps to fit into the time limit, by the clock of rank 0."""
        limit = self.sizes.seconds
        if limit is None:
            return
        seconds = sum(min(step.seconds for step in steps) for steps in trial.values())
        steps = from_first(max(FEWEST_STEPS, int(limit / seconds)))
        if steps < self.sizes.steps:
            note = (
                f"{steps} steps instead of {self.sizes.steps}, because each takes {seconds:.1f} s"
            )
            self.notes.append(note)
            self.report(Note(note))
            self.sizes = replace(self.sizes, steps=steps)

    def subject(self, step: int) -> str:
        return self.text.names[self.text.main(step, subject_steps(self.sizes.steps, self.text))]

    def queue(self) -> Queue:
        sizes = self.sizes
        return Queue(
            requests=sizes.requests,
            shortest=min(32, sizes.longest),
            longest=sizes.longest,
            budget=max(sizes.tokens, sizes.longest),
            period=max(1, sizes.requests // 12),
            warmup=max(1, sizes.requests // 8),
            rounds=sizes.rounds,
            seed=self.job.seed,
        )

    def row(
        self,
        policy: str,
        training: Trained,
        held_out: float,
        answers: Answers,
        speeds: dict[str, float],
    ) -> PolicyResult:
        steps, waited = training.steps, [wait for wait in answers.turn.waited if wait is not None]
        losses, seconds = [step.loss for step in steps], [step.seconds for step in steps]
        names = ("before", "after", "bound", "copies")
        before, after, bound, copies = (
            np.array([getattr(step, name) for step in steps]) for name in names
        )
        return PolicyResult(
            policy=policy,
            losses=losses,
            loss=fmean(losses[-max(1, len(steps) // 10) :]),
            loss_held_out=held_out,
            seconds=seconds,
            tokens_per_second=self.group_tokens / median(seconds[1:] or seconds),  # 0 warms up
            before=before.mean(axis=1).tolist(),
            after=after.mean(axis=1).tolist(),
            imbalance_before=float(before.mean()),
            imbalance_before_worst=float(before.max()),
            imbalance_after=float(after.mean()),
            imbalance_after_worst=float(after.max()),
            imbalance_bound=float(bound.mean()),
            copies_per_layer=float(copies.mean()),
            weights_bytes=training.weights_bytes,
            gradients_bytes=training.gradients_bytes,
            layer_tokens_per_second=speeds[policy],
            layer_share=speeds[policy] / speeds[FORCED],
            first_token_median=median(waited),
            first_token_p90=float(np.percentile(waited, 90)),
            prefill_seconds=answers.turn.seconds,
            prefill_difference=answers.difference,
        )

    # -- progress --------------------------------------------------------------------------------

    def report_step(self, policy: str, number: int, step: Step) -> None:
        before, after = fmean(step.before), fmean(step.after)
        numbers = step.loss, self.group_tokens / step.seconds, before, after
        subject = self.subject(number - 1)
        self.report(Progress("training", number, self.sizes.steps, policy, subject, *numbers))

    def report_turn(self, policy: str, number: int, turn: Turn) -> None:
        numbers = None, sum(turn.tokens) / turn.seconds, turn.before, turn.after
        self.report(Progress("prefill", number, self.sizes.rounds, policy, "mixed", *numbers))

    def report_round(self, done: int, rounds: int) -> None:
        self.report(Progress("layers", done, rounds, subject="each in turn"))


def trained(steps: list[Step], trainer: Trainer) -> Trained:
    """Collect the results of a training from all ranks."""
    stats = trainer.balancer.comm.gather_objects(trainer.balancer.stats())
    weights, gradients = (
        sum(of_rank[f"{what}_bytes_sent"] for of_rank in stats) for what in ("weights", "gradients")
    )
    return Trained(steps, weights, gradients, full_state_dict(trainer.model))


def difference(values: list[float], reference: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(values, reference, strict=True))


# -- training ------------------------------------------------------------------------------------

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
