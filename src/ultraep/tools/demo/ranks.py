"""All phases of one rank of the demo: training in turns, requests, layers; all ranks together."""

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
from ultraep.tools.demo.measure import FORCED, layer_speeds
from ultraep.tools.demo.result import (
    DemoResult,
    Event,
    Note,
    PolicyResult,
    Progress,
    trace_folder,
)
from ultraep.tools.demo.sizes import Job
from ultraep.tools.demo.train import Step, Trainer, TrainingOptions, held_out_text, train
from ultraep.tools.launch.group import process_group, settle
from ultraep.tools.launch.processes import RankPlace
from ultraep.tools.serving.engine import from_first
from ultraep.tools.serving.load import Prompt
from ultraep.tools.serving.measure import Turn
from ultraep.tools.tiny.model import ModelConfig, TinyMoE, next_byte_loss
from ultraep.tools.tiny.prefill import Answers, Queue, answer, make_requests
from ultraep.tools.tiny.text import Text
from ultraep.topology import even_homes

Tell = Callable[[Event], None]
TRIAL = 3  # steps that show how long the training will take
FEWEST_STEPS = 12
LATE = 1.3  # times as long as planned, and the training ends


@dataclass(frozen=True)
class Trained:
    """The training of one policy."""

    steps: list[Step]
    stats: list[dict[str, Any]]  # of all ranks
    state: State  # of the model, with all experts


def work(place: RankPlace, job: Job, tell: Tell) -> DemoResult:
    """The whole demo, as one rank; the result is the same on all. Rank 0 alone calls `tell`."""
    begin = time.perf_counter()
    device = settle(place, job.device)
    wait_until_compiled()
    with process_group(place, job.device):
        demo = Demo(from_first(job), device, tell if place.rank == 0 else lambda _: None)
        return demo.run(begin)


