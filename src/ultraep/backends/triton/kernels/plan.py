"""Layouts of loads and of a plan on the device, shared by all kernels that write or read them.

loads      [R, E]  tokens of every source rank for every expert; rows are `stride` apart
replicas   [C, 3]  of every copy: its expert, its host rank, its spare slot there; -1: no copy
split_CR   [C, R]  tokens of every source rank that each copy serves
received   [R, L]  rows that every rank sends to each slot of this one
"""

import triton
import triton.language as tl

EXPERT, HOST, SLOT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def load_at(loads, source, expert, stride):
    return loads + source.to(tl.int64) * stride + expert


@triton.jit
def replica_at(replicas, copy, column: tl.constexpr):
    return replicas + 3 * copy + column


@triton.jit
def split_at(split_CR, copy, source, ranks):
    return split_CR + copy.to(tl.int64) * ranks + source


@triton.jit
def received_at(received, source, local, num_local):
    return received + source * num_local + local
