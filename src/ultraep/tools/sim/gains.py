"""Gains: throughput over no balancing, its range, and the tokens from which it is reached.

The range covers microbatches and other seeds. The break-even comes from runs with few and many
tokens per rank.

Shapes: S microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ultraep.errors import ConfigError
from ultraep.tools.sim.run import Result, simulate, time_layer
from ultraep.tools.sim.runtime import Contender
from ultraep.tools.sim.scenario import Scenario
from ultraep.tools.sim.serving import Serving
from ultraep.tools.sim.training import Training
from ultraep.tools.sim.workload import Skew, fit_skew, mean_imbalance
from ultraep.topology import Topology

Curve = tuple[tuple[int, float], ...]  # tokens per rank and microbatch, gain

UNBALANCED = Contender("none", "none", slots=0)
SEEDS = 3  # runs of a drawn workload
PROBE_TOKENS = tuple(2**power for power in range(6, 15))
PROBE_MICROBATCHES = 8


@dataclass(frozen=True)
class Gain:
    """Throughput over no balancing. The range covers microbatches and seeds."""

    overall: float
    low: float
    high: float
    microbatches: tuple[float, float]  # 10th and 90th percentile
    draws: tuple[float, ...]  # one per seed; a recorded trace has one


@dataclass(frozen=True)
class BreakEven:
    """Tokens per rank and microbatch from which a gain is reached."""

    gain: float
    tokens: float | None  # None: the most tokens tried do not reach the gain
    always: bool  # `tokens` are the fewest that were tried


def gain_of(scenario: Scenario, none: Result, balanced: Result, draws: tuple[float, ...]) -> Gain:
    """Return the gain and its range over microbatches and seeds.

    The gains of microbatches are ratios of their seconds, scaled so that their mean is the overall
    gain, which pipelines and queues make a little smaller.
    """
    overall = balanced.throughput / none.throughput
    plain = scenario.job.plain_seconds(scenario.costs, scenario.ranks)
    none_S, own_S = none.by_microbatch + plain, balanced.by_microbatch + plain
    gain_S = (none_S / own_S) * (overall * own_S.mean() / none_S.mean())
    low, high = (float(value) for value in np.percentile(gain_S, (10, 90)))
    gains = (overall, low, high, *draws)
    return Gain(overall, min(gains), max(gains), (low, high), draws)


def gains_of_seeds(scenario: Scenario, balanced: Contender, processes: int) -> Iterator[float]:
    """Yield the gain on loads of other seeds. A recorded trace has none."""
    skew, model, job = scenario.workload, scenario.model, scenario.job
    if not isinstance(skew, Skew):
        return
    topology, layers = Topology(ranks=scenario.ranks, experts=model.experts), model.expert_layers
    imbalance = mean_imbalance(skew, topology, layers)
    lengths = {"topic_length": skew.topic_length, "drift_length": skew.drift_length}
    for number in range(1, SEEDS):
        seed, drawn_job = skew.seed + number, job
        if isinstance(job, Serving):  # other arrivals, too
            drawn_job = replace(job, seed=job.seed + number)
        try:
            drawn = fit_skew(
                imbalance, topology, model.top_k, layers, noise=skew.noise, seed=seed, **lengths
            )
        except ConfigError:  # this seed cannot quite reach the imbalance
            drawn = replace(skew, seed=seed)
        other = replace(scenario, workload=drawn, job=drawn_job)
        none, own = simulate(other, [UNBALANCED, balanced], processes=processes)
        yield own.throughput / none.throughput


def gains_by_tokens(scenario: Scenario, balanced: Contender) -> Iterator[tuple[int, float]]:
    """Yield tokens per rank and the gain with them, on few microbatches."""
    for tokens in PROBE_TOKENS:
        job = replace(scenario.job, tokens=tokens)
        if isinstance(job, Training):
            microbatches = max(PROBE_MICROBATCHES // job.groups, 1)
            short: Training | Serving = replace(job, steps=1, microbatches=microbatches)
        else:
            short = replace(job, iterations=PROBE_MICROBATCHES)
        probe = replace(scenario, job=short, interval=1)
        times = [time_layer(probe, [UNBALANCED, balanced], n) for n in scenario.model.expert_layers]
        none, own = (
            sum(float((t.forward_seconds + t.backward_seconds).mean()) for t in layers)
            for layers in zip(*times, strict=True)
        )
        plain = job.plain_seconds(scenario.costs, scenario.ranks)
        yield tokens, (none + plain) / (own + plain)


def break_even(curve: Curve, gain: float) -> BreakEven:
    """Return the tokens from which a gain is reached and kept, between the points of a curve.

    >>> break_even(((64, 0.75), (256, 1.25)), 1.0)
    BreakEven(gain=1.0, tokens=128.0, always=False)
    """
    below = [index for index, (_, reached) in enumerate(curve) if reached < gain]
    if not below:
        return BreakEven(gain, float(curve[0][0]), always=True)
    if below[-1] == len(curve) - 1:
        return BreakEven(gain, None, always=False)
    (few, less), (many, more) = curve[below[-1] : below[-1] + 2]
    part = (gain - less) / (more - less)
    return BreakEven(gain, float(few * (many / few) ** part), always=False)
