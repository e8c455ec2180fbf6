"""What one rank of the demo does: training in turns, requests, layers; all ranks do it together."""

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
from ultraep.tools.demo.job import Job
from ultraep.tools.demo.measure import FORCED, LayerSpeed, layer_speeds
from ultraep.tools.demo.result import (
    DemoResult,
    Event,
    Note,
    PolicyResult,
    Progress,
    off,
    trace_folder,
)
from ultraep.tools.demo.train import (
    Step,
    Trainer,
    TrainingOptions,
    held_out_text,
    of_first,
    train,
)
from ultraep.tools.launch.group import process_group, settle
from ultraep.tools.launch.place import RankPlace
from ultraep.tools.tiny.model import ModelConfig, TinyMoE, next_byte_loss
from ultraep.tools.tiny.prefill import Answers, Queue, Request, answer, make_requests
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
    """The whole demo, as one rank; every rank finds the same result. `tell` hears rank 0 only."""
    begin = time.perf_counter()
    device = settle(place, job.device)
    wait_until_compiled()
    with process_group(place, job.device):
        told: list[Any] = [job]
        dist.broadcast_object_list(told, device=torch.device("cpu"))
        demo = Demo(told[0], device, tell if place.rank == 0 else lambda _: None)
        return demo.run(begin)


