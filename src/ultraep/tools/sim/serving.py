"""Serving prefill under the clock: requests arrive, wait, and are prefilled in chunks.

Attention is data parallel over the ranks of the expert-parallel group: every request belongs to
one rank, in turn. An iteration takes up to `chunk` tokens from the queue of every rank, and all
ranks go through the layers together: attention lasts as long as that of the rank with the most
work, the experts as long as the loads of this iteration say. The figure is the rate of requests at
which the mean time to the first token reaches its limit.

Shapes: S iterations, R ranks, N requests.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ultraep.tools.sim.costs import Costs
from ultraep.tools.sim.presets import check_least, check_positive, load_record

FloatArray = NDArray[np.float64]

LONGEST = 131_072  # tokens of a prompt
LONGEST_LIMIT = 3600.0  # seconds to the first token
WIDEST = 8.0  # deviation of the logarithm of lengths
HALVINGS = 14
RUN_LIMITS = 20  # length of a run, in limits of the time to the first token


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Prompts of a log-normal length, and the time that the first token may take."""

    name: str
    title: str
    mean_tokens: float
    spread: float
    limit_s: float

    def __post_init__(self) -> None:
        where = f"requests {self.name}: "
        check_positive(self, "mean_tokens limit_s", where)
        check_least(self, "spread", 0, WIDEST, where)
        check_least(self, "limit_s", 0, LONGEST_LIMIT, where)

    def lengths(self, count: int, rng: np.random.Generator) -> FloatArray:
        """[N] tokens of each prompt."""
        centre = np.log(self.mean_tokens) - self.spread**2 / 2
        drawn = np.rint(np.exp(rng.normal(centre, self.spread, count)))
        return np.clip(drawn, 1, LONGEST)


def load_requests(name: str) -> Requests:
    """Return a preset, or a set of requests of a TOML file."""
    return load_record(Requests, "requests", name)


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How requests are served.

    chunk: most tokens that a rank takes in one iteration.
    """

    requests: Requests
    chunk: int = 8192
    iterations: int = 64  # different loads; they repeat
    seed: int = 0

    name: ClassVar[str] = "prefill"
    unit: ClassVar[str] = "iteration"
    units: ClassVar[str] = "iterations"
    trains: ClassVar[bool] = False
    pipeline: ClassVar[int] = 1
    groups: ClassVar[int] = 1
    context: ClassVar[float] = 0.0
    recompute: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_least(self, "chunk iterations", 1)

    @property
    def simulated(self) -> int:
        """Iterations with loads of their own."""
        return self.iterations

    @property
    def tokens(self) -> int:
        """Tokens of a rank in a full iteration."""
        return self.chunk


@dataclass(frozen=True)
class Iteration:
    """What an iteration costs, for all layers together."""

    fixed: float  # seconds, whatever there is to do
    experts: FloatArray  # [S] seconds of rows and experts with full chunks
    per_token: float  # seconds of a rank's token in everything else
    per_pair: float  # seconds of a token looking at another
    chunk: int

    def seconds(self, number: int, tokens_R: FloatArray, pairs_R: FloatArray) -> float:
        """How long an iteration takes: tokens of each rank, and pairs that attention looks at."""
        plain = float((self.per_token * tokens_R + self.per_pair * pairs_R).max())
        filled = float(tokens_R.mean()) / self.chunk
        return self.fixed + plain + filled * float(self.experts[number % len(self.experts)])


def make_iteration(
    costs: Costs, serving: Serving, experts_S: FloatArray, fixed: float
) -> Iteration:
    """What an iteration costs, from the seconds of the layers with experts."""
    model, tokens = costs.model, serving.chunk
    nothing = costs.attention_forward(tokens, 0.0)
    dense = model.dense_layers * costs.dense_mlp(tokens)
    per_token = (model.layers * nothing + dense) / tokens
    # A window limits what is looked at: take the slope at the mean prompt.
    context = serving.requests.mean_tokens / 2
    looking = costs.attention_forward(tokens, context) - nothing
    per_pair = model.layers * looking / (tokens * context)
    return Iteration(fixed, experts_S, per_token, per_pair, tokens)


def rate_at_limit(iteration: Iteration, serving: Serving, ranks: int) -> float:
    """Requests per second at which the mean time to the first token is at its limit."""
    limit = serving.requests.limit_s
    mean_tokens = serving.requests.mean_tokens
    tokens_R = np.full(ranks, float(serving.chunk))
    full = iteration.seconds(0, tokens_R, tokens_R * mean_tokens / 2)
    high = 2 * ranks * serving.chunk / full / mean_tokens
    low = 0.0
    for _ in range(HALVINGS):
        rate = (low + high) / 2
        arrivals_N, lengths_N = _drawn(serving, rate)
        mean = mean_first_token(iteration, arrivals_N, lengths_N, ranks)
        low, high = (rate, high) if mean <= limit else (low, rate)
    return low


def _drawn(serving: Serving, rate: float) -> tuple[FloatArray, FloatArray]:
    """Arrivals and lengths of a run; the same prompts at every rate, closer to each other."""
    rng = np.random.default_rng([serving.seed, 7])
    count = max(int(rate * RUN_LIMITS * serving.requests.limit_s), 1)
    gaps_N = rng.standard_exponential(count)
    lengths_N = serving.requests.lengths(count, np.random.default_rng([serving.seed, 8]))
    return np.cumsum(gaps_N) / rate, lengths_N


def mean_first_token(
    iteration: Iteration, arrivals_N: FloatArray, lengths_N: FloatArray, ranks: int
) -> float:
    """Mean seconds from the arrival of a request to the end of its prefill."""
    queues: list[deque[int]] = [deque() for _ in range(ranks)]
    done_N = np.zeros(len(arrivals_N))
    progress_N = np.zeros(len(arrivals_N))
    arrived, number, clock = 0, 0, 0.0
    finished = 0
    while finished < len(arrivals_N):
        if not any(queues):
            clock = max(clock, float(arrivals_N[arrived]))
        while arrived < len(arrivals_N) and arrivals_N[arrived] <= clock:
            queues[arrived % ranks].append(arrived)
            arrived += 1
        tokens_R, pairs_R, ended = _take(queues, progress_N, lengths_N, iteration.chunk)
        clock += iteration.seconds(number, tokens_R, pairs_R)
        number += 1
        done_N[ended] = clock
        finished += len(ended)
    return float((done_N - arrivals_N).mean())


def _take(
    queues: list[deque[int]], progress_N: FloatArray, lengths_N: FloatArray, chunk: int
) -> tuple[FloatArray, FloatArray, list[int]]:
    """Up to a chunk of every queue: tokens, pairs, and the requests that end with it."""
    tokens_R, pairs_R = np.zeros(len(queues)), np.zeros(len(queues))
    ended: list[int] = []
    for rank, queue in enumerate(queues):
        room = float(chunk)
        while queue and room > 0:
            request = queue[0]
            before = progress_N[request]
            taken = min(room, lengths_N[request] - before)
            tokens_R[rank] += taken
            pairs_R[rank] += taken * (before + taken / 2)
            progress_N[request] = before + taken
            room -= taken
            if progress_N[request] >= lengths_N[request]:
                ended.append(queue.popleft())
    return tokens_R, pairs_R, ended
