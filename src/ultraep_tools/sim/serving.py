"""Serving: requests arrive, wait, and are prefilled in chunks.

Attention is data parallel: every request belongs to one rank, round robin. An iteration takes up
to `tokens` tokens from the queue of every rank, and all ranks go through the layers together.
Attention takes as long as on the rank with the most work; the experts follow the loads of the
iteration. The result is the request rate at which the mean time to first token reaches its limit.

Shapes: S iterations, R ranks, N requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ultraep.errors import ConfigError
from ultraep_tools.sim.costs import Costs, FloatArray
from ultraep_tools.sim.layer import LayerTimes
from ultraep_tools.sim.model import ROW_BYTES, WEIGHT_BYTES, Model
from ultraep_tools.sim.presets import check_positive, check_range, load_record
from ultraep_tools.sim.training import STORED_WIDTHS

MAX_PROMPT = 131_072  # tokens
MAX_LIMIT_S = 3600.0
MAX_SPREAD = 8.0  # standard deviation of the logarithm of lengths
HALVINGS = 14
RUN_LIMITS = 20  # length of a run, in limits of the time to first token
FIXED_STAGES = ("loads", "plan", "replicate", "reroute")  # do not shrink with a partial chunk


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Prompts of log-normal length, and the limit of the mean time to first token."""

    name: str
    title: str
    mean_tokens: float
    spread: float
    limit_s: float

    def __post_init__(self) -> None:
        where = f"requests {self.name}: "
        check_positive(self, "mean_tokens limit_s", where)
        check_range(self, "spread", 0, MAX_SPREAD, where)
        check_range(self, "limit_s", 0, MAX_LIMIT_S, where)

    def lengths(self, count: int, rng: np.random.Generator) -> FloatArray:
        """[N] tokens of each prompt."""
        centre = np.log(self.mean_tokens) - self.spread**2 / 2
        lengths = np.rint(np.exp(rng.normal(centre, self.spread, count)))
        return np.clip(lengths, 1, MAX_PROMPT)


def load_requests(name: str) -> Requests:
    return load_record(Requests, "requests", name)


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A prefill job."""

    requests: Requests
    tokens: int = 8192  # chunk: most tokens per rank and iteration
    iterations: int = 64  # iterations with different loads; then the loads repeat
    seed: int = 0

    name: ClassVar[str] = "prefill"
    unit: ClassVar[str] = "iteration"
    units: ClassVar[str] = "iterations"
    throughput_unit: ClassVar[str] = "requests/s"
    trains: ClassVar[bool] = False
    pipeline: ClassVar[int] = 1
    groups: ClassVar[int] = 1
    context: ClassVar[float] = 0.0
    recompute: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_range(self, "tokens iterations", 1)

    @property
    def simulated(self) -> int:
        """Iterations with loads of their own."""
        return self.iterations

    def weight_bytes(self, model: Model, ranks: int) -> float:
        """Return the bytes of weights per device."""
        return WEIGHT_BYTES * (model.all_expert_weights / ranks + model.plain_weights)

    def activation_bytes(self, model: Model) -> float:
        """Return the bytes per device of the activations of one layer."""
        return ROW_BYTES * self.tokens * model.width * STORED_WIDTHS

    def plain_seconds(self, costs: Costs, ranks: int) -> float:  # noqa: ARG002
        """Return the seconds per iteration that `LayerTimes` leaves out."""
        model, tokens = costs.model, self.tokens
        attention = costs.attention(tokens, self.requests.mean_tokens / 2)
        core = attention - costs.attention(tokens, 0.0)
        return model.moe_layers * core + model.dense_layers * (attention + costs.dense_mlp(tokens))

    def throughput(
        self, costs: Costs, ranks: int, layers: Sequence[LayerTimes]
    ) -> tuple[float, float]:
        """Return requests/s, and tokens/s per device."""
        experts_S = np.sum([t.forward_seconds - t.forward["attention"] for t in layers], axis=0)
        fixed_S = np.sum([t.forward[name] for t in layers for name in FIXED_STAGES], axis=0)
        iteration = make_iteration(costs, self, experts_S - fixed_S, float(fixed_S.mean()))
        rate = rate_at_limit(iteration, self, ranks)
        return rate, rate * self.requests.mean_tokens / ranks


@dataclass(frozen=True)
class Iteration:
    """The costs of an iteration, for all layers together."""

    fixed: float  # seconds, whatever the number of tokens
    experts: FloatArray  # [S] seconds of rows and experts with full chunks
    per_token: float  # seconds per token of a rank for everything else
    per_pair: float  # seconds per pair of tokens in attention
    chunk: int

    def seconds(self, number: int, tokens_R: FloatArray, pairs_R: FloatArray) -> float:
        """Return the seconds of an iteration, given each rank's tokens and attention pairs."""
        attention = float((self.per_token * tokens_R + self.per_pair * pairs_R).max())
        filled = float(tokens_R.mean()) / self.chunk
        return self.fixed + attention + filled * float(self.experts[number % len(self.experts)])


