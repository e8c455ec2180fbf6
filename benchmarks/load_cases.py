"""The loads of the benchmarks: synthetic, even or recorded; and expert ids with these loads.

Shapes: T tokens of a rank, K experts per token, R ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ultraep import workload
from ultraep.arrays import IntArray
from ultraep.workload import Load, generators

ORDERED, SHUFFLED = "zipf ordered", "zipf shuffled"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A layer, its number of ranks, and the tokens per rank."""

    hidden: int
    ffn: int
    experts: int
    top_k: int
    tokens: int
    ranks: int = 1

    @property
    def about(self) -> str:
        return f"D {self.hidden}, F {self.ffn}, {self.experts} experts, top-{self.top_k}"

    @property
    def rows(self) -> int:
        """Routed rows per rank."""
        return self.tokens * self.top_k


@dataclass(frozen=True, slots=True)
class Kind:
    """A family of synthetic loads; the ratio applies to Zipf loads."""

    family: str
    ratio: float | None = None

    @property
    def name(self) -> str:
        return self.family if self.ratio is None else f"{self.family} {self.ratio:g}"

    def draw(self, ranks: int, experts: int, *, tokens: int, seed: int) -> IntArray:
        """[R, E] loads, top-8, or less if there are few experts."""
        top_k = min(8, max(1, experts // 8))
        if self.family == "one_hot":
            return np.eye(1, experts, dtype=np.int64).repeat(ranks, axis=0) * tokens
        if self.family == "uniform":
            return Load("random even").draw(ranks, experts, top_k=top_k, tokens=tokens, seed=seed)
        if self.ratio is None:  # log-normal
            rng = np.random.default_rng(seed)
            popularity = np.exp(rng.normal(size=experts))
            return generators.draw(popularity, ranks, top_k, tokens, rng)
        return workload.zipf(
            ranks,
            experts,
            ratio=self.ratio,
            top_k=top_k,
            tokens=tokens,
            shuffled=self.family == SHUFFLED,
            seed=seed,
        )


def zipf_kinds(ratios: Sequence[float]) -> list[Kind]:
    return [Kind(family, ratio) for family in (ORDERED, SHUFFLED) for ratio in ratios]


def hot(imbalance: float) -> Load:
    """The named load with one dominant expert on the busiest rank; even at imbalance 1."""
    return Load("even") if imbalance == 1 else Load("zipf ordered", imbalance)


def draw(load: Load, shape: Shape) -> IntArray:
    """[R, E] rows of a layer."""
    return load.draw(shape.ranks, shape.experts, top_k=shape.top_k, tokens=shape.tokens)


def ids_with(loads_E: IntArray, shape: Shape, seed: int) -> torch.Tensor:
    """[T, K] ids with exactly these loads; no token has an expert twice."""
    line = np.repeat(np.arange(shape.experts), loads_E)
    ids = line.reshape(shape.top_k, shape.tokens).T
    return torch.from_numpy(np.random.default_rng(seed).permutation(ids).astype(np.int32))


@dataclass(frozen=True, slots=True)
class RecordedRouting:
    """Recorded routing, split into windows of tokens; each window is a microbatch."""

    path: Path
    window: int

    def microbatches(self, ranks: int) -> Iterator[tuple[IntArray, IntArray | None]]:
        """[R, E] loads of every layer and window, and the loads of the previous window or None."""
        texts = workload.read_routing(self.path)
        experts = 1 << max(int(ids.max()) for ids in texts).bit_length()
        for ids in texts:
            loads = workload.loads_of_windows(ids, ranks=ranks, experts=experts, tokens=self.window)
            for window, layer in np.ndindex(loads.shape[:2]):
                yield loads[window, layer], loads[window - 1, layer] if window else None
