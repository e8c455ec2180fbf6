"""Workload: the rows of every expert in every layer and microbatch.

`Skew` draws loads: every layer has persistently popular experts (how popular varies by layer), each
microbatch differs a little. `Recorded` reads loads from a trace. Both depend
on layer and microbatch alone, so results do not depend on the number of processes.

Shapes: S microbatches, E experts, R ranks, H recorded layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ultraep.arrays import IntArray
from ultraep.errors import ConfigError, FileError
from ultraep.loads import MAX_TOTAL
from ultraep.topology import Topology
from ultraep.trace.read import holds_trace, read_trace
from ultraep.workload import loads_of_windows, read_loads, read_routing
from ultraep.workload.files import MOST_NUMBERS, holds_routing
from ultraep_tools.sim.costs import FloatArray
from ultraep_tools.sim.planning import sum_by_home
from ultraep_tools.sim.presets import check_range, presets

# Spread of the skew over layers and noise between windows of 4096 tokens of one text, both measured
# in recorded routing of gpt-oss-20b (24 layers, 15 windows).
LAYER_SPREAD = 0.27
RECORDED_NOISE = 0.4
MAX_SPREAD = 8.0  # standard deviation of log popularity at which a few experts get all rows
WINDOW = 4096  # tokens of a microbatch cut from recorded routing
PROBE_ROWS = 8192 * 8  # per rank
PROBES = 1024  # loads to which the skew is fitted, at least
MIN_SHARE = 1e-12  # of an expert without weight: it gets rows only when all others are full


@dataclass(frozen=True, kw_only=True)
class Skew:
    """Drawn loads.

    spread: standard deviation of the persistent log popularity of experts.
    noise: standard deviation of the part drawn anew for every microbatch and layer.
    """

    experts: int
    top_k: int
    spread: float
    noise: float
    seed: int = 0

    def __post_init__(self) -> None:
        check_range(self, "spread noise", 0, MAX_SPREAD)
        check_range(self, "seed", 0, 2**63 - 1)

    def expert_loads(self, layer: int, microbatches: IntArray, rows: int) -> IntArray:
        """[S, E] rows of every expert in each of these microbatches."""
        logits_SE = self.noise * self._normal(1, layer, microbatches)
        factor = np.random.default_rng([self.seed, 2, layer]).normal(1.0, LAYER_SPREAD)
        spread = self.spread * max(float(factor), 0.0)
        logits_SE += spread * self._normal(0, layer, 0 * microbatches)
        return share_out(np.exp(logits_SE), rows, self.top_k)

    def _normal(self, stream: int, layer: int, numbers: IntArray) -> FloatArray:
        """[S, E] draws that depend on stream, layer and number alone."""
        rng = np.random.Generator(np.random.Philox(key=[self.seed, stream * 65536 + layer]))
        block: FloatArray = rng.standard_normal((int(numbers.max()) + 1, self.experts))
        return block[numbers]


@dataclass(frozen=True)
class Recorded:
    """Loads of a trace, scaled to the rows of a microbatch. After the last one they repeat."""

    loads: IntArray  # [S, H, E]
    top_k: int

    @property
    def experts(self) -> int:
        return int(self.loads.shape[2])

    def expert_loads(self, layer: int, microbatches: IntArray, rows: int) -> IntArray:
        """[S, E] rows of every expert in each of these microbatches."""
        count, layers, _ = self.loads.shape
        loads_SE = self.loads[microbatches % count, layer % layers]
        return share_out(loads_SE.astype(np.float64), rows, self.top_k)


Workload = Skew | Recorded


def share_out(weights_SE: FloatArray, rows: int, top_k: int) -> IntArray:
    """[S, E] whole rows in proportion to the weights, at most one row per token and expert.

    >>> share_out(np.array([[6.0, 1.0, 1.0]]), rows=8, top_k=2)
    array([[4, 2, 2]])
    """
    tokens = rows // top_k
    weights_SE = np.maximum(weights_SE, MIN_SHARE * weights_SE.sum(axis=1, keepdims=True))
    exact_SE = weights_SE * (rows / weights_SE.sum(axis=1, keepdims=True))
    full_SE = np.zeros(exact_SE.shape, dtype=bool)
    while (exact_SE > tokens).any():
        full_SE |= exact_SE >= tokens
        rest_S1 = rows - tokens * full_SE.sum(axis=1, keepdims=True)
        open_SE = np.where(full_SE, 0.0, weights_SE)
        sums_S1 = np.maximum(open_SE.sum(axis=1, keepdims=True), np.finfo(float).tiny)
        exact_SE = np.where(full_SE, tokens, open_SE * (rest_S1 / sums_S1))
    # Cumulative rounding: sums are exact and no expert is off by more than one row.
    open_SE = np.where(full_SE, 0.0, exact_SE)
    ends_SE = np.floor(np.cumsum(open_SE, axis=1) + 0.5).astype(np.int64)
    whole_SE: IntArray = np.diff(ends_SE, axis=1, prepend=0) + tokens * full_SE
    return whole_SE


# -- fitting -------------------------------------------------------------------------------------


def fit_skew(
    imbalance: float,
    topology: Topology,
    top_k: int,
    layers: range,
    *,
    noise: float = RECORDED_NOISE,
    seed: int = 0,
) -> Skew:
    """Return drawn loads with this mean imbalance over these layers.

    If the noise alone exceeds the imbalance, the result has less noise and no persistent part.
    """
    if not 1 <= imbalance <= topology.ranks:
        raise ConfigError(
            f"imbalance must lie between 1 and the {topology.ranks} ranks, got {imbalance}"
        )
    skew = Skew(experts=topology.experts, top_k=top_k, spread=0.0, noise=noise, seed=seed)

    def reached(**changes: Any) -> float:
        return mean_imbalance(replace(skew, **changes), topology, layers)

    if reached() > imbalance:
        return replace(skew, noise=_bisect(lambda x: reached(noise=x), imbalance, noise))
    most = reached(spread=MAX_SPREAD)
    if most < imbalance:
        raise ConfigError(
            f"an imbalance of {imbalance} cannot be drawn for {topology.experts} experts, "
            f"top-{top_k}, on {topology.ranks} ranks: at most about {most:.1f}"
        )
    return replace(skew, spread=_bisect(lambda x: reached(spread=x), imbalance, MAX_SPREAD))


def _bisect(value: Callable[[float], float], target: float, high: float) -> float:
    low = 0.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if value(middle) < target else (low, middle)
    return (low + high) / 2


def noise_of(*, training: bool) -> float:
    """Return the calibrated noise of training loads, or the recorded noise of prompts."""
    return float(presets("calibrated")["noise"]["training"]) if training else RECORDED_NOISE


def mean_imbalance(workload: Workload, topology: Topology, layers: range) -> float:
    """Return the imbalance without replicas, mean over layers and some microbatches."""
    rows = PROBE_ROWS * topology.ranks
    microbatches = np.arange(-(-PROBES // len(layers)))
    by_layer = []
    for layer in layers:
        loads_SR = sum_by_home(workload.expert_loads(layer, microbatches, rows), topology)
        by_layer.append(loads_SR.max(axis=1) / loads_SR.mean(axis=1))
    return float(np.mean(by_layer))


# -- files ---------------------------------------------------------------------------------------


def read_workload(path: str | Path, *, experts: int, top_k: int) -> Recorded:
    """Return the loads of a trace, of recorded routing (`*_ids` in .npz) or of a loads file."""
    loads_SHRE = _read_loads(path, experts)
    if loads_SHRE.shape[3] != experts:
        raise ConfigError(
            f"{path} has loads of {loads_SHRE.shape[3]} experts, the model has {experts}"
        )
    if not 0 <= loads_SHRE.min() <= loads_SHRE.max() <= MAX_TOTAL:
        raise FileError(
            f"{path}: loads must lie in 0..{MAX_TOTAL}, got {loads_SHRE.min()}..{loads_SHRE.max()}"
        )
    loads_SHE = loads_SHRE.sum(axis=2)
    if not loads_SHE.sum(axis=2).all():
        raise FileError(f"{path}: a microbatch without any row")
    return Recorded(loads_SHE, top_k)


def _read_loads(path: str | Path, experts: int) -> IntArray:
    """[S, H, R, E] loads of a trace, of recorded routing, or of a loads file."""
    if holds_routing(path):
        return _count_routing(path, experts)
    if not holds_trace(path):
        return read_loads(path)[:, None]
    loads_SHRE = read_trace(path).by_layer().astype(np.int64, copy=False)
    if not loads_SHRE.size:
        raise FileError(f"{path}: no microbatch with records of all layers")
    return loads_SHRE


def _count_routing(path: str | Path, experts: int) -> IntArray:
    """Count the rows of windows of `WINDOW` tokens."""
    texts = read_routing(path)
    layers, *different = sorted({ids.shape[1] for ids in texts})
    if different:
        raise FileError(f"{path}: texts with {layers} and with {different[0]} layers")
    counts = sum(len(ids) // WINDOW for ids in texts) * layers * experts
    if counts > MOST_NUMBERS:
        raise ConfigError(
            f"{path}: {counts:,} counts of {experts} experts, but at most {MOST_NUMBERS:,} are read"
        )
    try:
        parts = [loads_of_windows(i, ranks=1, experts=experts, tokens=WINDOW) for i in texts]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not sum(map(len, parts)):
        longest = max(map(len, texts))
        raise ConfigError(
            f"{path}: no text has the {WINDOW} tokens of a microbatch, the longest has {longest}"
        )
    return np.concatenate(parts)
