"""Results of a GPU for one microbatch: the plan, the routes, and the gathered counts of all ranks.

Shapes: T tokens, K experts per token, N = T * K routed rows, R ranks, E experts, C replicas at
most, S slots of all ranks, L slots of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from ultraep.arrays import IntArray, frozen
from ultraep.config import BalanceConfig
from ultraep.plan import Plan
from ultraep.topology import Topology


class _Part:
    """A tensor of a device plan: a view of its `result`, by the name of the attribute."""

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    def __get__(self, plan: DevicePlan, _owner: type) -> torch.Tensor:
        place, shape = plan.places[self._name]
        return plan.result[place].view(shape)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A plan on the device. After the last replica, entries are -1, or 0 rows."""

    topology: Topology
    config: BalanceConfig
    loads: torch.Tensor  # [R, E] the loads that were planned
    expert_of_slot: torch.Tensor  # [S] what every slot holds; -1: nothing
    result: torch.Tensor  # the tensors below in one piece
    places: Mapping[str, tuple[slice, tuple[int, ...]]]  # of these tensors in it
    fetched: tuple[IntArray, IntArray] | None = None  # loads and result on the host

    num_replicas = _Part()  # [1] replicas in total
    replicas = _Part()  # [C, 3] expert, host rank, spare slot; by expert, then host
    quotas = _Part()  # [C] rows that each replica serves
    split = _Part()  # [C, R] the quotas by source rank
    rank_loads = _Part()  # [R] rows that every rank serves
    slot_of_replica = _Part()  # [C] slot of each replica, counted over all ranks

    def _fetched(self, name: str) -> IntArray:
        """Return a part of a plan that was fetched to the host."""
        assert self.fetched is not None
        return self.fetched[1][self.places[name][0]]

    def has_replicas(self) -> bool:
        """Whether a fetched plan has replicas."""
        return bool(self._fetched("num_replicas")[0])

    def most_rows(self) -> int:
        """Return the rows of the fullest rank of a fetched plan."""
        if self.topology.ranks == 1:
            assert self.fetched is not None
            return int(self.fetched[0].sum())
        return int(self._fetched("rank_loads").max())

    def copied(self) -> DevicePlan:
        """Return the plan in its own memory, which the next plan does not overwrite."""
        alone = self.topology.ranks == 1  # then there is only one result
        result = self.result if alone else self.result.clone()
        return replace(self, loads=self.loads.clone(), result=result)

    def to_host_async(self) -> Callable[[], Plan]:
        """Return a callable that yields the `Plan` once the device has produced it."""
        if self.fetched is not None or self.result.device.type == "cpu":
            return self.to_host
        loads = _on_its_way(self.loads)
        alone = self.topology.ranks == 1
        result = torch.zeros(len(self.result)) if alone else _on_its_way(self.result)
        return lambda: self.to_host(loads.numpy().astype(np.int64), result)

    def to_host(self, loads: IntArray | None = None, fetched: torch.Tensor | None = None) -> Plan:
        """Return the plan as a `Plan`; waits for the device.

        loads, fetched: the loads and the `result` if they are on the host already.
        """
        if self.fetched is not None:
            loads, result = self.fetched
        else:
            result = (self.result.cpu() if fetched is None else fetched).numpy().astype(np.int64)

        def part(name: str) -> IntArray:
            place, shape = self.places[name]
            return result[place].reshape(shape)

        end = int(part("num_replicas")[0])
        if loads is None:
            loads = self.loads.cpu().numpy().astype(np.int64)
        arrays: list[IntArray] = [
            loads,
            part("replicas")[:end],
            part("quotas")[:end],
            part("split")[:end],
            part("rank_loads") if self.topology.ranks > 1 else loads.sum(axis=1),
        ]
        return Plan(self.topology, self.config, *map(frozen, arrays))


def _on_its_way(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host, complete when the device has come to it."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class DeviceRoutes:
    slots: torch.Tensor  # [T, K] slot of every row, counted over all ranks; -1: padding
    positions: torch.Tensor  # [N] position of each row in the order of sending; -1: padding
    order: torch.Tensor  # [N] the rows in the order of sending; -1 after the last one
    rows_of_slot: torch.Tensor  # [S] rows of this rank for every slot
    send_counts: torch.Tensor  # [R] rows for every rank
    receive_counts: torch.Tensor  # [R, L] rows from every rank for each slot of this one


class Gathered(NamedTuple):
    """The block that the host reads: positions and counts of all ranks, and the rows received."""

    positions: IntArray  # [R + 1, 3] point, step and digest; the last: the fault of this rank
    counts: IntArray  # [R, E + 4] loads, rows without an expert, and faults
    received: IntArray  # [R, L] rows from every rank for each slot of this rank

    def tokens(self, top_k: int) -> int:
        """Return the most tokens of a rank."""
        return int(self.counts[:, :-3].sum(axis=1).max()) // max(1, top_k)

    def refused(self) -> list[int]:
        """Return the ranks with invalid ids."""
        ranks: list[int] = np.flatnonzero(self.counts[:, -3]).tolist()
        return ranks
