"""The named loads: one list for all benchmarks.

Shapes: S microbatches, R ranks, E experts, T tokens of a rank, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from ultraep.arrays import IntArray
from ultraep.errors import ConfigError
from ultraep.workload.generators import (
    MOST_UNEVEN,
    FloatArray,
    check,
    check_even_homes,
    draw,
    expected_imbalance,
    fit,
    zipf_popularity,
)

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
    """[S, R, E] a load whose hot ranks change every so many microbatches."""
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
