"""Seeded generators of load matrices `[source rank, expert]`, and the loads that have names.

Every generator sets the popularity of the experts, then draws routing: each token chooses `top_k`
different experts. So every source rank routes exactly `tokens * top_k` rows, and no expert gets
more than one row of a token.

Shapes: S microbatches, R ranks, E experts, T tokens of a rank, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.errors import ConfigError
from ultraep.loads import MAX_TOTAL
from ultraep.workload.files import MOST_NUMBERS

FloatArray = NDArray[np.float64]
MOST_UNEVEN = 32.0  # a Zipf exponent that puts everything on the first rank


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
    """[R, E] loads that follow a Zipf law over ranks, fitted to an imbalance.

    ratio: busiest rank over mean rank, before shuffling.
    inner: exponent of a second Zipf law, over the experts of one rank.
    shuffled: assign the experts to ranks at random, so that several hot ones can share a rank.
    """
    rng = check(ranks, experts, top_k, tokens, seed)
    check_even_homes(ranks, experts)
    popularity = zipf_popularity(ranks, experts, inner)
    fitted = fit(popularity, ratio, ranks, top_k)
    return draw(rng.permutation(fitted) if shuffled else fitted, ranks, top_k, tokens, rng)


def zipf_popularity(ranks: int, experts: int, inner: float = 4.0) -> Callable[[float], FloatArray]:
    """Return [E] popularity as a function of the exponent of a Zipf law over ranks."""
    inside = np.arange(1, experts // ranks + 1) ** -float(inner)
    return lambda exponent: np.outer(np.arange(1, ranks + 1) ** -exponent, inside).reshape(-1)


def fit(
    popularity: Callable[[float], FloatArray], imbalance: float, ranks: int, top_k: int
) -> FloatArray:
    """[E] popularity whose expected imbalance is this one.

    popularity: function of a strength between 0 and `MOST_UNEVEN`.
    """

    def expected(strength: float) -> float:
        return expected_imbalance(popularity(strength), ranks, top_k)

    low, high = 0.0, MOST_UNEVEN
    if not expected(low) <= imbalance <= expected(high):
        experts = len(popularity(0.0))
        raise ConfigError(
            f"the imbalance must lie between {expected(low):.3g} and {expected(high):.3g} "
            f"for {ranks} ranks, {experts} experts and top-{top_k}, got {imbalance}"
        )
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle) < imbalance else (low, middle)
    return popularity(high)


def expected_imbalance(popularity: FloatArray, ranks: int, top_k: int) -> float:
    chances = _chances(popularity, top_k).reshape(ranks, -1).sum(axis=1)
    return float(chances.max() / chances.mean())


def draw(
    popularity: FloatArray, ranks: int, top_k: int, tokens: int, rng: np.random.Generator
) -> IntArray:
    """[R, E] counts of systematic sampling.

    The chances of all experts form a line of length `top_k`. A token samples it at `top_k` points
    at distance one from a random start, so it hits every expert at most once, with the expert's
    chance. Only the starts below each boundary need to be counted.
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


def check(ranks: int, experts: int, top_k: int, tokens: int, seed: int = 0) -> np.random.Generator:
    """Check the sizes and return a random generator."""
    if ranks < 1 or experts < 1 or tokens < 0:
        raise ConfigError(
            f"ranks and experts must be at least 1, tokens at least 0, got {ranks}, {experts} and "
            f"{tokens}"
        )
    if not 1 <= top_k <= experts:
        raise ConfigError(f"top_k must lie between 1 and {experts} experts, got {top_k}")
    if ranks * experts > MOST_NUMBERS or ranks * tokens * top_k > MAX_TOTAL:
        raise ConfigError(
            f"loads have at most {MOST_NUMBERS:,} numbers and {MAX_TOTAL:,} rows, got {ranks} ranks"
            f" of {experts} experts with {tokens} tokens each"
        )
    if seed < 0:
        raise ConfigError(f"seed must not be negative, got {seed}")
    return np.random.default_rng(seed)


def check_even_homes(ranks: int, experts: int) -> None:
    """Raise unless all ranks have the same number of experts."""
    if experts % ranks:
        raise ConfigError(
            f"{experts} experts do not divide evenly over {ranks} ranks; choose a number of "
            f"ranks that divides {experts}"
        )


# -- named loads, one list for all benchmarks ------------------------------------------------------

