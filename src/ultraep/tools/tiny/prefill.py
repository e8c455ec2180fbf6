"""Prefill: requests of mixed lengths and subjects, and the time to their first new token.

Requests wait in one queue. A batch takes them in order, each to the rank with the fewest tokens,
until the token budget of a rank is used up; on a rank they stand one after the other in a single
sequence. Time is that of a queue: a batch starts when the one before it is finished and its first
request has arrived, and lasts as long as it was measured to.

Shapes: N requests, n requests of this rank, T tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ultraep.parallel.full_state import moe_layers
from ultraep.plan import Plan
from ultraep.tools.tiny.model import VOCABULARY, TinyMoE
from ultraep.tools.tiny.text import Text


@dataclass(frozen=True, kw_only=True)
class Queue:
    """What is asked for. `rate` requests arrive in a second; 0: all at once."""

    requests: int = 200
    shortest: int = 8  # tokens of a request
    longest: int = 256
    budget: int = 1024  # tokens of a rank in a batch
    rate: float = 0.0
    period: int = 25  # requests until the subject changes
    warmup: int = 20  # requests that are served before, untimed
    rounds: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """A text to continue, and when it was sent, in seconds."""

    number: int
    arrival: float
    tokens: torch.Tensor  # [T]


@dataclass(frozen=True, slots=True)
class Served:
    """What became of all requests; alike on all ranks."""

    logits: torch.Tensor  # [N, V] of the first new token
    waited: list[float]  # [N] seconds until it
    batches: list[float]  # seconds that each took
    plans: list[Plan]


@dataclass(frozen=True, slots=True)
class Answers:
    """The round of median speed under one policy, and what differs from the first policy."""

    policy: str
    served: Served
    difference: float  # largest of all rounds, relative to the largest logit
    stats: list[dict[str, Any]]  # of the balancers of all ranks


def make_requests(text: Text, queue: Queue) -> list[Request]:
    """Lengths spread evenly in their logarithm; subjects come in bursts."""
    rng, count = np.random.default_rng(queue.seed), queue.requests
    low, high = np.log([queue.shortest, queue.longest + 1])
    lengths = np.exp(rng.uniform(low, high, count)).astype(int).clip(max=queue.longest)
    gaps = rng.exponential(1 / queue.rate, count) if queue.rate else np.zeros(count)
    requests = []
    for number, (length, arrival) in enumerate(zip(lengths, gaps.cumsum(), strict=True)):
        subject = text.shifting(rng, number, 1, queue.period)
        tokens = text.sequences(rng, subject, int(length), held_out=True)[0]
        requests.append(Request(number, float(arrival), tokens))
    return requests


def next_batch(waiting: Sequence[Request], ranks: int, budget: int) -> list[list[Request]]:
    """The first requests in the queue that fit, by the rank that serves them."""
    batch: list[list[Request]] = [[] for _ in range(ranks)]
    used = [0] * ranks
    for request in waiting:
        rank = used.index(min(used))
        if used[rank] + len(request.tokens) > budget:
            break
        batch[rank].append(request)
        used[rank] += len(request.tokens)
    return batch


@torch.no_grad()
def first_logits(model: TinyMoE, mine: Sequence[Request], policy: str) -> torch.Tensor:
    """[n, V] of this rank's requests, on the host. A rank without any takes part with no tokens."""
    device = model.norm.weight.device
    texts = [request.tokens for request in mine] or [torch.empty(0, dtype=torch.int64)]
    positions = torch.cat([torch.arange(len(text)) for text in texts]).to(device)
    ends = torch.tensor([len(text) for text in texts]).cumsum(0)[: len(mine)] - 1
    logits: torch.Tensor = model(torch.cat(texts)[None].to(device), positions[None], policy)
    return logits[0, ends.to(device)].cpu()


def serve(model: TinyMoE, requests: Sequence[Request], policy: str, budget: int) -> Served:
    """Serve all requests, batch after batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    logits = torch.zeros(len(requests), VOCABULARY, dtype=model.norm.weight.dtype)
    waited, plans = [0.0] * len(requests), []
    clock, batches = 0.0, []
    queue = list(requests)
    while queue:
        clock = max(clock, queue[0].arrival)
        batch = next_batch([r for r in queue if r.arrival <= clock], ranks, budget)
        dist.barrier()
        begin = time.perf_counter()
        logits[[r.number for r in batch[rank]]] = first_logits(model, batch[rank], policy)
        lasted = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        dist.all_reduce(lasted, dist.ReduceOp.MAX)
        batches.append(lasted.item())
        clock += lasted.item()
        plans += model.last_plans()
        taken = [request for part in batch for request in part]
        for request in taken:
            waited[request.number] = clock - request.arrival
        queue = queue[len(taken) :]
    dist.all_reduce(logits)  # every rank had its own rows, and zeros elsewhere
    return Served(logits, waited, batches, plans)


def answer(
    model: TinyMoE,
    requests: Sequence[Request],
    queue: Queue,
    policies: Sequence[str],
    tell: Callable[[str, int, Served], None] = lambda *_: None,
) -> list[Answers]:
    """Serve the requests under every policy, with the same weights, in turns.

    tell: called after every round of a policy, with its name and the number of the round.
    """
    balancer = next(iter(moe_layers(model).values())).balancer
    for policy in policies:
        serve(model, requests[: queue.warmup], policy, queue.budget)
    rounds: dict[str, list[tuple[Served, list[dict[str, Any]]]]] = {name: [] for name in policies}
    for number in range(queue.rounds):
        for policy in policies:
            balancer.reset_stats()
            with balancer.unchanged_weights():  # it ends: no copies for the next policy
                served = serve(model, requests, policy, queue.budget)
            rounds[policy].append((served, balancer.comm.gather_objects(balancer.stats())))
            tell(policy, number + 1, served)
    first = rounds[policies[0]][0][0].logits
    found = []
    for policy, all_of_it in rounds.items():
        served, stats = sorted(all_of_it, key=lambda r: sum(r[0].batches))[len(all_of_it) // 2]
        off = max((s.logits - first).abs().max().item() for s, _ in all_of_it)
        found.append(Answers(policy, served, off / first.abs().max().item(), stats))
    return found
