"""Triton kernels for the GPU, bit for bit equal to the reference.

The functions here have the signatures of every backend: arrays on the host, except that ids and
order may be tensors on the device. They wait for the device. `DevicePlanner` of the runtime does
not: it launches the kernels over the preallocated buffers of `Counter`, `Planner` and `Rerouter`.

Shapes: N routed rows, R ranks, E experts, C replicas, S slots of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import torch

from ultraep.arrays import IntArray
from ultraep.backends.limits import Limits
from ultraep.backends.reference.place import lower_bound
from ultraep.backends.reference.reroute import tally
from ultraep.backends.triton.device import default_device, launching
from ultraep.backends.triton.kernels.plan import Homes, Plan
from ultraep.backends.triton.kernels.state import MOST
from ultraep.backends.triton.planner import Planner
from ultraep.backends.triton.rerouter import Counter, Rerouter

__all__ = ["DEVICE", "count", "lower_bound", "place", "reroute", "split", "tally"]

DEVICE = "cuda"
Function = TypeVar("Function", bound=Callable[..., Any])


def _launching(function: Function) -> Function:
    @wraps(function)
    def launched(*args: Any) -> Any:
        with launching(default_device()):
            return function(*args)

    return cast(Function, launched)


@_launching
def count(ids_N: IntArray | torch.Tensor, experts: int) -> tuple[IntArray, int]:
    """[E] rows of every expert, and the number of ids out of range."""
    ids = _on_device(ids_N)
    counter = Counter(experts, ids.numel(), ids.device)
    counter.count(ids)
    return _on_host(counter.totals[:experts]), int(counter.unknown)


@_launching
def place(expert_loads: IntArray, limits: Limits) -> IntArray:
    """[C, 3] expert, host rank and quota of every replica, sorted by expert, then host."""
    planner = Planner(limits, locality=False, device=default_device())
    planner.sum(_on_device(expert_loads)[None])
    planner.place()
    experts, quotas = _on_host(planner.placed)
    held = np.flatnonzero(experts != MOST.value)
    placed_C3 = np.stack([experts[held], held // max(1, limits.slots), quotas[held]], axis=1)
    return placed_C3[np.lexsort((placed_C3[:, 1], placed_C3[:, 0]))]


@_launching
def split(
    loads_RE: IntArray, home_of_expert: IntArray, replicas_C3: IntArray, locality: bool
) -> IntArray:
    """[C, R] rows of every source rank served by each replica (expert, host, quota)."""
    ranks = len(loads_RE)
    hosts = replicas_C3[:, 1]
    slots = int(np.bincount(hosts, minlength=1).max())
    order = np.argsort(home_of_expert, kind="stable")
    first = np.searchsorted(home_of_expert[order], np.arange(ranks + 1))
    limits = Limits(order, first, ranks, slots, max_replicas=ranks * slots)
    planner = Planner(limits, locality=locality, device=default_device())
    # Put the replicas of every host into its spare slots, in any order.
    by_host = np.argsort(hosts, kind="stable")
    index = np.arange(len(hosts)) - np.searchsorted(hosts[by_host], hosts[by_host])
    placed = np.full((2, ranks * slots), MOST.value)
    placed[:, hosts[by_host] * slots + index] = replicas_C3[by_host][:, [0, 2]].T
    loads = _on_device(loads_RE)
    if slots:
        planner.sum(loads)
        planner.placed.copy_(_on_device(placed))
        planner.lay_out(loads)
    return _on_host(planner.plan_tensors.split)[: len(replicas_C3)]


@_launching
def reroute(
    ids_N: IntArray | torch.Tensor,
    loads_E: IntArray,
    home_slot_of_expert: IntArray,
    expert_of_replica: IntArray,
    slot_of_replica: IntArray,
    rows_of_replica: IntArray,
    num_slots: int,
) -> tuple[IntArray, IntArray] | tuple[torch.Tensor, torch.Tensor] | None:
    """Return [M] rows in sending order and [S] rows of every slot; None if the ids differ."""
    ids, loads = _on_device(ids_N), _on_device(loads_E)[None]
    columns = (
        np.append(column, -1) for column in (expert_of_replica, slot_of_replica, rows_of_replica)
    )
    experts, slots, rows = map(_int32, columns)  # one row too many: a plan may have no replicas
    replicas, number = experts[:, None].repeat(1, 3), np.array([len(expert_of_replica)])
    planned = SimpleNamespace(
        experts=len(loads_E),
        ranks=1,
        num_slots=num_slots,
        max_fanout=len(experts),
        plan_tensors=Plan(replicas, None, slots, rows, _int32(number)),
        home_tables=Homes(
            None, _int32(home_slot_of_expert), _int32(np.array([0, num_slots])), None
        ),
    )
    counter = Counter(len(loads_E), ids.numel(), ids.device)
    rerouter = Rerouter(cast(Planner, planned), counter)
    order = torch.empty(ids.numel(), dtype=torch.int64, device=ids.device)
    counter.count(ids)
    rerouter.lines(loads, 0)
    rerouter.assign(ids, torch.empty_like(order), order, torch.empty_like(order))
    if int(counter.unknown) or int(rerouter.mismatches):
        return None
    order, rows_of_slot = order[: int(loads.sum())], rerouter.rows_of_slot.long()
    if isinstance(ids_N, torch.Tensor):
        return order, rows_of_slot
    return _on_host(order), _on_host(rows_of_slot)


def _on_device(values: IntArray | torch.Tensor) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values.contiguous()
    return torch.from_numpy(np.array(values, dtype=np.int64)).to(default_device())


def _int32(array: IntArray) -> torch.Tensor:
    return _on_device(array).to(torch.int32)


def _on_host(tensor: torch.Tensor) -> IntArray:
    return tensor.cpu().numpy().astype(np.int64)
