"""Numbers of plots, ready for JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.plan import Plan
from ultraep.trace.read import Trace

Numbers = dict[str, Any]
FloatArray = NDArray[np.float64]
MOST_NUMBERS = 400_000  # in the microbatches that a page offers
DIGITS = 6


def plain(values: Any) -> list[float | None]:
    """Return rounded numbers for JSON, with None for NaN and infinity."""
    numbers = np.asarray(values, dtype=np.float64).tolist()
    return [round(value, DIGITS) if math.isfinite(value) else None for value in numbers]


def grouped(
    values: NDArray[Any], groups: Iterable[NDArray[Any]], fold: Callable[[Any], Any] = np.mean
) -> list[float | None]:
    """Return one number per group of records, the mean by default; None for an empty group.

    groups: masks or indices of the records.
    """
    parts = [values[group] for group in groups]
    return plain([fold(part) if len(part) else math.nan for part in parts])


def sample(count: int, size: int, required: int, most: int = MOST_NUMBERS) -> IntArray:
    """Return evenly spread indices below `count` whose items fit, and the required index.

    size: numbers per item.   most: numbers of all items.

    >>> sample(9, size=1, required=5, most=3)
    array([0, 4, 5, 8])
    """
    fitting = max(2, most // max(size, 1))
    if count <= fitting:
        return np.arange(count)
    spread = np.linspace(0, count - 1, fitting).round().astype(np.int64)
    return np.union1d(spread, [required])


def microbatches(
    trace: Trace, plan_of: Callable[[int], Plan], domains: Sequence[str], *, noun: str
) -> Numbers:
    """Return microbatches to select from; `records[moment][layer]` is None where missing.

    plan_of: returns the plan of a record.   domains: the kind of text of every step.
    noun: the page's word for a step of the trace.
    """
    moments, moment_N = np.unique(
        np.column_stack([trace.step, trace.microbatch]), axis=0, return_inverse=True
    )
    moment_N, layers = moment_N.reshape(-1), trace.layers.tolist()
    plans = [plan_of(record) for record in range(len(trace))]
    topology = plans[0].topology
    worst = int(np.argmax([plan.initial_imbalance for plan in plans]))
    size = len(layers) * 2 * (topology.experts + topology.ranks * topology.slots)
    shown = sample(len(moments), size, int(moment_N[worst]))
    place = {int(moment): number for number, moment in enumerate(shown)}
    records: list[list[Numbers | None]] = [[None] * len(layers) for _ in shown]
    for plan, moment, layer in zip(plans, moment_N.tolist(), trace.layer.tolist(), strict=True):
        if moment in place:
            records[place[moment]][layers.index(layer)] = microbatch(plan)
    return {
        "noun": noun,
        "homes": [topology.home_experts(rank).tolist() for rank in range(topology.ranks)],
        "slots": topology.slots,
        "layers": layers,
        "recorded": len(moments),
        "moments": [
            {"step": step, "microbatch": microbatch, "domain": domains[step]}
            for step, microbatch in moments[shown].tolist()
        ],
        "worst": [place[int(moment_N[worst])], layers.index(int(trace.layer[worst]))],
        "records": records,
    }


def microbatch(plan: Plan) -> Numbers:
    """Return the loads of all experts, and the expert and rows of every slot.

    Replicas beyond the spare slots, which some policies have, are left out.
    """
    topology = plan.topology
    held_RL = np.full((topology.ranks, topology.slots), -1)
    rows_RL = np.zeros_like(held_RL)
    for (expert, host, slot), quota in zip(plan.replicas.tolist(), plan.quotas, strict=True):
        if slot < topology.slots:
            held_RL[host, slot], rows_RL[host, slot] = expert, quota
    at_home = plan.dense_quota()[np.arange(topology.experts), topology.home_of_expert]
    return {
        "loads": plan.loads.sum(axis=0).tolist(),
        "rows": [
            count
            for rank in range(topology.ranks)
            for count in (*at_home[topology.home_experts(rank)].tolist(), *rows_RL[rank].tolist())
        ],
        "held": held_RL.reshape(-1).tolist(),
    }
