"""Layouts of loads and of a plan on the device, shared by all kernels that write or read them.

loads      [R, E]  rows of every source rank for every expert; ranks are `stride` apart
replicas   [C, 3]  expert, host rank and spare slot there of every replica; -1: no replica
split      [C, R]  rows of every source rank that each replica serves
received   [R, L]  rows that every rank sends to each slot of this rank
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

EXPERT, HOST, SLOT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Plan(NamedTuple):
    """The tensors of a plan."""

    replicas: Any
    quotas: Any  # [C] rows that each replica serves
    slot_of_replica: Any  # [C] among the slots of all ranks
    split: Any
    num_replicas: Any  # [1]


class Homes(NamedTuple):
    """Where experts are. `expert_of_slot` depends on the plan; -1: the slot is free."""

    home_of_expert: Any  # [E] rank
    home_slot_of_expert: Any  # [E]
    first_slot_of_rank: Any  # [R + 1]
    expert_of_slot: Any  # [S]


@triton.jit
def load_at(loads, source, expert, stride):
    return loads + source.to(tl.int64) * stride + expert


@triton.jit
def replica_at(replicas, replica, column: tl.constexpr):
    return replicas + 3 * replica + column


@triton.jit
def split_at(split, replica, source, ranks):
    return split + replica.to(tl.int64) * ranks + source


@triton.jit
def received_at(received, source, local, num_local):
    return received + source * num_local + local
