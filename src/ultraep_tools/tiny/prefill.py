"""Prefill of the tiny model: requests of mixed lengths and subjects, served by the serving engine.

A rank packs the requests of a batch into a single sequence.

Shapes: n requests of this rank, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch

from ultraep.parallel.full_state import moe_layers
from ultraep.runtime.balancer import Balancer
from ultraep_tools.serving.engine import Engine
from ultraep_tools.serving.load import Arrival, Lengths, Prompt, make_prompts, poisson
from ultraep_tools.serving.measure import Turn
from ultraep_tools.tiny.model import TinyMoE
from ultraep_tools.tiny.text import Text


@dataclass(frozen=True, kw_only=True)
class Queue:
    """The requests. `rate` requests arrive per second; 0 means all at once."""

    requests: int = 200
    shortest: int = 8  # tokens of a request
    longest: int = 256
    budget: int = 1024  # tokens of a rank in a batch
    rate: float = 0.0
    period: int = 25  # consecutive requests with the same subject
    warmup: int = 20  # requests that are served untimed first
    rounds: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Answers:
    """The round of median speed under one policy.

    difference: largest difference of the logits to the first policy in any round, relative to the
        largest logit.
    """

    turn: Turn
    difference: float


class ServedTinyMoE:
    """The interface of the model for the engine; outputs are logits."""

    even_choices = ()

    def __init__(self, model: TinyMoE) -> None:
        self.model, self.device = model, model.norm.weight.device
        self._balancer = next(iter(moe_layers(model).values())).balancer  # all layers share it

    def use(self, policy: str) -> list[Balancer]:
        self._balancer.config = replace(self._balancer.config, policy=policy)
        return [self._balancer]

    def encode(self, prompt: Prompt) -> torch.Tensor:
        return torch.frombuffer(bytearray(prompt.text), dtype=torch.uint8).long()

    def first_outputs(self, texts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[V] for every text: the logits of its first new token."""
        return list(first_logits(self.model, texts))


def make_requests(text: Text, queue: Queue) -> list[Prompt]:
    lengths = Lengths(shortest=queue.shortest, longest=queue.longest, burst=queue.period)
    arrivals = [Arrival(0.0)] * queue.requests
    if queue.rate:
        arrivals = list(islice(poisson(queue.rate, [queue.seed]), queue.requests))
    texts = dict(zip(text.names, (bytes(part.tolist()) for part in text.held_out), strict=True))
    return make_prompts(arrivals, lengths, [queue.seed], 1, texts)


@torch.no_grad()
def first_logits(model: TinyMoE, texts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[n, V] logits on the host. The call is collective, also for a rank without texts."""
    device = model.norm.weight.device
    packed = torch.cat([torch.empty(0, dtype=torch.int64), *texts])
    positions = torch.cat([packed[:0], *(torch.arange(len(text)) for text in texts)])
    ends = torch.tensor([len(text) for text in texts], dtype=torch.int64).cumsum(0) - 1
    logits: torch.Tensor = model(packed[None].to(device), positions[None].to(device))
    return logits[0, ends.to(device)].cpu()


def answer(
    model: TinyMoE,
    requests: Sequence[Prompt],
    queue: Queue,
    policies: Sequence[str],
    report: Callable[[str, int, Turn], None] = lambda *_: None,
) -> dict[str, Answers]:
    """Serve the requests under every policy, with the same weights, in turns.

    report: called after every round with the policy, the number of the round, and the round.
    """
    engine = Engine(ServedTinyMoE(model), budget=queue.budget, grace=math.inf)
    rate = queue.rate or math.inf
    for policy in policies:
        engine.serve(requests[: max(1, queue.warmup)], policy, rate, 0)
    rounds: dict[str, list[Turn]] = {policy: [] for policy in policies}
    for number in range(queue.rounds):
        for policy in policies:
            rounds[policy].append(engine.serve(requests, policy, rate, number))
            report(policy, number + 1, rounds[policy][-1])
    first = torch.stack(rounds[policies[0]][0].first)
    answers = {}
    for policy, turns in rounds.items():
        median = sorted(turns, key=lambda turn: turn.seconds)[len(turns) // 2]
        off = max((torch.stack(turn.first) - first).abs().max().item() for turn in turns)
        answers[policy] = Answers(median, off / first.abs().max().item())
    return answers
