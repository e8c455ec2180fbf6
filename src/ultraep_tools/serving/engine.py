"""The engine: one rank that serves prompts as they arrive, microbatch after microbatch.

Rank 0 has the clock. When a microbatch is done, rank 0 takes the prompts that have arrived, sends
all ranks the assignment of prompts to ranks, and all ranks run the model. The time to first token
is wall-clock time, from the arrival of a prompt to its token on its rank. The clocks of all ranks
start at a barrier, so ranks on several hosts need no common clock.

A variant is a policy of the balancer, or "even" (forced even routing).

Shapes: T tokens, K experts per token, R ranks, E experts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from ultraep.passes import PassRecord
from ultraep.policies import running_policy
from ultraep.runtime.balancer import Balancer
from ultraep.runtime.stats import Stats
from ultraep.topology import Topology
from ultraep_tools.serving.load import Prompt, next_microbatch
from ultraep_tools.serving.measure import FORCED, Turn

LATE, GRACE = 2.0, 10.0  # a turn ends after LATE times its arrivals plus GRACE seconds
CPU = torch.device("cpu")
ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")  # of transformers' experts


class ServedModel(Protocol):
    """A model in the engine: the tiny model, or a transformers model."""

    @property
    def device(self) -> torch.device: ...

    @property
    def even_choices(self) -> Sequence[ForcedChoices]: ...

    def use(self, policy: str) -> Sequence[Balancer]:
        """Plan by this policy from now on; return the balancers. Collective."""

    def encode(self, prompt: Prompt) -> torch.Tensor:
        """[T] token ids."""

    def first_outputs(self, texts: Sequence[torch.Tensor]) -> list[Any]:
        """The first new token of every text, or its logits; collective."""


@dataclass
class LoadSums(Stats):
    """Sums over the microbatches of a turn.

    busiest_before, busiest_after: rows of the busiest rank without and with replicas.
    experts: seconds of this rank's experts, by microbatch and layer; on a CPU, CPU seconds, which
        other programs on the machine hardly change.
    """

    busiest_before: int = 0
    busiest_after: int = 0
    worst_before: float = 1.0
    experts: list[float] = field(default_factory=list)

    def add(self, record: PassRecord) -> None:
        super().add(record)
        plan = record.plan
        if plan is None:
            return
        self.experts.append(record.seconds["experts"])
        self.busiest_before += int(plan.initial_rank_loads.max())
        self.busiest_after += int(plan.rank_loads.max())
        self.worst_before = max(self.worst_before, plan.initial_imbalance)

    def imbalance(self, busiest: int) -> float | None:
        """Rows of the busiest rank over the mean; None without rows."""
        return busiest * dist.get_world_size() / self.rows if self.rows else None


class Engine:
    """The model on this rank.

    budget: max tokens per rank in a microbatch.   grace: extra seconds before a turn is ended.
    """

    def __init__(
        self, model: ServedModel, *, routing: str = "own", budget: int = 256, grace: float = GRACE
    ) -> None:
        self.model, self.routing, self.budget, self.grace = model, routing, budget, grace
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.sums = LoadSums()
        self._observed: set[Balancer] = set()

    def serve(self, prompts: Sequence[Prompt], variant: str, rate: float, number: int) -> Turn:
        """Serve one turn; returns the same result on all ranks."""
        balancers, sums = self._select(variant), self.sums
        texts = {prompt.number: self.model.encode(prompt) for prompt in prompts}
        for balancer in balancers:
            balancer.stats()  # waits for reports of earlier microbatches
        sums.reset()
        dist.barrier()
        begin, preempted = time.monotonic(), _preempted_seconds()
        mine, microbatches = self._microbatches(prompts, texts, begin)
        disturbed = (_preempted_seconds() - preempted) / max(time.monotonic() - begin, 1e-9)
        for balancer in balancers:
            balancer.stats()  # waits for all reports of this turn
        by_rank: list[Any] = [None] * self.ranks
        own = mine, sums.bytes_sent["weights"], disturbed, sums.experts
        dist.all_gather_object(by_rank, own)
        outputs, nbytes, disturbed_shares, cpu_seconds = zip(*by_rank, strict=True)
        on_cpu = self.model.device.type == "cpu"
        served = {key: value for part in outputs for key, value in part.items()}
        ends = [served.get(prompt.number, (None, None)) for prompt in prompts]
        unserved = len(prompts) - len(served)
        return Turn.of(
            prompts,
            [end for end, _ in ends],
            variant=variant,
            rate=rate,
            number=number,
            seconds=max((end for end, _ in served.values()), default=0.0),
            first=[output for _, output in ends],
            errors={"not served in time": unserved} if unserved else {},
            microbatches=microbatches,
            before=sums.imbalance(sums.busiest_before),
            after=sums.imbalance(sums.busiest_after),
            worst_before=sums.worst_before,
            worst_after=max(1.0, sums.worst),
            copies=sums.replicas,
            sent=sum(nbytes),
            experts=sum(map(max, zip(*cpu_seconds, strict=True))) if on_cpu else None,
            disturbed=max(disturbed_shares),
        )

    def _microbatches(
        self, prompts: Sequence[Prompt], texts: dict[int, torch.Tensor], begin: float
    ) -> tuple[dict[int, tuple[float, Any]], int]:
        """End and output of this rank's prompts by number, and the number of microbatches."""
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
        """On rank 0, wait for the next prompts and return their numbers by rank."""
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

    def _select(self, variant: str) -> Sequence[Balancer]:
        """Plan by this variant from now on; return its balancers."""
        balancers = self.model.use(policy_of(variant))
        for balancer in set(balancers) - self._observed:
            balancer.subscribe(self.sums.add)
            if self.model.device.type == "cpu":
                balancer.log.clock = time.process_time
        self._observed.update(balancers)
        for choices in self.model.even_choices:
            choices.on = variant == FORCED or self.routing == "even"
        return balancers


