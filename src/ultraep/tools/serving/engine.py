"""One rank of the engine: it serves prompts as they arrive, microbatch after microbatch.

Rank 0 has the clock. When a microbatch is done, it takes the prompts that have arrived, sends all
ranks the list of who serves which, and all ranks run the model. The time to a first token is real
time: from the arrival of the prompt until its token is known on its rank. The clocks of all ranks
start at a barrier, so that ranks of several hosts need no common clock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ultraep.microbatch import AnyPlan, MicrobatchInfo
from ultraep.runtime.balancer import Balancer
from ultraep.runtime.observe import Later
from ultraep.tools.serving.load import Prompt, next_microbatch
from ultraep.tools.serving.measure import Turn, waits
from ultraep.tools.serving.variants import FORCED, EvenChoices, policy_of

LATE, GRACE = 2.0, 10.0  # a turn ends after so many times its arrivals, and seconds more
CPU = torch.device("cpu")


class ServedModel(Protocol):
    """A model in the engine: the tiny one, or one of transformers."""

    @property
    def balancers(self) -> Sequence[Balancer]: ...

    @property
    def even_choices(self) -> Sequence[EvenChoices]: ...

    def encode(self, prompt: Prompt) -> torch.Tensor:
        """[T] token ids."""

    def first_outputs(self, texts: Sequence[torch.Tensor]) -> list[Any]:
        """The first new token of every text, or its logits; collective."""


class LoadSums:
    """An observer that adds up loads.

    Imbalance is the sum of what the busiest ranks had over that of the mean ranks.
    rows: that this rank served.   nbytes: that it sent for copies.
    busy: seconds of its processor in the experts, for every layer of every microbatch. Other
        programs on this machine hardly change them.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.reset()

    def reset(self) -> None:
        """Start counting."""
        self.fullest = self.evened = self.mean = 0.0
        self.worst_before = self.worst_after = 1.0
        self.copies = self.nbytes = self.rows = 0
        self.busy: list[float] = []

    def begin(self, stage: str, _: MicrobatchInfo) -> None:
        if stage == "experts":
            self.busy.append(-time.process_time())

    def end(self, stage: str, _: MicrobatchInfo) -> None:
        if stage == "experts":
            self.busy[-1] += time.process_time()

    def planned(self, _: MicrobatchInfo, any_plan: AnyPlan) -> None:
        plan = any_plan.to_host()
        self.fullest += float(plan.initial_rank_loads.max())
        self.evened += float(plan.rank_loads.max())
        self.mean += plan.total / plan.topology.ranks
        self.worst_before = max(self.worst_before, plan.initial_imbalance)
        self.worst_after = max(self.worst_after, plan.imbalance)
        self.copies += plan.num_replicas
        self.rows += int(plan.rank_loads[self.rank])

    def sent(self, _: MicrobatchInfo, __: str, nbytes: int, copies: int | Later | None) -> None:
        self.nbytes += nbytes * ((copies() if callable(copies) else copies) or 0)


class Engine:
    """The model on this rank, and its balancers.

    budget: most tokens of a rank in a microbatch.   grace: seconds until a turn is ended.
    min_tokens: rows that a copy has to serve at least, so that it saves more than it costs.
    """

    def __init__(
        self, model: ServedModel, *, routing: str = "own", budget: int = 256, grace: float = GRACE
    ) -> None:
        self.model, self.routing, self.budget, self.grace = model, routing, budget, grace
        self.rank, self.ranks, self.min_tokens = dist.get_rank(), dist.get_world_size(), 1
        self.sums = LoadSums(self.rank)
        for balancer in model.balancers:
            balancer.observe(self.sums)

    def serve(self, prompts: Sequence[Prompt], variant: str, rate: float, number: int) -> Turn:
        """One turn; the result is the same on all ranks."""
        self._choose(variant)
        sums = self.sums
        sums.reset()
        texts = {prompt.number: self.model.encode(prompt) for prompt in prompts}
        with ExitStack() as stack:
            for balancer in self.model.balancers:
                stack.enter_context(balancer.unchanged_weights())
            dist.barrier()
            begin, before = time.monotonic(), _runqueue_seconds()
            mine, microbatches = self._microbatches(prompts, texts, begin)
        lost = (_runqueue_seconds() - before) / max(time.monotonic() - begin, 1e-9)
        parts: list[Any] = [None] * self.ranks
        dist.all_gather_object(parts, (mine, sums.nbytes, lost, sums.busy))
        outputs, sent, shares, busy = zip(*parts, strict=True)
        served = {key: value for part in outputs for key, value in part.items()}
        ends = [served.get(prompt.number, (None, None)) for prompt in prompts]
        unserved = len(prompts) - len(served)
        return Turn(
            variant=variant,
            rate=rate,
            number=number,
            waited=waits(prompts, [end for end, _ in ends]),
            tokens=[prompt.tokens for prompt in prompts],
            arrived=prompts[-1].arrival,
            seconds=max((end for end, _ in served.values()), default=0.0),
            first=[output for _, output in ends],
            errors={"not served in time": unserved} if unserved else {},
            microbatches=microbatches,
            before=sums.fullest / sums.mean if sums.mean else None,
            after=sums.evened / sums.mean if sums.mean else None,
            worst_before=sums.worst_before,
            worst_after=sums.worst_after,
            copies=sums.copies,
            sent=sum(sent),
            experts=sum(map(max, zip(*busy, strict=True))),
            disturbed=max(shares),
        )

    def _microbatches(
        self, prompts: Sequence[Prompt], texts: dict[int, torch.Tensor], begin: float
    ) -> tuple[dict[int, tuple[float, Any]], int]:
        """End and output of this rank's prompts by number, and how many microbatches there were."""
        waiting, count = list(prompts), 0
        served: dict[int, tuple[float, Any]] = {}
        until = LATE * prompts[-1].arrival + self.grace
        while True:
            batch: list[list[int]] = from_first(self._next(waiting, begin, until))
            if not batch:
                return served, count
            mine = batch[self.rank]
            outputs = self.model.first_outputs([texts[number] for number in mine])
            end = time.monotonic() - begin
            served |= {number: (end, out) for number, out in zip(mine, outputs, strict=True)}
            count += 1
            del waiting[: sum(map(len, batch))]

    def _next(self, waiting: Sequence[Prompt], begin: float, until: float) -> list[list[int]]:
        """The numbers of the next prompts by rank, once one has arrived; on rank 0 only."""
        if self.rank or not waiting:
            return []
        now = time.monotonic() - begin
        if now > until:
            return []
        if waiting[0].arrival > now:
            time.sleep(waiting[0].arrival - now)
            now = time.monotonic() - begin
        arrived = [prompt for prompt in waiting if prompt.arrival <= now] or waiting[:1]
        batch = next_microbatch(arrived, self.ranks, self.budget)
        return [[prompt.number for prompt in part] for part in batch]

    def _choose(self, variant: str) -> None:
        """Let this variant plan from now on; on all ranks."""
        policy = policy_of(variant)
        least = self.min_tokens if policy == "ultraep" else 1
        for balancer in self.model.balancers:
            balancer.config = replace(
                balancer.config, policy=policy, min_tokens_per_replica=least, objective="balance"
            )
        for choices in self.model.even_choices:
            choices.on = variant == FORCED or self.routing == "even"


def _runqueue_seconds() -> float:
    """Seconds in which this process was ready and others had its core; 0: not known."""
    try:
        return int(Path("/proc/self/schedstat").read_text("ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def from_first(value: Any) -> Any:
    """The value of rank 0; collective."""
    values = [value]
    dist.broadcast_object_list(values, device=CPU)
    return values[0]
