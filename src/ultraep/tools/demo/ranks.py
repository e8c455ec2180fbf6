"""The phases of one rank of the demo: training, requests, layers. All calls are collective."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from statistics import fmean, median

import numpy as np
import torch
import torch.distributed as dist

from ultraep import __version__
from ultraep.backends import wait_until_compiled
from ultraep.config import BalanceConfig
from ultraep.parallel.full_state import State, full_state_dict, load_full_state_dict
from ultraep.runtime.balancer import Balancer
from ultraep.runtime.connect import ALONE
from ultraep.tools.demo.result import (
    DemoResult,
    Event,
    Note,
    PolicyResult,
    Progress,
    trace_folder,
)
from ultraep.tools.demo.sizes import Job
from ultraep.tools.demo.train import (
    FORCED,
    Step,
    Trainer,
    held_out_loss,
    layer_speeds,
    make_model,
    subject_steps,
)
from ultraep.tools.launch.group import process_group, settle
from ultraep.tools.launch.processes import RankPlace
from ultraep.tools.serving.engine import from_first
from ultraep.tools.serving.measure import Turn
from ultraep.tools.tiny.prefill import Answers, Queue, answer, make_requests
from ultraep.tools.tiny.text import Text
from ultraep.topology import even_homes

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
            experts=sizes.experts,
            slots=sizes.slots,
            homes=even_homes(sizes.experts, dist.get_world_size()),
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
        """Return the main subject of the text in a step."""
        return self.text.names[self.text.main(step, subject_steps(self.sizes.steps, self.text))]

    def queue(self) -> Queue:
        """Return the settings of requests with mixed subjects."""
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
        """Return the measurements of one policy."""
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
