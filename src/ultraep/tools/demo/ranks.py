"""The phases of one rank of the demo: training, requests, layers. All calls are collective."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

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
    train,
)
from ultraep.tools.launch.group import process_group, settle
from ultraep.tools.launch.processes import RankPlace
from ultraep.tools.serving.engine import from_first
from ultraep.tools.serving.load import Prompt
from ultraep.tools.serving.measure import Turn
from ultraep.tools.tiny.model import TinyMoE
from ultraep.tools.tiny.prefill import Answers, Queue, answer, make_requests
from ultraep.tools.tiny.text import Text
from ultraep.topology import even_homes

TRIAL_STEPS = 3  # steps that show how long the training takes
FEWEST_STEPS = 12


@dataclass(frozen=True)
class Trained:
    """The training of one policy."""

    steps: list[Step]
    stats: list[dict[str, Any]]  # one per rank
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

    def run(self, begin: float) -> DemoResult:
        trained = self.train()
        first = trained[self.job.policies[0]]
        held_out = {}
        with self.balancer("none") as balancer:
            model = make_model(self.sizes, balancer, self.job.seed, self.device).eval()
            for policy, training in trained.items():
                load_full_state_dict(model, training.state)
                held_out[policy] = held_out_loss(model, self.text, self.sizes.length)
            load_full_state_dict(model, first.state)  # all policies use these weights from here on
            requests = make_requests(self.text, self.queue())
            answers = self.answer(model, requests)
            speeds = layer_speeds(model, self.text, self.job, self.report_round)
        rows = [
            self.row(policy, training, held_out[policy], answers[policy], speeds)
            for policy, training in trained.items()
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

    @contextmanager
    def balancer(self, policy: str, record: str | None = None) -> Iterator[Balancer]:
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
        with closing(balancer):
            yield balancer

    # -- training --------------------------------------------------------------------------------

    def train(self) -> dict[str, Trained]:
        """Train under every policy, in turns; fewer steps if the first ones are slow."""
        with ExitStack() as stack:
            trainers = {}
            for policy in self.job.policies:
                folder = str(trace_folder(self.job.out, policy))
                balancer = stack.enter_context(self.balancer(policy, folder))
                trainers[policy] = Trainer(
                    self.sizes, self.job.seed, balancer, self.text, self.device
                )
            trial = train(trainers, min(TRIAL_STEPS, self.sizes.steps), self.report_step)
            self.limit_steps(trial)
            for trainer in trainers.values():
                trainer.sizes = self.sizes
            rest = train(trainers, self.sizes.steps - TRIAL_STEPS, self.report_step)
            return {
                policy: Trained(
                    trial[policy] + rest[policy],
                    trainer.balancer.comm.gather_objects(trainer.balancer.stats()),
                    full_state_dict(trainer.model),
                )
                for policy, trainer in trainers.items()
            }

    def limit_steps(self, trial: dict[str, list[Step]]) -> None:
        """Reduce the steps to those that fit into the time limit, by the clock of rank 0."""
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

    def report_step(self, policy: str, number: int, step: Step) -> None:
        speed, subject = self.group_tokens / step.seconds, self.subject(number - 1)
        progress = Progress("training", number, self.sizes.steps, policy, subject, step.loss, speed)
        self.report(replace(progress, before=step.before, after=step.after))

    @property
    def group_tokens(self) -> int:
        return self.sizes.tokens * dist.get_world_size()

    def subject(self, step: int) -> str:
        return self.text.names[self.text.main(step, subject_steps(self.sizes, self.text))]

    # -- requests and layers ---------------------------------------------------------------------

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

    def report_round(self, done: int, rounds: int) -> None:
        self.report(Progress("layers", done, rounds, subject="each in turn"))

    def answer(self, model: TinyMoE, requests: list[Prompt]) -> dict[str, Answers]:
        def report_turn(policy: str, number: int, turn: Turn) -> None:
            speed = sum(turn.tokens) / turn.seconds
            progress = Progress("prefill", number, self.sizes.rounds, policy, "mixed", None, speed)
            self.report(replace(progress, before=turn.before, after=turn.after))

        answers = answer(model, requests, self.queue(), self.job.policies, report_turn)
        return {of_policy.policy: of_policy for of_policy in answers}

    def row(
        self,
        policy: str,
        trained: Trained,
        held_out: float,
        answers: Answers,
        speeds: dict[str, float],
    ) -> PolicyResult:
        steps, waited = trained.steps, [wait for wait in answers.turn.waited if wait is not None]
        last = steps[-max(1, len(steps) // 10) :]
        timed = [step.seconds for step in steps[1:]] or [steps[0].seconds]  # the first warms up
        return PolicyResult(
            policy=policy,
            losses=[step.loss for step in steps],
            loss=fmean(step.loss for step in last),
            loss_held_out=held_out,
            seconds=[step.seconds for step in steps],
            tokens_per_second=self.group_tokens / median(timed),
            before=[step.before for step in steps],
            after=[step.after for step in steps],
            imbalance_before=fmean(step.before for step in steps),
            imbalance_before_worst=max(step.worst_before for step in steps),
            imbalance_after=fmean(step.after for step in steps),
            imbalance_after_worst=max(step.worst_after for step in steps),
            imbalance_bound=fmean(step.bound for step in steps),
            copies_per_layer=sum(s.copies for s in steps) / len(steps) / self.sizes.layers,
            weights_bytes=sum(stats["weights_bytes_sent"] for stats in trained.stats),
            gradients_bytes=sum(stats["gradients_bytes_sent"] for stats in trained.stats),
            layer_tokens_per_second=speeds[policy],
            layer_share=speeds[policy] / speeds[FORCED],
            first_token_median=median(waited),
            first_token_p90=float(np.percentile(waited, 90)),
            prefill_seconds=answers.turn.seconds,
            prefill_difference=answers.difference,
        )


def difference(values: list[float], reference: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(values, reference, strict=True))
