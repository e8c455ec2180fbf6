"""One record as the page shows it: one microbatch of one layer.

Shapes: R ranks, E experts, S slots of all ranks, C replicas, G stages.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.config import PER_SECOND
from ultraep.hops import hops
from ultraep.plan import Plan, peak_of
from ultraep.tools.report.numbers import FloatArray, Numbers, plain
from ultraep.trace.read import Trace
from ultraep.trace.schema import Array, of_backward

CHUNKS = 4  # per chain, the default of balancers
DIGITS = 7  # of seconds: a tenth of a microsecond


def numbers_of(trace: Trace) -> Numbers:
    """Return everything that the page draws of the only record of a trace."""
    header, topology = trace.header, trace.topology
    copies = trace.copies.astype(np.int64)
    usable = (copies >= 0).all(axis=1)
    usable &= (copies[:, 0] < header.experts) & (copies[:, 1] < header.ranks)
    copies, quotas = copies[usable], trace.quotas[usable].astype(np.int64)
    held = np.full((header.ranks, header.slots), -1)
    in_slots = copies[:, 2] < header.slots  # some policies use more slots than there are
    held[copies[in_slots, 1], copies[in_slots, 2]] = copies[in_slots, 0]
    return {
        "policy": str(trace.policy[0]),
        "ranks": header.ranks,
        "homes": [topology.home_experts(rank).tolist() for rank in range(header.ranks)],
        "slots": header.slots,
        "loads": trace.loads[0].sum(axis=0, dtype=np.int64).tolist(),
        "rows": trace.slot_rows[0].tolist(),
        "held": held.reshape(-1).tolist(),
        "speeds": trace.speeds_of(0),
        "before": plain(trace.imbalance_before)[0],
        "after": plain(trace.imbalance_after)[0],
        "bytes": trace.bytes_moved[0].tolist(),
        "copies": _copies(trace, copies, quotas),
        "priced": _priced(trace, copies),
        "unusable": int((~usable).sum()),
    }


def _priced(trace: Trace, copies: IntArray) -> Numbers | None:
    """Return the predicted seconds with and without replicas; None without rates."""
    rates, homes = trace.rates_of(0), trace.topology.home_of_expert
    if rates is None or trace.header.objective != "time":
        return None
    received, sent = np.bincount(copies[:, 1]), np.bincount(homes[np.unique(copies[:, 0])])
    transfers = int(max(received.max(initial=0), sent.max(initial=0)))
    speeds = trace.speeds_of(0) or ()
    before, unit = peak_of(trace.initial_rank_loads[0].astype(np.int64), speeds)
    after, _ = peak_of(trace.rank_loads[0].astype(np.int64), speeds)
    planned = rates.time(peak=after, unit=unit, transfers=transfers, copies=len(copies))
    without = rates.time(peak=before, unit=unit, transfers=0, copies=0)
    return {"rates": str(rates), "time": planned / PER_SECOND, "without": without / PER_SECOND}


def _copies(trace: Trace, copies: IntArray, quotas: IntArray) -> Numbers:
    """Return every replica with the path of its weights.

    relay: "direct" or "chain".   mode: the setting of the balancer. For "auto", and for "" (not
    recorded), the paths follow the rule that balancers apply.
    """
    header, none = trace.header, np.zeros(0, dtype=np.int64)
    loads = trace.loads[0].astype(np.int64)
    plan = Plan(header.topology, header.config, loads, copies, quotas, none, none)
    sent = hops(plan, header.relay or "auto", chunks=header.chunks or CHUNKS)
    rows = {(int(c[0]), int(c[1])): int(q) for c, q in zip(copies, quotas, strict=True)}
    paths: dict[tuple[int, int], list[int]] = {}
    replicas = []
    for hop in sent:
        path = [*paths.get((hop.expert, hop.sender), [hop.sender]), hop.receiver]
        paths[hop.expert, hop.receiver] = path
        replicas.append(
            {
                "expert": hop.expert,
                "slot": hop.slot,
                "rows": rows[hop.expert, hop.receiver],
                "path": path,
            }
        )
    relay = "chain" if any(hop.depth for hop in sent) else "direct"
    return {"relay": relay, "mode": header.relay, "list": replicas}


def stages_of(trace: Trace) -> dict[str, Numbers | None]:
    """Return when the stages of the only record ran, by pass; None without times."""
    backward_G = of_backward(trace.header.stages)
    return {
        "forward": _stages(trace, "forward", trace.began[0], ~backward_G),
        "backward": _stages(trace, "backward", trace.back_began[0], backward_G),
    }


def _stages(trace: Trace, name: str, began: FloatArray, own_G: NDArray[np.bool_]) -> Numbers | None:
    """Return start, duration and waiting time of the stages of all ranks."""
    seconds, waited = (_finite(times[0, :, own_G].T) for times in (trace.seconds, trace.waited))
    if np.isnan(began).all() or not seconds.any():
        return None
    with np.errstate(invalid="ignore"):  # a file may hold any number
        begin = (began - np.nanmin(began))[:, None] + np.cumsum(seconds, axis=1) - seconds
    return {
        "name": name,
        "stages": [stage for stage, own in zip(trace.header.stages, own_G, strict=True) if own],
        "begin": [_rounded(row) for row in begin],
        "seconds": [_rounded(row) for row in seconds],
        "waited": [_rounded(row) for row in waited],
    }


def _finite(seconds: Array) -> FloatArray:
    return np.where(np.isfinite(seconds), seconds, 0).astype(np.float64)


def _rounded(values: FloatArray) -> list[float | None]:
    return [round(value, DIGITS) if math.isfinite(value) else None for value in values.tolist()]