class Demo:
    """The phases, one after the other."""

    def __init__(self, job: Job, device: torch.device, tell: Tell) -> None:
        self.job, self.device, self.tell = job, device, tell
        self.sizes, self.notes, self.done = job.sizes, list(job.notes), 0
        self.text, self.dtype = Text(), getattr(torch, job.sizes.dtype)
        size = job.sizes
        self.config = ModelConfig(
            hidden=size.hidden,
            ffn=size.ffn,
            experts=size.experts,
            top_k=size.top_k,
            layers=size.layers,
            heads=size.heads,
        )

    def run(self, begin: float) -> DemoResult:
        trained = self.train()
        with self.balancer("none") as balancer:
            model = TinyMoE(self.config, balancer, seed=self.job.seed)
            model.to(self.device, self.dtype).eval()
            held_out = {policy: self.check(model, found) for policy, found in trained.items()}
            first = trained[self.job.policies[0]]
            load_full_state_dict(
                model, first.state
            )  # the same weights for all policies from here on
            requests = make_requests(self.text, self.queue())
            answers = self.answer(model, requests)
            speeds = self.measure(model)
        tokens = sum(len(request.tokens) for request in requests)
        rows = [
            self.row(policy, found.steps, found.stats, held_out[policy], answers[policy], speeds)
            for policy, found in trained.items()
        ]
        parameters = sum(tensor.numel() for tensor in first.state.values())
        return self.result(begin, rows, speeds[FORCED], tokens, parameters)

    @torch.no_grad()
    def check(self, model: TinyMoE, trained: Trained) -> float:
        """The loss on held-out text of all subjects."""
        load_full_state_dict(model, trained.state)
        tokens = held_out_text(self.text, self.sizes.length).to(self.device)
        return next_byte_loss(model, tokens).item()

    @contextmanager
    def balancer(self, policy: str, record: str | None = None) -> Iterator[Balancer]:
        """One over all ranks; its messages do not mix with those of the rest of the model."""
        sizes = self.sizes
        made = Balancer(
            dist.new_group() if sizes.ranks > 1 else ALONE,  # the demo itself reports one rank
            experts=sizes.experts,
            slots=sizes.slots,
            homes=even_homes(sizes.experts, dist.get_world_size()),
            config=BalanceConfig(policy=policy, objective="balance"),
            record=record,
        )
        with closing(made):
            yield made

    def train(self) -> dict[str, Trained]:
        """Train under every policy."""
        with ExitStack() as open_ones:
            trainers = {}
            for policy in self.job.policies:
                folder = str(trace_folder(self.job.out, policy))
                balancer = open_ones.enter_context(self.balancer(policy, folder))
                options = self.training(self.sizes.steps)
                trainers[policy] = Trainer(self.config, options, balancer, self.text, self.device)
            steps = self.steps(trainers)
            found = {}
            for policy, trainer in trainers.items():
                stats = trainer.balancer.comm.gather_objects(trainer.balancer.stats())
                found[policy] = Trained(steps[policy], stats, full_state_dict(trainer.model))
            return found

    def training(self, steps: int) -> TrainingOptions:
        """The text moves through all subjects once."""
        sizes = self.sizes
        return TrainingOptions(
            tokens=sizes.tokens,
            length=sizes.length,
            period=-(-steps // len(self.text.names)),
            lr=sizes.lr,
            warmup=min(10, steps // 4),
            even=sizes.even,
            seed=self.job.seed,
            dtype=self.dtype,
        )

    def steps(self, trainers: dict[str, Trainer]) -> dict[str, list[Step]]:
        """A few steps first; if they show that it would take too long, there will be fewer."""

        def tell(policy: str, number: int, step: Step) -> None:
            self.tell(
                Progress(
                    "training",
                    number,
                    self.sizes.steps,
                    policy,
                    self.subject(number - 1),
                    step.loss,
                    self.group_tokens / step.seconds,
                    step.before,
                    step.after,
                )
            )

        limit = self.sizes.seconds and LATE * self.sizes.seconds
        trial = train(trainers, min(TRIAL, self.sizes.steps), tell)
        self.shorten(trial)
        for trainer in trainers.values():
            trainer.options = self.training(self.sizes.steps)
        least = train(trainers, min(FEWEST_STEPS, self.sizes.steps) - TRIAL, tell)
        rest = train(trainers, self.sizes.steps - FEWEST_STEPS, tell, limit)
        found = {policy: trial[policy] + least[policy] + rest[policy] for policy in trainers}
        self.done = len(found[self.job.policies[0]])
        if self.done < self.sizes.steps:
            self.note(f"{self.done} of {self.sizes.steps} steps, as the machine became slower")
        return found

    def shorten(self, done: dict[str, list[Step]]) -> None:
        """Fewer steps, if the machine is slow; rank 0 decides."""
        limit, turn = self.sizes.seconds, sum(min(s.seconds for s in d) for d in done.values())
        fitting = self.sizes.steps if limit is None else max(FEWEST_STEPS, int(limit / turn))
        decided = of_first(min(self.sizes.steps, fitting))
        if decided < self.sizes.steps:
            self.note(f"{decided} steps in place of {self.sizes.steps}, as each takes {turn:.1f} s")
            self.sizes = replace(self.sizes, steps=decided)

    def note(self, words: str) -> None:
        self.notes.append(words)
        self.tell(Note(words))

    @property
    def group_tokens(self) -> int:
        return self.sizes.tokens * dist.get_world_size()

    def subject(self, step: int) -> str:
        return self.text.names[self.text.main(step, self.training(self.sizes.steps).period)]

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

    def answer(self, model: TinyMoE, requests: list[Request]) -> dict[str, Answers]:
        tokens = sum(len(request.tokens) for request in requests)

        def tell(policy: str, number: int, served: Any) -> None:
            self.tell(
                Progress(
                    "prefill",
                    number,
                    self.sizes.rounds,
                    policy,
                    "mixed",
                    None,
                    tokens / sum(served.batches),
                    fmean(plan.initial_imbalance for plan in served.plans),
                    fmean(plan.imbalance for plan in served.plans),
                )
            )

        found = answer(model, requests, self.queue(), self.job.policies, tell)
        return {answers.policy: answers for answers in found}

    def measure(self, model: TinyMoE) -> dict[str, LayerSpeed]:
        sizes = self.sizes
        found = layer_speeds(
            model,
            self.text,
            self.job.policies,
            tokens=sizes.tokens,
            length=sizes.length,
            rounds=sizes.layer_rounds,
            seed=self.job.seed,
            tell=lambda done, of: self.tell(Progress("layers", done, of, subject="each in turn")),
        )
        return {speed.variant: speed for speed in found}

    def result(
        self,
        begin: float,
        rows: list[PolicyResult],
        forced: LayerSpeed,
        request_tokens: int,
        parameters: int,
    ) -> DemoResult:
        first = rows[0]
        return DemoResult(
            version=__version__,
            python=platform.python_version(),
            machine=f"{platform.system()} {platform.machine()}",
            device=self.job.device,
            seed=self.job.seed,
            sizes=self.sizes,
            parameters=parameters,
            steps=self.done,
            domains=[self.subject(step) for step in range(self.done)],
            forced_tokens_per_second=forced.tokens_per_second,
            requests=self.sizes.requests,
            request_tokens=request_tokens,
            loss_difference=max(off(row.losses, first.losses) for row in rows),
            loss_difference_last=max(off([row.loss], [first.loss]) for row in rows),
            wall_seconds=time.perf_counter() - begin,
            notes=self.notes,
            policies=rows,
        )

    def row(
        self,
        policy: str,
        steps: list[Step],
        stats: list[dict[str, Any]],
        held_out: float,
        answers: Answers,
        speeds: dict[str, LayerSpeed],
    ) -> PolicyResult:
        served = answers.served
        last = steps[-max(1, len(steps) // 10) :]
        speed, forced = speeds[policy], speeds[FORCED]
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
            weights_bytes=sum(of_rank["weights_bytes_sent"] for of_rank in stats),
            gradients_bytes=sum(of_rank["gradients_bytes_sent"] for of_rank in stats),
            layer_tokens_per_second=speed.tokens_per_second,
            layer_share=speed.tokens_per_second / forced.tokens_per_second,
            first_token_median=median(served.waited),
            first_token_p90=float(np.percentile(served.waited, 90)),
            prefill_seconds=sum(served.batches),
            prefill_difference=answers.difference,
        )
