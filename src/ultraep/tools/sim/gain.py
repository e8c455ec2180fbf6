"""Gain of balancing: its range over microbatches and draws, and the tokens from which on it is one.

Shapes: S microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ultraep.errors import ConfigError
from ultraep.tools.sim.run import Result, simulate, time_layer
from ultraep.tools.sim.scenario import Contender, Scenario
from ultraep.tools.sim.serving import Serving
from ultraep.tools.sim.training import Training, optimizer_seconds, plain_seconds
from ultraep.tools.sim.workload import Skew, fit_skew, mean_imbalance
from ultraep.topology import Topology

FloatArray = NDArray[np.float64]
Curve = tuple[tuple[int, float], ...]  # tokens per rank and microbatch, gain

NONE, IDEAL = Contender("none", "none", slots=0), Contender("ideal", "ideal", slots=0)
DRAWS = 3  # seeds of a drawn workload
INNER = (10, 90)  # percentiles of the microbatches' gains
PROBE_TOKENS = tuple(2**power for power in range(6, 15))
PROBE_MICROBATCHES = 8


@dataclass(frozen=True)
class Gain:
    """Throughput over that without balancing; the range covers microbatches and draws."""

    overall: float
    low: float
    high: float
    microbatches: tuple[float, float]  # 10th and 90th percentile
    draws: tuple[float, ...]  # one for every seed; a recorded trace has the one


@dataclass(frozen=True)
class BreakEven:
    """Tokens per rank and microbatch from which on a gain is reached.

    tokens: the number; None if it is not reached by the most tokens tried.
    always: it is reached by the fewest tokens tried, which `tokens` then is.
    """

    gain: float
    tokens: float | None
    always: bool


# -- range ---------------------------------------------------------------------------------------


def gain_of(scenario: Scenario, none: Result, balanced: Result, draws: tuple[float, ...]) -> Gain:
    """The gain on these loads; its range covers their microbatches and the gains of all draws.

    Gains of microbatches are those of their seconds, scaled so that their mean is the overall gain:
    pipelines and queues make that a little less.
    """
    overall = balanced.throughput / none.throughput
    none_S, own_S = (r.by_microbatch + rest_seconds(scenario) for r in (none, balanced))
    gain_S = (none_S / own_S) * (overall * own_S.mean() / none_S.mean())
    low, high = (float(value) for value in np.percentile(gain_S, INNER))
    every = (overall, low, high, *draws)
    return Gain(overall, min(every), max(every), (low, high), draws)


def rest_seconds(scenario: Scenario) -> float:
    """Seconds of what has no experts, per microbatch."""
    costs, job, model = scenario.costs, scenario.job, scenario.model
    if isinstance(job, Training):
        forward, backward = plain_seconds(costs, job)
        step = optimizer_seconds(costs, job, scenario.ranks) * job.pipeline
        return float(forward.sum() + backward.sum()) + step / job.microbatches
    tokens, context = job.tokens, job.requests.mean_tokens / 2
    attention = costs.attention_forward(tokens, context)
    looking = attention - costs.attention_forward(tokens, 0.0)
    dense = model.dense_layers * (attention + costs.dense_mlp(tokens))
    return model.moe_layers * looking + dense


def draw_again(scenario: Scenario, balanced: Contender, processes: int) -> Iterator[float]:
    """The gain on loads of other seeds, one by one; a recorded trace has none."""
    skew = scenario.workload
    if not isinstance(skew, Skew):
        return
    for number in range(1, DRAWS):
        job = scenario.job
        if isinstance(job, Serving):  # other arrivals, too
            job = replace(job, seed=job.seed + number)
        workload = _fitted(scenario, skew, skew.seed + number)
        drawn = replace(scenario, workload=workload, job=job)
        none, own = simulate(drawn, [NONE, balanced], processes=processes)
        yield own.throughput / none.throughput


def _fitted(scenario: Scenario, skew: Skew, seed: int) -> Skew:
    model = scenario.model
    layers = range(model.dense_layers, model.layers)
    topology = Topology(ranks=scenario.ranks, experts=model.experts)
    try:
        return fit_skew(
            mean_imbalance(skew, topology, layers),
            topology,
            model.top_k,
            layers,
            noise=skew.noise,
            topic_length=skew.topic_length,
            drift_length=skew.drift_length,
            seed=seed,
        )
    except ConfigError:  # as steep as can be drawn: this seed cannot quite reach it
        return replace(skew, seed=seed)


# -- tokens --------------------------------------------------------------------------------------


def probe(scenario: Scenario, balanced: Contender) -> Iterator[tuple[int, float]]:
    """Gain by tokens per rank, one by one, on few microbatches."""
    wanted, model = [NONE, balanced], scenario.model
    for tokens in PROBE_TOKENS:
        job = scenario.job
        if isinstance(job, Training):
            job = replace(job, tokens=tokens)
            few = replace(job, steps=1, microbatches=max(PROBE_MICROBATCHES // job.groups, 1))
            short = replace(scenario, job=few, interval=1)
        else:
            job = replace(job, chunk=tokens)
            short = replace(scenario, job=replace(job, iterations=PROBE_MICROBATCHES), interval=1)
        layers = range(model.dense_layers, model.layers)
        times = [time_layer(short, wanted, layer) for layer in layers]
        none, own = (
            sum(float((t.forward_seconds + t.backward_seconds).mean()) for t in of_contender)
            for of_contender in zip(*times, strict=True)
        )
        rest = rest_seconds(replace(scenario, job=job))
        yield tokens, (none + rest) / (own + rest)


def break_even(curve: Curve, gain: float) -> BreakEven:
    """The tokens from which on a gain is reached and kept, between the points of a curve.

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
