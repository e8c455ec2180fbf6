"""One rank of the engine: it serves prompts as they arrive, microbatch after microbatch.

Rank 0 has the clock. When the microbatch before is done it takes the prompts that have arrived,
tells all ranks who serves which, and all of them go through the model. The time to a first token is
real time: from the second at which the prompt was to arrive until its token is known on its rank.
Processes of one machine have one clock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ultraep.config import BalanceConfig
from ultraep.integrations.transformers import balanced_experts, balancers
from ultraep.microbatch import AnyPlan, MicrobatchInfo
from ultraep.runtime.observe import Later
from ultraep.tools.serving.measure import Turn, waits
from ultraep.tools.serving.model import first_tokens
from ultraep.tools.serving.prompts import Prompt
from ultraep.tools.serving.queue import next_microbatch
from ultraep.tools.serving.variants import FORCED, EvenChoices, policy_of

LATE, GRACE = 2.0, 10.0  # a turn ends after so many times its arrivals, and seconds more


class LoadSums:
    """An observer that adds up loads: imbalance is what the fullest ranks had over the mean.

    rows: that this rank served.   nbytes: that it sent for copies.
    busy: seconds of its processor in the experts, of every layer of every microbatch: what others
        do on this machine hardly changes them.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.reset()

    def reset(self) -> None:
        """Begin to count."""
        self.fullest = self.evened = self.mean = 0.0
        self.copies = self.nbytes = self.rows = 0
        self.busy: list[float] = []

    def begin(self, stage: str, _: MicrobatchInfo) -> None:
        if stage == "experts":
            self.busy.append(-time.process_time())

    def end(self, stage: str, _: MicrobatchInfo) -> None:
        if stage == "experts":
            self.busy[-1] += time.process_time()

    def planned(self, _: MicrobatchInfo, made: AnyPlan) -> None:
        plan = made.to_host()
        self.fullest += float(plan.initial_rank_loads.max())
        self.evened += float(plan.rank_loads.max())
        self.mean += plan.total / plan.topology.ranks
        self.copies += plan.num_replicas
        self.rows += int(plan.rank_loads[self.rank])

    def sent(self, _: MicrobatchInfo, __: str, nbytes: int, copies: int | Later | None) -> None:
        self.nbytes += nbytes * ((copies() if callable(copies) else copies) or 0)


class Engine:
    """The model on this rank, and who balances it.

    budget: most tokens of a rank in a microbatch.
    min_tokens: what a copy has to serve at least, lest it cost more than it saves.
    """

    def __init__(self, model: Any, encode: Any, *, routing: str = "own") -> None:
        self.model, self.encode, self.routing = model, encode, routing
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.owners, self.budget, self.min_tokens = balancers(model), 256, 1
        self.even = {id(owner): EvenChoices(owner.topology, self.rank) for owner in self.owners}
        self.sums = LoadSums(self.rank)
        for owner in self.owners:
            owner.observe(self.sums)
        for module in balanced_experts(model).values():
            hook = self.even[id(module.balancer)]
            module.register_forward_pre_hook(hook, with_kwargs=True)

    def serve(self, prompts: Sequence[Prompt], variant: str, rate: float, number: int) -> Turn:
        """One turn; alike on all ranks."""
        self._choose(variant)
        sums = self.sums
        sums.reset()
        texts = {prompt.number: self._ids(prompt) for prompt in prompts}
        with ExitStack() as stack:
            for owner in self.owners:
                stack.enter_context(owner.unchanged_weights())
            begin, before = from_first(time.monotonic()), _runqueue_seconds()
            mine, microbatches = self._microbatches(prompts, texts, begin)
        parts: list[Any] = [None] * self.ranks
        lost = (_runqueue_seconds() - before) / max(time.monotonic() - begin, 1e-9)
        dist.all_gather_object(parts, (mine, sums.nbytes, lost, sums.busy))
        every, sent, shares, busy = zip(*parts, strict=True)
        done = {key: value for part in every for key, value in part.items()}
        known = [done.get(prompt.number, (None, None)) for prompt in prompts]
        unserved = len(prompts) - len(done)
        return Turn(
            variant=variant,
            rate=rate,
            number=number,
            waited=waits(prompts, [end for end, _ in known]),
            tokens=[prompt.tokens for prompt in prompts],
            arrived=prompts[-1].arrival,
            seconds=max((end for end, _ in done.values()), default=0.0),
            first=[token for _, token in known],
            errors={"not served in time": unserved} if unserved else {},
            microbatches=microbatches,
            before=sums.fullest / sums.mean if sums.mean else None,
            after=sums.evened / sums.mean if sums.mean else None,
            copies=sums.copies,
            sent=sum(sent),
            experts=sum(map(max, zip(*busy, strict=True))),
            disturbed=max(shares),
        )

    def _microbatches(
        self, prompts: Sequence[Prompt], texts: dict[int, torch.Tensor], begin: float
    ) -> tuple[dict[int, tuple[float, int]], int]:
        """End and first token of the prompts of this rank, and how many microbatches it took."""
        waiting, count = list(prompts), 0
        done: dict[int, tuple[float, int]] = {}
        until = LATE * prompts[-1].arrival + GRACE
        while True:
            batch: list[list[int]] = from_first(self._next(waiting, begin, until))
            if not batch:
                return done, count
            mine = batch[self.rank]
            found = first_tokens(self.model, [texts[number] for number in mine])
            end = time.monotonic() - begin
            done |= {number: (end, token) for number, token in zip(mine, found, strict=True)}
            count += 1
            del waiting[: sum(map(len, batch))]

    def _next(self, waiting: Sequence[Prompt], begin: float, until: float) -> list[list[int]]:
        """The numbers of the next prompts, by rank, when one is there; on rank 0 only."""
        if self.rank or not waiting:
            return []
        now = time.monotonic() - begin
        if now > until:
            return []
        if waiting[0].arrival > now:
            time.sleep(waiting[0].arrival - now)
            now = time.monotonic() - begin
        there = [prompt for prompt in waiting if prompt.arrival <= now] or waiting[:1]
        batch = next_microbatch(there, self.ranks, self.budget)
        return [[prompt.number for prompt in part] for part in batch]

    def _choose(self, variant: str) -> None:
        """Let this variant plan from now on; on all ranks."""
        policy = policy_of(variant)
        least = self.min_tokens if policy == "ultraep" else 1
        for owner in self.owners:
            owner.config = BalanceConfig(
                policy=policy, min_tokens_per_replica=least, objective="balance"
            )
            self.even[id(owner)].on = variant == FORCED or self.routing == "even"

    def _ids(self, prompt: Prompt) -> torch.Tensor:
        ids = self.encode(prompt.text.decode("utf-8", "replace"))[: prompt.tokens]
        return torch.tensor(ids, dtype=torch.int64)


def _runqueue_seconds() -> float:
    """Seconds in which this process could have run, and others had its core; 0: not known."""
    try:
        return int(Path("/proc/self/schedstat").read_text("ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def from_first(value: Any) -> Any:
    """What rank 0 says; collective."""
    told = [value]
    dist.broadcast_object_list(told)
    return told[0]
