"""Seeded loads of one microbatch, `[source rank, expert]`, and sequences of them.

Every generator sets how popular the experts are and then draws real routing: each token chooses
`top_k` different experts, so every source rank routes exactly `tokens * top_k` rows and no expert
gets more than one row of a token.

Shapes: S microbatches, R ranks, E experts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.errors import ConfigError

FloatArray = NDArray[np.float64]
STEEPEST = 32.0  # Zipf exponent that puts everything on the first rank


def uniform(
    ranks: int, experts: int, *, top_k: int = 8, tokens: int = 8192, seed: int = 0
) -> IntArray:
    """[R, E] loads of a router without favourites."""
    _check(ranks, experts, top_k, tokens)
    return _draw(np.ones(experts), ranks, top_k, tokens, _random(seed))


def one_hot(ranks: int, experts: int, *, tokens: int = 8192, expert: int = 0) -> IntArray:
    """[R, E] loads when every token wants one and the same expert."""
    _check(ranks, experts, 1, tokens)
    if not 0 <= expert < experts:
        raise ConfigError(f"expert must lie in 0..{experts - 1}, got {expert}")
    loads_RE = np.zeros((ranks, experts), dtype=np.int64)
    loads_RE[:, expert] = tokens
    return loads_RE


def lognormal(
    ranks: int,
    experts: int,
    *,
    sigma: float = 1.0,
    top_k: int = 8,
    tokens: int = 8192,
    seed: int = 0,
) -> IntArray:
    """[R, E] loads with independent log-normal popularity of the experts."""
    _check(ranks, experts, top_k, tokens)
    if not 0 <= sigma <= 10:
        raise ConfigError(f"sigma must lie between 0 and 10, got {sigma}")
    rng = _random(seed)
    return _draw(np.exp(rng.normal(0.0, sigma, experts)), ranks, top_k, tokens, rng)


def zipf(
    ranks: int,
    experts: int,
    *,
    ratio: float,
    top_k: int = 8,
    tokens: int = 8192,
    shuffled: bool = False,
    inner: float = 4.0,
    seed: int = 0,
) -> IntArray:
    """[R, E] loads that follow a Zipf law over ranks, fitted to a wanted imbalance.

    ratio: fullest rank over mean rank, before the experts are shuffled.
    inner: exponent of a second Zipf law, over the experts of one rank.
    shuffled: deal the experts out to the ranks at random; hot ones can then meet on one rank.
    """
    _check(ranks, experts, top_k, tokens)
    if experts % ranks:
        raise ConfigError(f"{experts} experts do not divide evenly over {ranks} ranks")
    inside = np.arange(1, experts // ranks + 1) ** -float(inner)

    def popularity(exponent: float) -> FloatArray:
        return np.outer(np.arange(1, ranks + 1) ** -exponent, inside).reshape(-1)

    def imbalance(exponent: float) -> float:
        chances = _chances(popularity(exponent), top_k).reshape(ranks, -1).sum(axis=1)
        return float(chances.max() / chances.mean())

    if not imbalance(0.0) <= ratio <= imbalance(STEEPEST):
        raise ConfigError(
            f"ratio must lie between {imbalance(0.0):.3g} and {imbalance(STEEPEST):.3g} "
            f"for {ranks} ranks, {experts} experts and top-{top_k}, got {ratio}"
        )
    low, high = 0.0, STEEPEST
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if imbalance(middle) < ratio else (low, middle)
    rng = _random(seed)
    wanted = popularity(high)
    return _draw(rng.permutation(wanted) if shuffled else wanted, ranks, top_k, tokens, rng)


def topic_shift(
    ranks: int,
    experts: int,
    *,
    steps: int,
    topics: int = 3,
    blend: float = 0.1,
    sigma: float = 1.0,
    top_k: int = 8,
    tokens: int = 8192,
    seed: int = 0,
) -> IntArray:
    """[S, R, E] loads of a run whose text moves from topic to topic.

    Every topic has its own log-normal popularity and lasts `steps / topics` microbatches; over the
    share `blend` of that time it fades into the next. Within a topic popularity wanders a little.
    """
    _check(ranks, experts, top_k, tokens)
    if steps < 1 or topics < 1:
        raise ConfigError(f"steps and topics must be at least 1, got {steps} and {topics}")
    if not 0 <= blend <= 1 or not 0 <= sigma <= 10:
        raise ConfigError(f"need blend in 0..1 and sigma in 0..10, got {blend} and {sigma}")
    rng = _random(seed)
    profiles = rng.normal(0.0, sigma, (topics + 1, experts))
    wander = np.zeros(experts)
    matrices = []
    for step in range(steps):
        position = step * topics / steps
        topic = int(position)
        faded = max(0.0, (position - topic - (1 - blend)) / blend) if blend else 0.0
        faded = 0.0 if topic == topics - 1 else faded
        wander = 0.9 * wander + rng.normal(0.0, 0.05 * sigma, experts)
        logits = (1 - faded) * profiles[topic] + faded * profiles[topic + 1] + wander
        matrices.append(_draw(np.exp(logits), ranks, top_k, tokens, rng))
    return np.stack(matrices)


def _draw(
    popularity: FloatArray, ranks: int, top_k: int, tokens: int, rng: np.random.Generator
) -> IntArray:
    """[R, E] counts of systematic sampling.

    The chances of all experts stand in a row of length `top_k`. A token is a comb of `top_k` teeth
    at distance one with a random start, so it hits every expert at most once, and as often as its
    chance says. Only the starts below each boundary need to be counted.
    """
    ends = np.cumsum(_chances(popularity, top_k))
    ends[-1] = top_k
    whole = np.floor(ends).astype(np.int64)
    rows = []
    for _ in range(ranks):
        starts = np.sort(rng.random(tokens))
        hits = whole * tokens + np.searchsorted(starts, ends - whole)
        rows.append(np.diff(hits, prepend=0))
    return np.stack(rows)


def _chances(popularity: FloatArray, top_k: int) -> FloatArray:
    """[E] chance that a token chooses an expert: proportional to its popularity, at most one."""
    certain = np.zeros(len(popularity), dtype=bool)
    while True:
        rest = np.where(certain, 0.0, popularity)
        chances = np.where(certain, 1.0, rest * (top_k - certain.sum()) / (rest.sum() or 1.0))
        if not (chances > 1.0).any():
            return chances
        certain |= chances >= 1.0


def _random(seed: int) -> np.random.Generator:
    if seed < 0:
        raise ConfigError(f"seed must not be negative, got {seed}")
    return np.random.default_rng(seed)


def _check(ranks: int, experts: int, top_k: int, tokens: int) -> None:
    if ranks < 1 or experts < 1 or tokens < 0:
        raise ConfigError(f"need ranks, experts >= 1, tokens >= 0: {ranks}, {experts}, {tokens}")
    if not 1 <= top_k <= experts:
        raise ConfigError(f"top_k must lie between 1 and {experts} experts, got {top_k}")