class Demo:
    """The phases, one after the other."""

    def __init__(self, job: Job, device: torch.device, tell: Tell) -> None:
        self.job, self.device, self.tell = job, device, tell
        self.sizes, self.notes = job.sizes, list(job.notes)
        self.text, self.dtype = Text(), getattr(torch, job.sizes.dtype)
        names = ("hidden", "ffn", "experts", "top_k", "layers", "heads")
        self.config = ModelConfig(**{name: getattr(job.sizes, name) for name in names})

    def run(self, begin: float) -> DemoResult:
        trained = self.train()
        with self.balancer("none") as balancer:
            model = TinyMoE(self.config, balancer, seed=self.job.seed)
            model.to(self.device, self.dtype).eval()
            held_out = {policy: self.check(model, own) for policy, own in trained.items()}
            first = trained[self.job.policies[0]]
            load_full_state_dict(model, first.state)  # the same weights for all from here on
            requests = make_requests(self.text, self.queue())
            answers = self.answer(model, requests)
            speeds = layer_speeds(model, self.text, self.job, self.tell_round)
        rows = [
            self.row(policy, own, held_out[policy], answers[policy], speeds)
            for policy, own in trained.items()
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
        """A balancer over all ranks, whose messages do not mix with those of the model."""
        sizes = self.sizes
        balancer = Balancer(
            dist.new_group() if sizes.ranks > 1 else ALONE,  # the demo itself reports one rank
            experts=sizes.experts,
            slots=sizes.slots,
            homes=even_homes(sizes.experts, dist.get_world_size()),
            config=BalanceConfig(policy=policy, objective="balance"),
            record=record,
        )
        with closing(balancer):
            yield balancer

    def note(self, words: str) -> None:
        self.notes.append(words)
        self.tell(Note(words))

    # -- training --------------------------------------------------------------------------------

    def train(self) -> dict[str, Trained]:
        """Train under every policy, in turns."""
        with ExitStack() as stack:
            trainers = {}
            for policy in self.job.policies:
                folder = str(trace_folder(self.job.out, policy))
                balancer = stack.enter_context(self.balancer(policy, folder))
                trainers[policy] = Trainer(
                    self.config, self.training(), balancer, self.text, self.device
                )
            steps = self.steps(trainers)
            return {
                policy: Trained(
                    steps[policy],
                    trainer.balancer.comm.gather_objects(trainer.balancer.stats()),
                    full_state_dict(trainer.model),
                )
                for policy, trainer in trainers.items()
            }

    def training(self) -> TrainingOptions:
        """The text moves through all subjects once."""
        sizes = self.sizes
        return TrainingOptions(
            tokens=sizes.tokens,
            length=sizes.length,
            period=-(-sizes.steps // len(self.text.names)),
            lr=sizes.lr,
            warmup=min(10, sizes.steps // 4),
            even=sizes.even,
            seed=self.job.seed,
            dtype=self.dtype,
        )

    def steps(self, trainers: dict[str, Trainer]) -> dict[str, list[Step]]:
        """A few steps first; if they show that it would take too long, there will be fewer."""
        limit = self.sizes.seconds and LATE * self.sizes.seconds
        trial = train(trainers, min(TRIAL, self.sizes.steps), self.tell_step)
        self.shorten(trial)
        for trainer in trainers.values():
            trainer.options = self.training()
        least = train(trainers, min(FEWEST_STEPS, self.sizes.steps) - TRIAL, self.tell_step)
        rest = train(trainers, self.sizes.steps - FEWEST_STEPS, self.tell_step, limit)
        steps = {policy: trial[policy] + least[policy] + rest[policy] for policy in trainers}
        done = len(steps[self.job.policies[0]])
        if done < self.sizes.steps:
            self.note(f"{done} of {self.sizes.steps} steps, as the machine became slower")
        return steps

    def shorten(self, done: dict[str, list[Step]]) -> None:
        """Fewer steps, if the machine is slow; rank 0 decides."""
        limit, turn = self.sizes.seconds, sum(min(s.seconds for s in d) for d in done.values())
        fitting = self.sizes.steps if limit is None else max(FEWEST_STEPS, int(limit / turn))
        decided = from_first(min(self.sizes.steps, fitting))
        if decided < self.sizes.steps:
            self.note(f"{decided} steps in place of {self.sizes.steps}, as each takes {turn:.1f} s")
            self.sizes = replace(self.sizes, steps=decided)

    def tell_step(self, policy: str, number: int, step: Step) -> None:
        self.tell(
            Progress(
                phase="training",
                done=number,
                of=self.sizes.steps,
                policy=policy,
                subject=self.subject(number - 1),
                loss=step.loss,
                tokens_per_second=self.group_tokens / step.seconds,
                before=step.before,
                after=step.after,
            )
        )

    @property
    def group_tokens(self) -> int:
        return self.sizes.tokens * dist.get_world_size()

    def subject(self, step: int) -> str:
        return self.text.names[self.text.main(step, self.training().period)]

    @torch.no_grad()
    def check(self, model: TinyMoE, trained: Trained) -> float:
        """The loss on held-out text of all subjects."""
        load_full_state_dict(model, trained.state)
        tokens = held_out_text(self.text, self.sizes.length).to(self.device)
        return next_byte_loss(model, tokens).item()

    # -- requests and layers ---------------------------------------------------------------------

    def queue(self) -> Queue:
        """Requests of all subjects, mixed."""
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

    def tell_round(self, done: int, rounds: int) -> None:
        self.tell(Progress("layers", done, rounds, subject="each in turn"))

    def answer(self, model: TinyMoE, requests: list[Prompt]) -> dict[str, Answers]:
        def tell(policy: str, number: int, turn: Turn) -> None:
            self.tell(
                Progress(
                    phase="prefill",
                    done=number,
                    of=self.sizes.rounds,
                    policy=policy,
                    subject="mixed",
                    tokens_per_second=sum(turn.tokens) / turn.seconds,
                    before=turn.before,
                    after=turn.after,
                )
            )

        of_policies = answer(model, requests, self.queue(), self.job.policies, tell)
        return {answers.policy: answers for answers in of_policies}

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
        speed = speeds[policy]
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
            weights_bytes=sum(of_rank["weights_bytes_sent"] for of_rank in trained.stats),
            gradients_bytes=sum(of_rank["gradients_bytes_sent"] for of_rank in trained.stats),
            layer_tokens_per_second=speed,
            layer_share=speed / speeds[FORCED],
            first_token_median=median(waited),
            first_token_p90=float(np.percentile(waited, 90)),
            prefill_seconds=answers.turn.seconds,
            prefill_difference=answers.difference,
        )


def difference(values: list[float], reference: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(values, reference, strict=True))
