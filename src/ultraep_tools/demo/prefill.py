"""Prefill: one rank that serves prompts as they arrive, microbatch after microbatch.

Rank 0 has the clock. When a microbatch is done, rank 0 takes the prompts that have arrived, sends
all ranks the assignment of prompts to ranks, and all ranks run the model. The time to first token
is wall-clock time, from the arrival of a prompt to its token on its rank. The clocks of all ranks
start at a barrier.

Shapes: n prompts of this rank, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from ultraep.runtime.balancer import Balancer
from ultraep_tools.demo.model import TinyMoE
from ultraep_tools.demo.text import MAIN


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt. arrival: seconds after the start.   ids: [T] its tokens, which are bytes."""

    number: int
    arrival: float
    ids: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Range of prompt lengths in tokens. burst: prompts until the subject changes."""

    shortest: int
    longest: int
    burst: int

    @property
    def mean(self) -> float:
        """Mean length of a prompt.

        >>> round(Lengths(shortest=16, longest=256, burst=12).mean)
        87
        """
        low, high = self.shortest, self.longest + 1
        return (high - low) / math.log(high / low)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """All prompts, served once under one policy. Lists have an entry for every prompt.

    waited: seconds from the arrival to the first token.   first: the first tokens.
    seconds: until the last first token.
    before, after: mean imbalance of layers and microbatches; None without a balancer.
    """

    waited: list[float]
    tokens: list[int]
    first: list[int]
    seconds: float
    before: float | None
    after: float | None

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / self.seconds


class ServedModel(Protocol):
    """A model in the engine."""

    def use(self, policy: str) -> Sequence[Balancer]:
        """Plan by this policy from now on; return the balancers. Collective."""

    def first_tokens(self, texts: Sequence[torch.Tensor]) -> list[int]:
        """The first new token of every text. Collective."""


class Engine:
    """The model on this rank. budget: max tokens per rank in a microbatch."""

    def __init__(self, model: ServedModel, budget: int) -> None:
        self.model, self.budget = model, budget
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def serve(self, prompts: Sequence[Prompt], policy: str) -> Turn:
        """Serve the prompts under a policy; returns the same result on all ranks."""
        balancers = self.model.use(policy)
        for balancer in balancers:
            balancer.reset_stats()
        dist.barrier()
        by_rank: list[Any] = [None] * self.ranks
        dist.all_gather_object(by_rank, self._serve_own(prompts))
        served = {number: result for part in by_rank for number, result in part.items()}
        ends = [served[prompt.number][0] for prompt in prompts]
        stats = [balancer.stats() for balancer in balancers]
        return Turn(
            waited=[end - prompt.arrival for prompt, end in zip(prompts, ends, strict=True)],
            tokens=[len(prompt.ids) for prompt in prompts],
            first=[served[prompt.number][1] for prompt in prompts],
            seconds=max(ends),
            before=fmean(own["imbalance_before"] for own in stats) if stats else None,
            after=fmean(own["imbalance_after"] for own in stats) if stats else None,
        )

    def _serve_own(self, prompts: Sequence[Prompt]) -> dict[int, tuple[float, int]]:
        """Return the end and the first token of this rank's prompts, by number."""
        waiting, begin = list(prompts), time.monotonic()
        served: dict[int, tuple[float, int]] = {}
        while waiting:
            batch: list[list[int]] = from_first(self._next(waiting, begin))
            texts = {prompt.number: prompt.ids for prompt in waiting[: sum(map(len, batch))]}
            mine = batch[self.rank]
            first = self.model.first_tokens([texts[number] for number in mine])
            end = time.monotonic() - begin
            served |= {number: (end, token) for number, token in zip(mine, first, strict=True)}
            del waiting[: len(texts)]
        return served

    def _next(self, waiting: Sequence[Prompt], begin: float) -> list[list[int]]:
        """On rank 0, wait for the next prompts and return their numbers by rank."""
        if self.rank:
            return []
        time.sleep(max(0.0, begin + waiting[0].arrival - time.monotonic()))
        now = time.monotonic() - begin
        arrived = [prompt for prompt in waiting if prompt.arrival <= now] or waiting[:1]
        batch = next_microbatch(arrived, self.ranks, self.budget)
        return [[prompt.number for prompt in part] for part in batch]


