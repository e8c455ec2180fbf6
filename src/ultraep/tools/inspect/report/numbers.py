"""The numbers of the report: what each section draws, ready for JSON. No words, no pictures.

Shapes: N records, H layers, R ranks, E experts, L spare slots of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ultraep.plan import Plan
from ultraep.tools.inspect.findings import Findings, Mask, label, past_of
from ultraep.tools.report.numbers import FloatArray, Numbers, kept, plain
from ultraep.trace.replay import Replayed

ALL = "all texts"


def all_numbers(findings: Findings) -> dict[str, Numbers]:
    """By section; everything that the page draws."""
    trace, texts = findings.trace, [span.name for span in findings.texts]
    layers = trace.layers.tolist()
    found = {
        "sizes": by_size(findings),
        "layers": by_group(findings, layers, [trace.layer == layer for layer in layers]),
        "texts": by_group(findings, texts, [findings.text == name for name in texts]),
    }
    if any(one.case.history for one in findings.found):
        found["history"] = by_past(findings)
    return found | {"experts": popularity(findings), "microbatches": microbatches(findings)}


def by_size(findings: Findings) -> Numbers:
    """Means, worst values and copies of every case, by number of ranks."""
    return {
        "sizes": findings.sizes,
        "cases": cases(findings),
        "mean": _by_case(findings, lambda one: float(one.after.mean())),
        "worst": _by_case(findings, lambda one: float(one.after.max())),
        "copies": _by_case(findings, lambda one: float(one.copies.mean())),
    }


def cases(findings: Findings) -> list[Numbers]:
    """Policy and slots of all cases of one size."""
    first = [one.case for one in findings.of_size(findings.sizes[0])]
    return [
        {"label": label(case), "policy": case.config.policy, "slots": case.topology.slots}
        for case in first
    ]


def _by_case(findings: Findings, value: Any) -> dict[str, list[float | None]]:
    """By label, a value for every size."""
    found: dict[str, list[float]] = {}
    for one in findings.found:
        found.setdefault(label(one.case), []).append(value(one))
    return {name: plain(values) for name, values in found.items()}


def by_group(findings: Findings, names: Sequence[Any], own: Sequence[Mask]) -> Numbers:
    """Mean and worst imbalance of groups of records, for every size and case."""

    def folded(one: Replayed, fold: Any) -> list[float | None]:
        return plain([fold(one.after[mask]) for mask in own])

    sizes = findings.sizes
    return {
        "names": list(names),
        "sizes": sizes,
        "cases": cases(findings),
        **{
            key: [{label(o.case): folded(o, fold) for o in findings.of_size(s)} for s in sizes]
            for key, fold in (("mean", np.mean), ("worst", np.max))
        },
    }


def by_past(findings: Findings) -> Numbers:
    """Policies that place by the past, where that is of the same text and where it is not."""
    history = next(one.case.history for one in findings.found if one.case.history)
    same, changed = past_of(findings, history)
    wanted = [one for one in findings.found if _compared(one, findings)]

    def means(mask: Mask) -> dict[str, list[float | None]]:
        found: dict[str, list[float]] = {}
        for one in wanted:
            values: FloatArray = one.after[mask]
            found.setdefault(label(one.case), []).append(
                float(values.mean()) if len(values) else float("nan")
            )
        return {name: plain(values) for name, values in found.items()}

    chosen = {label(one.case) for one in wanted}
    return {
        "sizes": findings.sizes,
        "cases": [case for case in cases(findings) if case["label"] in chosen],
        "window": history,
        "same": means(same),
        "changed": means(changed),
    }


def _compared(one: Replayed, findings: Findings) -> bool:
    case, shown = one.case, findings.shown.case
    return (case.history is not None or case.config.policy == shown.config.policy) and (
        case.topology.slots == shown.topology.slots
    )


def popularity(findings: Findings) -> Numbers:
    """Load of every expert over the mean, by text and layer."""
    trace, layers = findings.trace, findings.trace.layers
    masks = {ALL: np.ones(len(trace), dtype=bool)}
    masks |= {span.name: findings.text == span.name for span in findings.texts}
    loads_NE = trace.loads.sum(axis=1, dtype=np.int64)

    def rows(mask: Mask) -> list[list[float]]:
        loads_HE = np.stack([loads_NE[mask & (trace.layer == n)].sum(axis=0) for n in layers])
        means_H1 = np.maximum(loads_HE.mean(axis=1, keepdims=True), 1e-9)
        shares: list[list[float]] = (loads_HE / means_H1).round(3).tolist()
        return shares

    return {
        "layers": layers.tolist(),
        "texts": list(masks),
        "load": [rows(mask) for mask in masks.values()],
    }


# -- microbatches to choose from -----------------------------------------------------------------


def microbatches(findings: Findings) -> Numbers:
    """Windows of every layer under the case that is shown: tokens, rows of slots, held copies."""
    trace, plans = findings.trace, findings.shown_plans()
    steps, layers = trace.steps, trace.layers.tolist()
    worst = int(findings.shown.before.argmax())
    topology = findings.shown.case.topology
    size = len(layers) * (2 * topology.experts + 2 * topology.ranks * topology.slots)
    chosen = kept(len(steps), size, int(np.searchsorted(steps, trace.step[worst])))
    place = {int(steps[one]): number for number, one in enumerate(chosen)}
    records: list[list[Numbers | None]] = [[None] * len(layers) for _ in chosen]
    for step, layer, made in zip(trace.step.tolist(), trace.layer.tolist(), plans, strict=True):
        if step in place:
            records[place[step]][layers.index(layer)] = microbatch(made)
    names = dict(zip(trace.step.tolist(), findings.text.tolist(), strict=True))
    return {
        "noun": "Window",
        "homes": [topology.home_experts(rank).tolist() for rank in range(topology.ranks)],
        "slots": topology.slots,
        "layers": layers,
        "recorded": len(steps),
        "moments": [{"step": step, "microbatch": 0, "domain": names[step]} for step in place],
        "worst": [place[int(trace.step[worst])], layers.index(int(trace.layer[worst]))],
        "records": records,
    }


def microbatch(made: Plan) -> Numbers:
    """What every slot holds and serves; copies beyond the slots are not shown."""
    topology = made.topology
    held_RL = np.full((topology.ranks, topology.slots), -1)
    rows_RL = np.zeros_like(held_RL)
    for (expert, host, slot), quota in zip(made.replicas.tolist(), made.quotas, strict=True):
        if slot < topology.slots:
            held_RL[host, slot], rows_RL[host, slot] = expert, quota
    at_home = made.dense_quota()[np.arange(topology.experts), topology.home_of_expert]
    rows = [
        count
        for rank in range(topology.ranks)
        for count in (*at_home[topology.home_experts(rank)].tolist(), *rows_RL[rank].tolist())
    ]
    return {
        "loads": made.loads.sum(axis=0).tolist(),
        "rows": rows,
        "held": held_RL.reshape(-1).tolist(),
    }
