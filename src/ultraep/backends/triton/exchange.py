"""Buffers and launches of stages 5 and 7 between GPUs that access each other's memory.

Every rank publishes what it has, and reads what it needs:

    row_map = exchange.tables(tables, ...)
    exchange.expose(tables, order, gates)
    exchange.expose_values(values, tokens)
    ...                                                     barrier
    exchange.origins(tables, row_map, ...)
    exchange.landings(tables, row_map, ...)
    exchange.gather_rows(values, row_map, arrivals)
    ...                                                     experts fill `served`
    ...                                                     barrier
    exchange.sum_rows(served, served_scalars, row_map, outputs)

No rank may publish again before the others have read. Backward does the same with gradients of the
outputs as values, and needs no tables: the `RowMap` has them.

Shapes: T tokens, K choices, N = T * K routed rows, A arrived rows, S slots of all ranks, L slots of
this rank, R ranks, D width of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl

from ultraep.arrays import IntArray
from ultraep.backends.triton.kernels import exchange as kernels
from ultraep.backends.triton.launch import OPEN, Bound, cdiv, power_of_2
from ultraep.comm import Region
from ultraep.ops.products import accumulator

ALIGNMENT = 128  # bytes, of every part of a region
WORDS = {4: tl.int32, 2: tl.int16, 1: tl.int8}  # dtypes that move rows, by their bytes
SCALAR = 8  # bytes, at most
IN_FLIGHT = 64 << 10  # bytes that a program loads at once, so that few programs suffice
WARPS = 16


@dataclass(frozen=True, slots=True)
class RowMap:
    """Source and destination of every row, for one microbatch, forward and backward."""

    offsets: torch.Tensor  # [L + 1] where the arrivals of each slot begin; the last: A
    wrong: torch.Tensor  # [1] whether rows are missing
    origins: torch.Tensor  # [A] source of each arrived row, as kernels encode it; -1: none
    landings: torch.Tensor  # [N] where each routed row is served; -1: nowhere


class RowExchange:
    """Moves rows between the ranks of a group. Every method launches the same kernels each time.

    first_slot_of_rank: [R + 1] of the topology.
    fault: [1] that is not 0 after a fault of the signals.
    programs: at most this many programs move rows at a time.
    `faults`: how often more rows arrived than the capacity, and the most that ever arrived.
    """

    def __init__(
        self, first_slot_of_rank: IntArray, *, rank: int, fault: torch.Tensor, programs: int
    ) -> None:
        self.device, self.programs = fault.device, programs
        self.ranks, self.num_slots = len(first_slot_of_rank) - 1, int(first_slot_of_rank[-1])
        self.num_local = int(first_slot_of_rank[rank + 1] - first_slot_of_rank[rank])
        most_local = int(np.diff(first_slot_of_rank).max())  # slots of one rank
        # Bytes from the beginning of the tables, which start with the blocks.
        self._begins_at = aligned(4 * self.ranks * most_local)
        self._order_at = self._begins_at + aligned(4 * self.num_slots)
        rank_of_slot = np.repeat(np.arange(self.ranks), np.diff(first_slot_of_rank))
        first_slots, ranks_of_slots = (
            torch.from_numpy(table.copy()).to(self.device, torch.int32)
            for table in (first_slot_of_rank, rank_of_slot)
        )
        self.faults = torch.zeros(2, dtype=torch.int32, device=self.device)
        tile = min(2048, power_of_2(max(self.num_slots, self.ranks * self.num_local, 1)))
        self._make_tables = Bound(
            kernels.make_tables,
            *(OPEN, OPEN, OPEN, fault, OPEN, OPEN, OPEN, self.faults),
            *(self.num_slots, self.num_local, self.ranks, OPEN, OPEN, most_local),
            B=tile,
            num_warps=max(1, tile // 256),
        )
        self._expose_routes = Bound(
            kernels.expose_routes, *(OPEN, OPEN, OPEN, OPEN, OPEN), B=1024, num_warps=8
        )
        self._origins = Bound(
            kernels.origins,
            *(OPEN, OPEN, OPEN, first_slots, OPEN, OPEN),
            *(rank, self.num_local, OPEN, OPEN, most_local, OPEN),
            BEGINS=self._begins_at,
            ORDER=self._order_at,
            B=1024,
            num_warps=4,
        )
        self._landings = Bound(
            kernels.landings,
            *(OPEN, OPEN, OPEN, OPEN, ranks_of_slots, first_slots, OPEN),
            *(rank, self.num_slots, OPEN, OPEN, most_local),
            BLOCKS=0,
            B=256,
            num_warps=4,
        )
        self._moves: dict[tuple[Any, ...], Bound] = {}  # by shapes and dtypes

    def table_bytes(self, rows: int) -> int:
        """Return the size of the tables of a rank with this many routed rows."""
        return self._scalars_at(rows) + SCALAR * rows

    def _scalars_at(self, rows: int) -> int:
        return self._order_at + aligned(4 * rows)

    def tables(
        self,
        tables: Region,
        rows_of_slot: torch.Tensor,
        received: torch.Tensor,
        rank_loads: torch.Tensor,
        rows: int,
        capacity: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the tables of [S] the rows this rank sends and [R, L] the rows it receives.

        rank_loads: [R] rows that every rank serves.   rows, capacity: the most routed rows of a
        rank, and the most rows that it can serve.
        Returns offsets and `wrong` of a `RowMap`.
        """
        heads = torch.empty(self.num_local + 2, dtype=torch.int32, device=self.device)
        begins, blocks = tables.part(self._begins_at), tables.part(0)
        arguments = rows_of_slot, received, rank_loads, begins, blocks, heads, rows, capacity
        self._make_tables((2,), *arguments)
        return heads[:-1], heads[-1:]

    def expose(self, tables: Region, order: torch.Tensor, scalars: torch.Tensor, rows: int) -> None:
        """Publish the sending order [N], and a scalar of every routed row.

        rows: the most routed rows of a rank.
        """
        number = order.numel()
        assert scalars.numel() == number <= rows
        assert scalars.is_contiguous()
        if number:
            at, dtype = self._scalars_at(rows), accumulator(scalars.dtype)
            targets = tables.part(self._order_at), tables.part(at, at + SCALAR * rows, dtype)
            self._expose_routes((self.programs,), order, scalars, *targets, number)

    def expose_values(self, region: Region, values: torch.Tensor) -> None:
        """Publish the rows [T, D] of this rank's tokens, of any dtype."""
        assert values.is_contiguous()
        assert values.nbytes <= region.local.numel()
        if values.numel():
            size = word_size(values.data_ptr())
            launch = self._moves.get(("expose", size)) or self._expose_words(size)
            launch((self.programs,), values, region.local, values.nbytes)

    def _expose_words(self, size: int) -> Bound:
        launch = self._moves["expose", size] = Bound(
            kernels.expose_values,
            *(OPEN, OPEN, OPEN),
            WORD=WORDS[size],
            LANES=16 // size,
            B=IN_FLIGHT // size,
            num_warps=WARPS,
        )
        return launch

    def origins(
        self,
        tables: Region,
        received: torch.Tensor,
        origins: torch.Tensor,
        scalars: torch.Tensor,
        rows: int,
    ) -> None:
        """Read the origin of every arrived row [A], and its scalar.

        rows: the most routed rows of a rank.
        """
        if received.numel() and len(origins):
            parts = min(cdiv(rows, 1024), self.programs // received.numel())
            sizes = len(origins), rows, self._scalars_at(rows)
            self._origins(
                (self.num_local, self.ranks, max(1, parts)),
                *(tables.addresses, received, tables.part(0), origins, scalars, *sizes),
            )

    def landings(
        self,
        tables: Region,
        slots: torch.Tensor,
        positions: torch.Tensor,
        landings: torch.Tensor,
        capacity: int,
    ) -> None:
        """Read where every routed row `[T, K]` is served."""
        number = slots.numel()
        if number:
            begins = tables.part(self._begins_at)
            arguments = tables.addresses, slots, positions, begins, landings, number, capacity
            self._landings((cdiv(number, 256),), *arguments)

    def gather_rows(
        self, values: Region, row_map: RowMap, gathered: torch.Tensor, choices: int
    ) -> None:
        """Read the values [A, D] of all arrived rows; rows behind them stay."""
        row_bytes = gathered.shape[1] * gathered.itemsize
        assert gathered.is_contiguous()
        if not gathered.numel():
            return
        size = word_size(gathered.data_ptr() | row_bytes)
        key = "gather", row_bytes, size, choices
        launch = self._moves.get(key)
        if launch is None:
            rows, columns = tile_of(row_bytes // size, IN_FLIGHT // size)
            launch = self._moves[key] = Bound(
                kernels.gather_rows,
                *(OPEN, OPEN, OPEN, OPEN, self.num_local),
                CHOICES=choices,
                WORD=WORDS[size],
                WORDS=row_bytes // size,
                B=rows,
                C=columns,
                num_warps=WARPS,
            )
        launch((self.programs,), values.addresses, row_map.origins, row_map.offsets, gathered)

    def sum_rows(
        self,
        served: Region,
        served_scalars: Region | None,
        row_map: RowMap,
        summed: torch.Tensor,
        scalars: torch.Tensor | None,
        choices: int,
    ) -> None:
        """Read the served rows of every token and sum them [T, D], in the order of choices.

        scalars: [T, K] receives the scalars of the rows; None: not needed.
        """
        tokens, width = summed.shape
        assert summed.is_contiguous()
        assert scalars is None or scalars.is_contiguous()
        if not summed.numel():
            return
        key = "sum", width, summed.dtype, choices
        launch = self._moves.get(key)
        if launch is None:
            per_choice = max(IN_FLIGHT // power_of_2(choices), 4 << 10)
            rows, columns = tile_of(width, per_choice // summed.itemsize)
            launch = self._moves[key] = Bound(
                kernels.sum_rows,
                *(OPEN, OPEN, OPEN, OPEN, OPEN, OPEN, OPEN),
                CHOICES=choices,
                WIDTH=width,
                B=rows,
                C=columns,
                num_warps=WARPS if choices <= 8 else WARPS // 2,
            )
        of_scalars = None if served_scalars is None else served_scalars.addresses
        addresses = served.addresses, of_scalars
        results = summed, scalars, row_map.wrong
        launch((self.programs,), *addresses, row_map.landings, *results, tokens)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def word_size(number: int) -> int:
    """Return the bytes of the widest words that divide an address or a length."""
    return next(size for size in WORDS if number % size == 0)


def tile_of(width: int, most: int) -> tuple[int, int]:
    """Return rows and columns of a tile of `most` elements: powers of two, few columns unused."""
    columns = [1 << power for power in range(11, 6, -1) if 1 << power <= most]
    best = min(columns, key=lambda number: -width % number)
    best = min(best, power_of_2(width))
    return most // best, best
