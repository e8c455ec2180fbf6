"""Replay: plan the recorded loads again, with other policies, slots, ranks and history lengths.

Shapes: N records, R ranks, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np

from ultraep.arrays import IntArray
from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError
from ultraep.plan import Plan
from ultraep.plan import plan as make_plan
from ultraep.policies import get_policy
from ultraep.topology import Topology
from ultraep.trace.read import FloatArray, Trace


@dataclass(frozen=True)
class Case:
    """The settings of a replay.

    history: past microbatches of a layer that the policy sees; None for policies without history.
    """

    config: BalanceConfig
    topology: Topology
    history: int | None = None


def cases(
    trace: Trace,
    *,
    policies: Sequence[str],
    slots: Sequence[int],
    ranks: Sequence[int],
    history: Sequence[int],
) -> list[Case]:
    """Return every combination of settings; history only for policies that use it."""
    for length in history:
        if length < 1:
            raise ConfigError(f"history must be at least 1 microbatch, got {length}")
    combinations = []
    for size, count, name in product(ranks, slots, policies):
        topology = regrouped_topology(trace.topology, ranks=size, slots=count)
        lengths: Sequence[int | None] = history if get_policy(name).needs_history else [None]
        config = replace(trace.header.config, policy=name)
        combinations += [Case(config, topology, length) for length in lengths]
    return combinations


@dataclass(frozen=True, eq=False)
class Replayed:
    """The replayed records of one case. Each array is [N].

    before, after: imbalance without and with replicas.   bound: the least possible imbalance.
    copies: replicas.   remote: share of rows that another rank than their source serves.
    beyond: whether the plan needs more slots than there are, or leaves its domain.
    """

    case: Case
    before: FloatArray
    after: FloatArray
    bound: FloatArray
    copies: FloatArray
    remote: FloatArray
    beyond: FloatArray

    def means(self) -> dict[str, Any]:
        """Return the mean of every array, the worst `after`, and the number of plans `beyond`."""
        names = ("before", "after", "bound", "copies", "remote")
        means: dict[str, Any] = {name: fmean(getattr(self, name).tolist()) for name in names}
        return means | {"worst": float(self.after.max()), "beyond": int(self.beyond.sum())}

    def to_json(self) -> dict[str, Any]:
        """Return settings and means."""
        config, topology = self.case.config, self.case.topology
        return {
            "policy": config.policy,
            "ranks": topology.ranks,
            "slots": topology.slots,
            "history": self.case.history,
            "tolerance": config.tolerance,
            **self.means(),
        }


def replayed(trace: Trace, case: Case) -> Replayed:
    """Plan all records."""
    return replayed_plans(plans(trace, case), case)


def replayed_plans(plans: Iterable[Plan], case: Case) -> Replayed:
    """Return the numbers of these plans."""
    rows = [
        (
            *(plan.initial_imbalance, plan.imbalance, plan.lower_bound, plan.num_replicas),
            *(plan.remote_tokens / max(plan.total, 1), not plan.within_limits),
        )
        for plan in plans
    ]
    if not rows:
        raise ConfigError("nothing to replay: the trace has no records")
    return Replayed(case, *np.array(rows, dtype=np.float64).T)


def differing(trace: Trace) -> list[int]:
    """Plan all records with their recorded settings; return the records whose plan differs."""
    recorded = [Case(trace.config(record), trace.topology) for record in range(len(trace))]
    again = enumerate(_plans(trace, recorded))
    return [record for record, plan in again if plan.digest() != trace.plan(record).digest()]


def plans(trace: Trace, case: Case) -> Iterator[Plan]:
    """Yield the plans of all records in order, with the recorded rates.

    If the case has as many ranks as the trace, also with the recorded speeds.
    """
    same_ranks = case.topology.ranks == trace.topology.ranks

    def recorded(record: int) -> Case:
        speeds = trace.speeds_of(record) if same_ranks else None
        config = replace(case.config, rates=trace.rates_of(record), speeds=speeds)
        return replace(case, config=config)

    return _plans(trace, map(recorded, range(len(trace))))


def _plans(trace: Trace, cases: Iterable[Case]) -> Iterator[Plan]:
    """Plan records; a policy with history sees the previous microbatches of the layer.

    For the first microbatch of a layer, the history is the microbatch itself.
    """
    past: dict[int, deque[IntArray]] = {}
    for layer, loads, case in zip(trace.layer.tolist(), trace.loads, cases, strict=True):
        loads_RE = regrouped_loads(loads, case.topology.ranks)
        earlier = past.setdefault(layer, deque(maxlen=case.history or 1))
        summed = loads_RE.sum(axis=0)
        history = None if case.history is None else np.stack(list(earlier) or [summed])
        yield make_plan(loads_RE, case.topology, case.config, history=history)
        earlier.append(summed)


# -- other numbers of ranks ----------------------------------------------------------------------


def regrouped_topology(topology: Topology, *, ranks: int, slots: int) -> Topology:
    """Return a topology with more or fewer ranks: neighbours are merged, or divided evenly."""
    old = topology.ranks
    if ranks < 1 or (old % ranks and ranks % old):
        raise ConfigError(
            f"{old} recorded ranks cannot become {ranks}: one number must divide the other"
        )
    if topology.homes is None and topology.experts % ranks:
        raise ConfigError(
            f"{topology.experts} experts do not divide evenly over {ranks} ranks; choose a number "
            f"of ranks that divides {topology.experts}"
        )
    if topology.homes is not None and ranks != old:
        raise ConfigError(f"the experts have homes of their own, so {old} ranks cannot be changed")
    domain = ranks if topology.num_domains == 1 else min(topology.domain_size, ranks)
    return replace(topology, ranks=ranks, slots=slots, domain=domain)


def regrouped_loads(loads_RE: IntArray, ranks: int) -> IntArray:
    """Return the loads of merged source ranks, or deal the rows of a rank out in turn.

    >>> regrouped_loads(np.array([[3, 1], [0, 2]]), 1)
    array([[3, 3]])
    >>> regrouped_loads(np.array([[3, 1]]), 2)
    array([[2, 0],
           [1, 1]])
    """
    old, experts = loads_RE.shape
    loads_RE = loads_RE.astype(np.int64)
    if ranks <= old:
        merged: IntArray = loads_RE.reshape(ranks, old // ranks, experts).sum(axis=1)
        return merged
    parts = ranks // old
    ends_RE = np.cumsum(loads_RE, axis=1)
    # Part j gets the rows of a rank whose number modulo parts is j.
    dealt = (ends_RE[:, None] + (parts - 1 - np.arange(parts))[:, None]) // parts
    split: IntArray = np.diff(dealt, axis=2, prepend=0).reshape(ranks, experts)
    return split
