"""Buffers and launches of stages 1 and 4 on the GPU: ids to loads, then to routes.

Shapes: N rows, E experts, R ranks, S slots of all ranks, L slots of one rank.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl

from ultraep.arrays import IntArray
from ultraep.backends.triton.kernels import count, reroute
from ultraep.backends.triton.launch import cdiv, power_of_2, quick
from ultraep.backends.triton.planner import Planner

ROWS = 512  # of a tile


class Counter:
    """Counts the rows of every expert, at most `rows` rows at a time, in buffers allocated once.

    `totals`: [E + 1] rows of every expert, then rows without an expert.
    `offsets`: [tiles, E + 1] rows of every expert in earlier tiles.
    `unknown`: [1] ids out of range, over all calls.
    """

    def __init__(self, experts: int, rows: int, device: torch.device) -> None:
        self.experts, self.rows = experts, rows
        tiles = cdiv(max(rows, 1), ROWS)
        self.offsets = _zeros(tiles, experts + 1, device=device)
        self.totals, self.unknown = _zeros(experts + 1, device=device), _zeros(1, device=device)

    def count(self, ids: torch.Tensor) -> None:
        """Count ids of any shape and integer dtype; -1 is padding."""
        tiles = cdiv(ids.numel(), ROWS)
        if tiles:
            quick(count.tile_counts)[(tiles,)](
                ids,
                self.offsets,
                self.unknown,
                ids.numel(),
                self.experts,
                B=ROWS,
                E=power_of_2(self.experts + 1),
                num_warps=8,
            )
        bins, columns = self.experts + 1, 8
        quick(count.tile_offsets)[(cdiv(bins, columns),)](
            self.offsets,
            self.totals,
            tiles,
            bins,
            T=min(256, power_of_2(max(tiles, 1))),
            E=columns,
            num_warps=4,
        )


class Rerouter:
    """Routes the rows that its counter has counted, by the plans of its planner.

    `rows_of_slot`: [S].   `send_counts`: [R].
    `mismatches`: [1] experts whose number of rows differed from the plan, over all calls.
    """

    def __init__(self, planner: Planner, counter: Counter) -> None:
        self.planner, self.counter = planner, counter
        device = counter.totals.device
        self.product = tl.uint32 if counter.rows <= 1 << 16 else tl.int64
        self.strides = torch.from_numpy(strides(counter.rows)).to(device, torch.int32)
        self.copies = len(planner.plan_tensors.slot_of_copy)
        experts, slots = planner.experts, planner.num_slots
        sizes = experts, experts, experts, self.copies, slots, slots + 1, planner.ranks
        self.lines_of_rank = reroute.Lines(*(_zeros(size, device=device) for size in sizes))
        self.rows_of_slot = self.lines_of_rank.rows_of_slot
        self.send_counts = self.lines_of_rank.send_counts
        self.mismatches = _zeros(1, device=device)

    def lines(self, loads_RE: torch.Tensor, rank: int) -> None:
        """Divide the rows of every expert among its slots."""
        planner, slots = self.planner, power_of_2(self.planner.num_slots)
        quick(reroute.lay_lines)[(1,)](
            loads_RE,
            self.counter.totals,
            planner.plan_tensors,
            planner.home_tables,
            self.lines_of_rank,
            self.mismatches,
            rank,
            planner.ranks,
            planner.experts,
            planner.num_slots,
            loads_RE.stride(0),
            E=power_of_2(planner.experts),
            C=power_of_2(self.copies),
            S=slots,
            R=power_of_2(planner.ranks),
            num_warps=min(16, max(1, slots // 128)),
        )

    def assign(
        self, ids: torch.Tensor, slots: torch.Tensor, order: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Write slot, position and order of every row, after `lines`."""
        planner, tiles = self.planner, cdiv(ids.numel(), ROWS)
        if not tiles:
            return
        quick(reroute.assign)[(tiles,)](
            ids,
            self.counter.offsets,
            self.counter.totals,
            self.strides,
            planner.plan_tensors,
            planner.home_tables,
            self.lines_of_rank,
            slots,
            order,
            positions,
            ids.numel(),
            planner.experts,
            planner.num_slots,
            (planner.max_fanout - 1).bit_length(),
            PRODUCT=self.product,
            B=ROWS,
            num_warps=8,
        )

    def receive(self, loads_RE: torch.Tensor, rank: int, received: torch.Tensor) -> None:
        """[R, L] rows that every rank sends to each slot of this rank. Needs a plan, no ids."""
        planner, C, R = self.planner, power_of_2(self.copies), power_of_2(self.planner.ranks)
        quick(reroute.receive)[(received.shape[1],)](
            loads_RE,
            planner.plan_tensors,
            planner.home_tables,
            received,
            rank,
            planner.ranks,
            received.shape[1],
            self.copies,
            loads_RE.stride(0),
            C=C,
            R=R,
            STEP=max(2, min(16, 4096 // R)),
            num_warps=min(8, max(1, max(R, C) // 128)),
        )


def strides(most: int) -> IntArray:
    """[most + 1] the stride of every number of rows: from its golden section up, and coprime."""
    lengths = np.arange(most + 1)
    steps = np.maximum(1, lengths * 618 // 1000)
    shared = np.gcd(steps, lengths) != 1
    shared[0] = False
    while shared.any():
        steps[shared] += 1
        shared[shared] = np.gcd(steps[shared], lengths[shared]) != 1
    return steps


def _zeros(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device)