FIXED = {
    "even": "every expert gets the same number of rows",
    "random even": "all experts are equally popular, as with forced balance",
    "adversarial": "one expert gets half of all rows, or a row of every token if top_k exceeds 2",
}
SWEPT = {
    "hot rank": "all experts of the first rank are equally hot",
    "1 hot": "the first expert is hot",
    "2 hot": "the first two experts are hot",
    "4 hot": "the first four experts are hot",
    "8 hot": "the first eight experts are hot",
    "zipf ordered": "a Zipf law over ranks, and one over the experts of each rank",
    "zipf shuffled": "a Zipf law over all experts, in random order",
    "log-normal": "independent log-normal popularity, which fits recorded loads best",
}
ORDERS = 1000  # of experts in random kinds that are tried before an imbalance is out of reach
KINDS = FIXED | SWEPT
IMBALANCES = (1.25, 1.5, 2.0, 3.0, 4.0, 7.0)  # beside 1, of the even loads


@dataclass(frozen=True, slots=True)
class Load:
    """A named load.

    kind: one of `KINDS`.
    imbalance: expected load of the busiest rank over the mean. Kinds of `FIXED` have no choice; for
    the others, None is the most uneven load of the kind.
    """

    kind: str
    imbalance: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"unknown load {self.kind!r}; choose from {', '.join(KINDS)}")
        if self.kind in FIXED and self.imbalance is not None:
            raise ConfigError(f"the load {self.kind!r} has one imbalance, got {self.imbalance}")

    @property
    def name(self) -> str:
        return self.kind if self.imbalance is None else f"{self.kind} {self.imbalance:g}"

    def draw(
        self, ranks: int, experts: int, *, top_k: int = 8, tokens: int = 8192, seed: int = 0
    ) -> IntArray:
        """[R, E] rows of one microbatch, with `tokens` tokens per rank."""
        rng = check(ranks, experts, top_k, tokens, seed)
        check_even_homes(ranks, experts)
        if self.kind == "even":
            ends = np.arange(ranks + 1)[:, None] * tokens * top_k
            return np.diff(-((np.arange(experts) - ends) // experts), axis=0)
        popularity = _popularity(self.kind, ranks, experts, rng)
        if self.imbalance is None:
            return draw(popularity(MOST_UNEVEN), ranks, top_k, tokens, rng)
        for _ in range(ORDERS):
            if self.imbalance <= expected_imbalance(popularity(MOST_UNEVEN), ranks, top_k):
                break
            popularity = _popularity(self.kind, ranks, experts, rng)
        return draw(fit(popularity, self.imbalance, ranks, top_k), ranks, top_k, tokens, rng)


def sweep(
    ranks: int,
    experts: int,
    *,
    top_k: int = 8,
    kinds: Collection[str] = tuple(KINDS),
    imbalances: Sequence[float] = IMBALANCES,
) -> list[Load]:
    """Return the loads of these kinds, the swept ones at every imbalance that they can reach."""
    loads = [Load(kind) for kind in FIXED if kind in kinds]
    for load in (Load(kind, x) for x in imbalances for kind in SWEPT if kind in kinds):
        with suppress(ConfigError):
            load.draw(ranks, experts, top_k=top_k, tokens=1)
            loads.append(load)
    return loads


def _popularity(
    kind: str, ranks: int, experts: int, rng: np.random.Generator
) -> Callable[[float], FloatArray]:
    """Return [E] popularity as a function of its strength; at 0 all ranks are equally popular."""
    if kind == "random even":
        return lambda _: np.ones(experts)
    if kind == "adversarial":
        return lambda _: np.concatenate([[max(experts - 1.0, 1.0)], np.ones(experts - 1)])
    if kind == "zipf ordered":
        return zipf_popularity(ranks, experts)
    if kind == "zipf shuffled":
        logs = -np.log(1 + rng.permutation(experts))
    elif kind == "log-normal":
        logs = rng.normal(size=experts)
    else:
        hot = experts // ranks if kind == "hot rank" else int(kind.split()[0])
        logs = (np.arange(experts) < hot).astype(np.float64)
    return lambda strength: np.exp(strength * logs)


def drifting(
    load: Load,
    ranks: int,
    experts: int,
    *,
    steps: int,
    every: int,
    top_k: int = 8,
    tokens: int = 8192,
    seed: int = 0,
) -> IntArray:
    """[S, R, E] a load whose hot ranks change every few microbatches."""
    if steps < 1 or every < 1:
        raise ConfigError(f"steps and every must be at least 1, got {steps} and {every}")
    rng, matrices = np.random.default_rng(seed), []
    for step in range(steps):
        if step % every == 0:
            order = rng.permutation(ranks)
        drawn = load.draw(ranks, experts, top_k=top_k, tokens=tokens, seed=seed + step)
        matrices.append(drawn.reshape(ranks, ranks, -1)[:, order].reshape(ranks, experts))
    return np.stack(matrices)


def ids_with(loads_E: IntArray, top_k: int, seed: int = 0) -> IntArray:
    """[T, K] ids with exactly these loads; no token has an expert twice, no expert over T rows."""
    rows = np.repeat(np.arange(len(loads_E)), loads_E)
    ids: IntArray = np.random.default_rng(seed).permutation(rows.reshape(top_k, -1).T)
    return ids