def _preempted_seconds() -> float:
    """Seconds in which this process was runnable but not running; 0 if unknown."""
    try:
        return int(Path("/proc/self/schedstat").read_text("ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def from_first(value: Any) -> Any:
    """Return the value of rank 0; collective."""
    values = [value]
    dist.broadcast_object_list(values, device=CPU)
    return values[0]


# -- variants ------------------------------------------------------------------------------------


def policy_of(variant: str) -> str:
    return "none" if variant == FORCED else variant


def check_variants(variants: Sequence[str]) -> None:
    """Raise if a variant is unknown or cannot run."""
    for variant in variants:
        running_policy(policy_of(variant))


class ForcedChoices:
    """A hook for transformers' experts that replaces the router's choices while it is `on`.

    choose: maps `[T, K]` choices to others; tokens and gates stay.
    """

    def __init__(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.choose, self.on = choose, False

    def __call__(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with other choices; None leaves them unchanged."""
        if not self.on:
            return None
        named = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        named["top_k_index"] = self.choose(named["top_k_index"])
        return (), named


# -- even routing --------------------------------------------------------------------------------


class EvenTurns:
    """The round-robin choices of one rank."""

    def __init__(self, topology: Topology, rank: int) -> None:
        self.turns, self.rank = in_turn(topology), rank

    def chosen(self, ids_TK: torch.Tensor) -> torch.Tensor:
        """[T, K] the choices that replace the router's; each rank has its part of the round."""
        self.turns = self.turns.to(ids_TK)  # once: a later call would wait for the device
        first = self.rank * ids_TK.numel()
        rows = torch.arange(first, first + ids_TK.numel(), device=ids_TK.device) % len(self.turns)
        return self.turns[rows].reshape(ids_TK.shape)


def in_turn(topology: Topology) -> torch.Tensor:
    """Return experts in an order that visits all ranks, and each rank's experts, in turn.

    >>> in_turn(Topology(ranks=2, experts=4)).tolist()
    [0, 2, 1, 3]
    """
    homes = [topology.home_experts(rank) for rank in range(topology.ranks)]
    turns = math.lcm(*(len(experts) for experts in homes))
    table = np.stack([np.resize(experts, turns) for experts in homes], axis=1)
    return torch.from_numpy(table.reshape(-1))