def make_iteration(
    costs: Costs, serving: Serving, experts_S: FloatArray, fixed: float
) -> Iteration:
    """Return the costs of an iteration, given the seconds of the layers with experts."""
    model, tokens = costs.model, serving.tokens
    no_context = costs.attention(tokens, 0.0)
    dense = model.dense_layers * costs.dense_mlp(tokens)
    per_token = (model.layers * no_context + dense) / tokens
    # With windowed attention the cost is not linear in the context: use the mean prompt.
    context = serving.requests.mean_tokens / 2
    core = costs.attention(tokens, context) - no_context
    return Iteration(fixed, experts_S, per_token, model.layers * core / (tokens * context), tokens)


def rate_at_limit(iteration: Iteration, serving: Serving, ranks: int) -> float:
    """Return the requests per second at which the mean time to first token meets its limit."""
    requests = serving.requests
    tokens_R = np.full(ranks, float(serving.tokens))
    full = iteration.seconds(0, tokens_R, tokens_R * requests.mean_tokens / 2)
    low, high = 0.0, 2 * ranks * serving.tokens / full / requests.mean_tokens
    for _ in range(HALVINGS):
        rate = (low + high) / 2
        mean = mean_first_token(iteration, *draw_requests(serving, rate), ranks)
        low, high = (rate, high) if mean <= requests.limit_s else (low, rate)
    if not low:
        raise ConfigError(
            "no request rate keeps the mean time to first token below the limit of the requests; "
            "raise their limit_s or use more ranks"
        )
    return low


def draw_requests(serving: Serving, rate: float) -> tuple[FloatArray, FloatArray]:
    """[N] arrivals and lengths of a run. All rates have the same prompts and relative gaps."""
    count = max(int(rate * RUN_LIMITS * serving.requests.limit_s), 1)
    gaps_N = np.random.default_rng([serving.seed, 7]).standard_exponential(count)
    lengths_N = serving.requests.lengths(count, np.random.default_rng([serving.seed, 8]))
    return np.cumsum(gaps_N) / rate, lengths_N


def mean_first_token(
    iteration: Iteration, arrivals_N: FloatArray, lengths_N: FloatArray, ranks: int
) -> float:
    """Return the mean seconds from the arrival of a request to the end of its prefill."""
    queues: list[deque[int]] = [deque() for _ in range(ranks)]
    done_N, prefilled_N = np.zeros(len(arrivals_N)), np.zeros(len(arrivals_N))
    arrived, finished, number, clock = 0, 0, 0, 0.0
    while finished < len(arrivals_N):
        if not any(queues):
            clock = max(clock, float(arrivals_N[arrived]))
        while arrived < len(arrivals_N) and arrivals_N[arrived] <= clock:
            queues[arrived % ranks].append(arrived)
            arrived += 1
        tokens_R, pairs_R, ended = _take(queues, prefilled_N, lengths_N, iteration.chunk)
        clock += iteration.seconds(number, tokens_R, pairs_R)
        number += 1
        done_N[ended] = clock
        finished += len(ended)
    return float((done_N - arrivals_N).mean())


def _take(
    queues: list[deque[int]], prefilled_N: FloatArray, lengths_N: FloatArray, chunk: int
) -> tuple[FloatArray, FloatArray, list[int]]:
    """Take up to a chunk from every queue: [R] tokens, [R] pairs, and the finished requests."""
    tokens_R, pairs_R = np.zeros(len(queues)), np.zeros(len(queues))
    ended: list[int] = []
    for rank, queue in enumerate(queues):
        while queue and tokens_R[rank] < chunk:
            request = queue[0]
            before = prefilled_N[request]
            taken = min(chunk - tokens_R[rank], lengths_N[request] - before)
            tokens_R[rank] += taken
            pairs_R[rank] += taken * (before + taken / 2)
            prefilled_N[request] = before + taken
            if prefilled_N[request] >= lengths_N[request]:
                ended.append(queue.popleft())
    return tokens_R, pairs_R, ended
