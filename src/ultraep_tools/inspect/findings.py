"""Findings: the recorded loads planned for all numbers of ranks and policies.

Shapes: H layers, W windows, E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.config import BalanceConfig
from ultraep.plan import Plan, plan
from ultraep.reroute import rows_received
from ultraep.topology import Topology
from ultraep.trace.record import Recorder
from ultraep_tools.inspect.texts import TextSpan
from ultraep_tools.replay import Case, Replayed, regrouped_loads, replayed_plans
from ultraep_tools.report.words import counted

NONE, OTHER, OWN = POLICIES = ("none", "eplb", "ultraep")
LEGEND = (
    "none: without replicas; eplb: experts placed by the load of the previous window, homes move; "
    "ultraep: replicas for this window; bound: the best that any plan can reach with these slots; "
    "replicas: of ultraep, per layer"
)
Progress = Callable[[int, int, str], None]  # steps done, all steps, description of the next step
Table = tuple[list[str], list[list[str]]]  # head and rows
Values = NDArray[np.float64]


def topology_of(ranks: int, experts: int, slots: int) -> Topology:
    """Neighbouring experts share a rank, also if the numbers do not divide."""
    homes = [expert * ranks // experts for expert in range(experts)] if experts % ranks else None
    return Topology(ranks=ranks, experts=experts, slots=slots, homes=homes)


def plans(loads_HWE: IntArray, case: Case) -> Iterator[Plan]:
    """Yield the plans of every layer, window by window.

    The tokens of a window are divided evenly over the ranks. The history of a policy is the
    previous window; for the first window, that window itself.
    """
    for windows_WE in loads_HWE:
        past = windows_WE[0]
        for loads_E in windows_WE:
            loads_RE = regrouped_loads(loads_E[None], case.topology.ranks)
            history = past[None] if case.history else None
            yield plan(loads_RE, case.topology, case.config, history=history)
            past = loads_E


@dataclass(frozen=True, eq=False)
class Findings:
    """The outcome of every number of ranks and policy, and what the records are."""

    layers: Sequence[int]
    texts: Sequence[TextSpan]
    sizes: Sequence[int]  # numbers of ranks
    outcomes: Mapping[tuple[int, str], Replayed]  # by number of ranks and policy

    def values(self, name: str, size: int, policy: str = OWN) -> Values:
        """[H, W] an array of an outcome: before, after, bound or copies."""
        values_N: Values = getattr(self.outcomes[size, policy], name)
        return values_N.reshape(len(self.layers), -1)

    @cached_property
    def headline(self) -> str:
        size = self.sizes[0]
        before, after = (self.values(name, size).mean() for name in ("before", "after"))
        slots = counted(self.outcomes[size, OWN].case.topology.slots, "spare slot")
        return f"Imbalance {before:.2f} -> {after:.2f} at EP{size} with {slots}"

    def table(self) -> Table:
        """A row per number of ranks: imbalance under every policy."""
        rows = []
        for size in self.sizes:
            after = [self.values("after", size, policy) for policy in POLICIES]
            imbalance = [f"{values.mean():.3f} ({values.max():.2f})" for values in after]
            bound, replicas = (self.values(name, size).mean() for name in ("bound", "copies"))
            rows.append([f"EP{size}", *imbalance, f"{bound:.3f}", f"{replicas:.1f}"])
        return ["ranks", *POLICIES, "bound", "replicas"], rows

    @cached_property
    def by_layer(self) -> list[dict[str, Any]]:
        """Imbalance before and after by layer and number of ranks."""
        return [
            self._change(size, {"layer": layer}, np.s_[place])
            for place, layer in enumerate(self.layers)
            for size in self.sizes
        ]

    @cached_property
    def by_text(self) -> list[dict[str, Any]]:
        """Imbalance before and after by text and number of ranks."""
        return [
            self._change(size, {"text": span.name}, np.s_[:, span.begin : span.end + 1])
            for span in self.texts
            for size in self.sizes
        ]

    def _change(self, size: int, group: dict[str, Any], part: Any) -> dict[str, Any]:
        means = {n: float(self.values(n, size)[part].mean()) for n in ("before", "after")}
        return group | {"ranks": size} | means


def change_table(rows: Sequence[dict[str, Any]], most: int | None = None) -> Table:
    """A line per layer or text, with a column per number of ranks; the `most` uneven ones."""
    noun = next(iter(rows[0]))
    sizes = list(dict.fromkeys(row["ranks"] for row in rows))
    lines = [rows[begin : begin + len(sizes)] for begin in range(0, len(rows), len(sizes))]
    worst = sorted(lines, key=lambda line: -line[0]["before"])[:most]
    shown = [
        [str(line[0][noun]), *(f"{row['before']:.3f} -> {row['after']:.3f}" for row in line)]
        for line in lines
        if line in worst
    ]
    return [noun, *(f"EP{size}" for size in sizes)], shown


def find(
    loads_HWE: IntArray,
    layers: Sequence[int],
    texts: Sequence[TextSpan],
    topologies: Sequence[Topology],
    report: Progress,
) -> Findings:
    """Plan all windows of all layers for every topology, under every policy."""
    outcomes, combinations = {}, list(product(topologies, POLICIES))
    for number, (topology, policy) in enumerate(combinations):
        report(number, len(combinations), f"EP{topology.ranks} {policy}")
        case = Case(BalanceConfig(policy=policy), topology, 1 if policy == OTHER else None)
        outcomes[topology.ranks, policy] = replayed_plans(plans(loads_HWE, case), case)
    return Findings(layers, texts, [topology.ranks for topology in topologies], outcomes)


def write_trace(
    folder: Path, loads_HWE: IntArray, layers: Sequence[int], topology: Topology, note: str
) -> None:
    """Write the trace of a group of ranks that balances these loads; steps are windows."""
    config = BalanceConfig()
    every = list(plans(loads_HWE, Case(config, topology)))
    windows = loads_HWE.shape[1]
    for rank in range(topology.ranks):
        with Recorder(folder, topology, config, rank=rank, note=note) as recorder:
            for number, own in enumerate(every):
                place, window = divmod(number, windows)
                rows = rows_received(own, rank).sum(axis=0)
                recorder.add(plan=own, slot_rows=rows, step=window, layer=layers[place])
