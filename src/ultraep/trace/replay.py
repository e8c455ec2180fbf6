"""Replay: plan the recorded loads again, under any policy, slots, ranks and memory of the past.

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
from ultraep.trace.read import FloatArray, Routed, Trace


@dataclass(frozen=True)
class Case:
    """One way to plan a trace again.

    history: past microbatches of a layer, for policies that place by them; None for others.
    """

    config: BalanceConfig
    topology: Topology
    history: int | None = None

    def settings(self) -> dict[str, Any]:
        """In plain values, for records of what was replayed."""
        return {
            "policy": self.config.policy,
            "ranks": self.topology.ranks,
            "slots": self.topology.slots,
            "history": self.history,
            "tolerance": self.config.tolerance,
        }


@dataclass(frozen=True)
class Line:
    """All records under one case: means, and the worst of them."""

    case: Case
    before: float
    after: float
    worst: float
    bound: float
    copies: float
    remote: float  # share of tokens that are served on another rank than their own
    beyond: int  # plans that need more slots than there are, or leave their domain


def cases(
    trace: Trace,
    *,
    policies: Sequence[str],
    slots: Sequence[int],
    ranks: Sequence[int],
    history: Sequence[int],
    tolerance: float | None = None,
) -> list[Case]:
    """Every combination; of the past only where the policy looks at it."""
    for length in history:
        if length < 1:
            raise ConfigError(f"history must be at least 1 microbatch, got {length}")
    base = trace.header.config
    base = base if tolerance is None else replace(base, tolerance=tolerance)
    found = []
    for size, count, name in product(ranks, slots, policies):
        topology = regrouped_topology(trace.topology, ranks=size, slots=count)
        lengths: Sequence[int | None] = history if get_policy(name).needs_history else [None]
        config = replace(base, policy=name)
        found += [Case(config, topology, length) for length in lengths]
    return found


@dataclass(frozen=True, eq=False)
class Replayed:
    """All records under one case, one by one. [N] each; what they are is said at `Line`."""

    case: Case
    before: FloatArray
    after: FloatArray
    bound: FloatArray
    copies: FloatArray
    remote: FloatArray
    beyond: FloatArray

    @property
    def line(self) -> Line:
        """Their means, and the worst of them."""
        names = ("before", "after", "bound", "copies", "remote")
        means = {name: fmean(getattr(self, name).tolist()) for name in names}
        worst, beyond = float(self.after.max()), int(self.beyond.sum())
        return Line(case=self.case, worst=worst, beyond=beyond, **means)


def replay(trace: Trace, case: Case) -> Line:
    """Plan all records; what comes out on average."""
    return replayed(trace, case).line


def replayed(trace: Trace, case: Case) -> Replayed:
    """Plan all records."""
    return replayed_plans(plans(trace, case), case)


def replayed_plans(made: Iterable[Plan], case: Case) -> Replayed:
    """What becomes of these plans."""
    rows = [
        (
            *(plan.initial_imbalance, plan.imbalance, plan.lower_bound, plan.num_replicas),
            *(plan.remote_tokens / max(plan.total, 1), not plan.within_limits),
        )
        for plan in made
    ]
    if not rows:
        raise ConfigError("nothing to replay: the trace has no records")
    return Replayed(case, *np.array(rows, dtype=np.float64).T)


def plans(trace: Trace, case: Case) -> Iterator[Plan]:
    """The plans of all records, in their order, by the rates that were recorded."""
    return plans_of(map(trace.routed, range(len(trace))), case)


def plans_of(records: Iterable[Routed], case: Case) -> Iterator[Plan]:
    """Return the plans of records, as they come."""

    def priced(record: Routed) -> tuple[int, IntArray, Case]:
        loads_RE = regrouped_loads(record.loads, case.topology.ranks)
        config = replace(case.config, rates=record.rates)
        return record.layer, loads_RE, replace(case, config=config)

    return _plans(map(priced, records))


def differing(trace: Trace) -> list[int]:
    """Return the records whose plan differs when it is made again as it was made."""

    def recorded(record: int) -> tuple[int, IntArray, Case]:
        config = trace.config(record)
        history = 1 if get_policy(config.policy).needs_history else None
        loads_RE = trace.loads[record].astype(np.int64)
        return int(trace.layer[record]), loads_RE, Case(config, trace.topology, history)

    again = enumerate(_plans(map(recorded, range(len(trace)))))
    return [record for record, plan in again if plan.digest() != trace.plan(record).digest()]


def _plans(records: Iterable[tuple[int, IntArray, Case]]) -> Iterator[Plan]:
    """Plan loads of layers; a policy that needs a history sees the microbatches before.

    The first microbatch of a layer sees itself, as at run time.
    """
    past: dict[int, deque[IntArray]] = {}
    for layer, loads_RE, case in records:
        seen = past.setdefault(layer, deque(maxlen=case.history or 1))
        summed = loads_RE.sum(axis=0)
        history = None if case.history is None else np.stack(list(seen) or [summed])
        yield make_plan(loads_RE, case.topology, case.config, history=history)
        seen.append(summed)


# -- other numbers of ranks ----------------------------------------------------------------------


def regrouped_topology(topology: Topology, *, ranks: int, slots: int) -> Topology:
    """A topology of more or fewer ranks: neighbours are merged, or divided evenly."""
    old = topology.ranks
    if ranks < 1 or (old % ranks and ranks % old):
        raise ConfigError(
            f"{old} recorded ranks cannot become {ranks}: one number must divide the other"
        )
    if topology.homes is None and topology.experts % ranks:
        raise ConfigError(f"{topology.experts} experts do not divide evenly over {ranks} ranks")
    domain = ranks if topology.num_domains == 1 else min(topology.domain_size, ranks)
    homes = None if topology.homes is None else _regrouped_homes(topology, ranks)
    return Topology(ranks=ranks, experts=topology.experts, slots=slots, domain=domain, homes=homes)


def _regrouped_homes(topology: Topology, ranks: int) -> list[int]:
    old = topology.ranks
    if ranks <= old:
        merged: list[int] = (topology.home_of_expert // (old // ranks)).tolist()
        return merged
    parts, homes = ranks // old, np.empty(topology.experts, dtype=np.int64)
    for rank in range(old):
        mine = topology.home_experts(rank)
        homes[mine] = rank * parts + np.arange(len(mine)) * parts // max(len(mine), 1)
    return homes.tolist()


def regrouped_loads(loads_RE: IntArray, ranks: int) -> IntArray:
    """The loads of source ranks that are merged, or whose tokens are dealt out in turn.

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
    # Of the first n tokens of a rank, part j gets those whose number leaves j when divided.
    dealt = (ends_RE[:, None] + (parts - 1 - np.arange(parts))[:, None]) // parts
    split: IntArray = np.diff(dealt, axis=2, prepend=0).reshape(ranks, experts)
    return split
