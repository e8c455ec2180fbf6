"""Buffers and launches of stages 1 and 4 on the GPU: ids to loads, then to routes.

Shapes: N rows, E experts, R ranks, S slots of all ranks, L slots of one rank.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl

from ultraep.arrays import IntArray
from ultraep.backends.triton.kernels import count, reroute
from ultraep.backends.triton.launch import OPEN, Bound, cdiv, power_of_2
from ultraep.backends.triton.planner import Planner

ROWS = 512  # of a tile
STEPS = (1, 16, 256)  # tiles that are summed at once


class Counter:
    """Counts the rows of every expert, at most `rows` rows at a time, in buffers allocated once.

    `totals`: [E + 1] rows of every expert, then rows without an expert.
    `offsets`: [tiles, E + 1] rows of every expert in earlier tiles.
    `unknown`: [1] ids out of range, over all calls.
    """

    def __init__(
        self, experts: int, rows: int, device: torch.device, totals: torch.Tensor | None = None
    ) -> None:
        self.experts, self.rows = experts, rows
        tiles = cdiv(max(rows, 1), ROWS)
        self.offsets = _zeros(tiles, experts + 1, device=device)
        self.totals = _zeros(experts + 1, device=device) if totals is None else totals
        self.unknown = _zeros(1, device=device)
        columns, bins = 8, experts + 1
        self._grid = (cdiv(bins, columns),)
        self._tile_counts = Bound(
            count.tile_counts,
            *(OPEN, self.offsets, OPEN, OPEN, experts),
            B=ROWS,
            E=power_of_2(bins),
            num_warps=8,
        )
        arguments = self.offsets, self.totals, OPEN, bins
        self._tile_offsets = {
            step: Bound(count.tile_offsets, *arguments, T=step, E=columns, num_warps=4)
            for step in STEPS
        }

    def count(self, ids: torch.Tensor) -> None:
        """Count ids of any shape and integer dtype; -1 is padding."""
        rows = ids.numel()
        tiles = cdiv(rows, ROWS)
        if tiles:
            self._tile_counts((tiles,), ids, self.unknown, rows)
        step = next((step for step in STEPS if tiles <= step), STEPS[-1])
        self._tile_offsets[step](self._grid, tiles)


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
        self.max_replicas = len(planner.plan_tensors.slot_of_replica)
        experts, slots = planner.experts, planner.num_slots
        sizes = experts, experts, experts, self.max_replicas, slots, slots + 1, planner.ranks
        self.lines_of_rank = reroute.Lines(*(_zeros(size, device=device) for size in sizes))
        self.rows_of_slot = self.lines_of_rank.rows_of_slot
        self.send_counts = self.lines_of_rank.send_counts
        self.mismatches = _zeros(1, device=device)
        self._bind()

    def lines(self, loads_RE: torch.Tensor, rank: int, *, kept: bool = False) -> torch.Tensor:
        """Divide the rows of every expert among its slots; return `[S + 1]` their first rows.

        kept: the next call does not overwrite the result.
        """
        own = self.lines_of_rank.first_row
        first_row = self._first_row = torch.empty_like(own) if kept else own
        self._lay_lines((1,), loads_RE, first_row, self.mismatches, rank, loads_RE.stride(0))
        return first_row

    def assign(
        self, ids: torch.Tensor, slots: torch.Tensor, order: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Write slot, position and order of every row, after `lines`."""
        if ids.numel():
            grid = (cdiv(ids.numel(), ROWS),)
            self._assign(grid, ids, self._first_row, slots, order, positions, ids.numel())

    def receive(self, loads_RE: torch.Tensor, rank: int, received: torch.Tensor) -> None:
        """[R, L] rows that every rank sends to each slot of this rank. Needs a plan, no ids."""
        local = received.shape[1]
        self._receive((local,), loads_RE, received, rank, local, loads_RE.stride(0))

    def _bind(self) -> None:
        planner, counter = self.planner, self.counter
        tensors, homes = planner.plan_tensors, planner.home_tables
        lines = self.lines_of_rank._replace(first_row=OPEN)
        sizes = planner.experts, planner.num_slots
        C, R, slots = power_of_2(self.max_replicas), power_of_2(planner.ranks), power_of_2(sizes[1])
        self._lay_lines = Bound(
            reroute.lay_lines,
            *(OPEN, counter.totals, tensors, homes, lines, OPEN, OPEN, planner.ranks, *sizes, OPEN),
            E=power_of_2(planner.experts),
            C=C,
            S=slots,
            R=R,
            num_warps=min(16, max(1, slots // 128)),
        )
        self._assign = Bound(
            reroute.assign,
            *(OPEN, counter.offsets, counter.totals, self.strides, tensors, homes, lines),
            *(OPEN, OPEN, OPEN, OPEN, *sizes, (planner.max_fanout - 1).bit_length()),
            PRODUCT=self.product,
            B=ROWS,
            num_warps=8,
        )
        self._receive = Bound(
            reroute.receive,
            *(OPEN, tensors, homes, OPEN, OPEN, planner.ranks, OPEN, self.max_replicas, OPEN),
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