def next_microbatch(waiting: Sequence[Prompt], ranks: int, budget: int) -> list[list[Prompt]]:
    """Take the first prompts that fit, in order, each on the rank with the fewest tokens.

    budget: max tokens per rank. A longer prompt is served alone on its rank.
    """
    batch: list[list[Prompt]] = [[] for _ in range(ranks)]
    used = [0] * ranks
    for prompt in waiting:
        rank = used.index(min(used))
        if used[rank] and used[rank] + len(prompt.ids) > budget:
            break
        batch[rank].append(prompt)
        used[rank] += len(prompt.ids)
    return batch


def make_prompts(
    arrivals: Sequence[float], lengths: Lengths, seed: Sequence[int], texts: Mapping[str, Any]
) -> list[Prompt]:
    """Make a prompt for every arrival; the same seed gives the same prompts.

    Lengths are uniform in the logarithm. Most prompts of a burst have the same subject.
    texts: a tensor of bytes for every subject.
    """
    rng, subjects = np.random.default_rng(list(seed)), list(texts)
    low, high = np.log([lengths.shortest, lengths.longest + 1])
    prompts = []
    for number, arrival in enumerate(arrivals):
        tokens = min(int(np.exp(rng.uniform(low, high))), lengths.longest)
        main = subjects[number // lengths.burst % len(subjects)]
        text = texts[main if rng.random() < MAIN else str(rng.choice(subjects))]
        begin = int(rng.integers(len(text) - tokens + 1))
        prompts.append(Prompt(number, arrival, text[begin : begin + tokens].long()))
    return prompts


def from_first(value: Any) -> Any:
    """Return the value of rank 0; collective."""
    values = [value]
    dist.broadcast_object_list(values, device=torch.device("cpu"))
    return values[0]


def packed(texts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return all texts as one sequence, the position of every token, and the end of every text."""
    empty = torch.empty(0, dtype=torch.int64)
    positions = torch.cat([empty, *(torch.arange(len(text)) for text in texts)])
    ends = torch.tensor([len(text) for text in texts], dtype=torch.int64).cumsum(0) - 1
    return torch.cat([empty, *texts])[None], positions[None], ends


# -- the model of the demo -----------------------------------------------------------------------


class ServedTinyMoE:
    """The model of the demo."""

    def __init__(self, model: TinyMoE) -> None:
        self.model, self._balancer = model, model.layers[0].balancer  # all layers share it

    def use(self, policy: str) -> list[Balancer]:
        self._balancer.config = replace(self._balancer.config, policy=policy)
        return [self._balancer]

    @torch.inference_mode()
    def first_tokens(self, texts: Sequence[torch.Tensor]) -> list[int]:
        tokens, positions, ends = packed(texts)
        first: list[int] = self.model(tokens, positions)[0, ends].argmax(dim=-1).tolist()
        return first


def answer(
    model: TinyMoE,
    prompts: Sequence[Prompt],
    policies: Sequence[str],
    *,
    budget: int,
    rounds: int,
    report: Callable[[str, int, Turn], None],
) -> dict[str, Turn]:
    """Serve the prompts under every policy, in turns; return the turn of median speed of each.

    report: called after every turn with the policy, the number of the round, and the turn.
    """
    engine = Engine(ServedTinyMoE(model), budget)
    for policy in policies:
        engine.serve(prompts[: max(1, len(prompts) // 8)], policy)  # warms up
    turns: dict[str, list[Turn]] = {policy: [] for policy in policies}
    for number in range(rounds):
        for policy in policies:
            turns[policy].append(engine.serve(prompts, policy))
            report(policy, number + 1, turns[policy][-1])
    return {
        policy: sorted(served, key=lambda turn: turn.seconds)[rounds // 2]
        for policy, served in turns.items()
    }
