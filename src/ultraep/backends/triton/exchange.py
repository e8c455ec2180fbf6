"""Buffers and launches of stages 5 and 7 between GPUs that access each other's memory.

Every rank publishes what it has, and reads what it needs:

    exchange.tables(rows_of_slot, receive_counts, row_map)
    exchange.expose(order, weights)
    exchange.expose_values(tokens, values)
    ...                                                     barrier
    exchange.origins(receive_counts, row_map, gates)
    exchange.landings(slots, positions, row_map)
    exchange.gather_rows(values, row_map, arrivals)
    ...                                                     experts fill `served_rows(served, ...)`
    ...                                                     barrier
    exchange.sum_rows(served, row_map, outputs)

No rank may publish again before the others have read. Backward does the same with gradients of the
outputs as values, and needs no tables: the `RowMap` has them.

Shapes: T tokens, K choices, N = T * K routed rows, A arrived rows, S slots of all ranks, L slots of
this rank, R ranks, D width of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton.language as tl

from ultraep.arrays import IntArray
from ultraep.backends.triton.kernels import exchange as kernels
from ultraep.backends.triton.launch import cdiv, power_of_2, quick
from ultraep.comm import Region
from ultraep.errors import ConfigError, LoadError
from ultraep.ops.products import accumulator

ALIGNMENT = 128  # bytes, of every part of a region
WORDS = {4: torch.int32, 2: torch.int16, 1: torch.int8}  # dtypes that move rows, by their bytes
TYPES = {4: tl.int32, 2: tl.int16, 1: tl.int8}
SCALAR = 8  # bytes, at most
IN_FLIGHT = 64 << 10  # bytes that a program loads at once, so that few programs suffice
WARPS = 16


class RegionLayout:
    """Sizes and offsets of the regions of a group. It must be equal on every rank.

    first_slot_of_rank: [R + 1] of the topology.
    tokens, top_k: most tokens of a rank, and choices per token.
    capacity: rows that may arrive at a rank.
    """

    def __init__(
        self, *, first_slot_of_rank: IntArray, tokens: int, top_k: int, capacity: int
    ) -> None:
        for name, size in (("tokens", tokens), ("top_k", top_k), ("capacity", capacity)):
            if size < 1:
                raise ConfigError(f"{name} must be positive, got {size}")
        self.first_slot_of_rank, self.tokens = first_slot_of_rank, tokens
        self.top_k, self.capacity = top_k, capacity
        self.ranks, self.num_slots = len(first_slot_of_rank) - 1, int(first_slot_of_rank[-1])
        self.most_local = int(np.diff(first_slot_of_rank).max())  # slots of one rank
        self.rows = tokens * top_k  # routed rows of a rank, at most
        # Bytes from the beginning of the tables, which start with the sending order.
        self.begins_at = aligned(4 * self.rows)
        self.blocks_at = self.begins_at + aligned(4 * self.num_slots)
        self.scalars_at = self.blocks_at + aligned(4 * self.ranks * self.most_local)
        self.table_bytes = self.scalars_at + aligned(SCALAR * self.rows)
        self.served_at = aligned(SCALAR * capacity)  # the scalars of served rows come first

    def value_bytes(self, row_bytes: int) -> int:
        """Return the size of a region for the values of all tokens."""
        return aligned(self.tokens * row_bytes)

    def served_bytes(self, row_bytes: int) -> int:
        """Return the size of a region for served rows and their scalars."""
        return self.served_at + aligned(self.capacity * row_bytes)


@dataclass(frozen=True, slots=True)
class RowMap:
    """Source and destination of every row, for one microbatch, forward and backward."""

    offsets: torch.Tensor  # [L + 1] where the arrivals of each slot begin; the last: A
    origins: torch.Tensor  # [capacity] rank * rows + routed row of each arrived row; -1: none
    landings: torch.Tensor  # [rows] rank * capacity + arrived row of each routed row; -1: none


class RowExchange:
    """Moves rows between the ranks of a group. Every method launches the same kernels each time.

    tables: a region of `layout.table_bytes`, for the routes of one microbatch at a time.
    programs: at most this many programs move rows at a time.
    `faults`: how often more rows arrived than the capacity, and the most that ever arrived.
    """

    def __init__(self, layout: RegionLayout, *, rank: int, tables: Region, programs: int) -> None:
        assert tables.local.numel() >= layout.table_bytes
        self.layout, self.rank, self.programs, self.region = layout, rank, programs, tables
        self.device, first_slot = tables.local.device, layout.first_slot_of_rank
        self.num_local = int(first_slot[rank + 1] - first_slot[rank])
        rank_of_slot = np.repeat(np.arange(layout.ranks), np.diff(first_slot))
        self.first_slot_of_rank = torch.from_numpy(first_slot.copy()).to(self.device, torch.int32)
        self.rank_of_slot = torch.from_numpy(rank_of_slot).to(self.device, torch.int32)
        self.order = self._table(0, layout.rows)
        self.begins = self._table(layout.begins_at, layout.num_slots)
        self.blocks = self._table(layout.blocks_at, layout.ranks * layout.most_local)
        self.faults = torch.zeros(2, dtype=torch.int32, device=self.device)
        self._served: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def _table(self, at: int, length: int) -> torch.Tensor:
        return self.region.local[at : at + 4 * length].view(torch.int32)

    def row_map(self) -> RowMap:
        """Allocate the routes of one microbatch, in one piece."""
        capacity, rows = self.layout.capacity, self.layout.rows
        offsets = cdiv(self.num_local + 1, 2)  # half the size of the others
        piece = torch.zeros(capacity + rows + offsets, dtype=torch.int64, device=self.device)
        origins, landings, rest = piece.split([capacity, rows, offsets])
        return RowMap(rest.view(torch.int32)[: self.num_local + 1], origins, landings)

    def served_rows(self, served: Region, width: int, dtype: torch.dtype) -> torch.Tensor:
        """[capacity, D] the part of a region for the rows that this rank serves."""
        key = (served.local.data_ptr(), width, dtype)
        if key not in self._served:
            begin, end = self.layout.served_at, self.layout.served_bytes(width * dtype.itemsize)
            rows = served.local[begin:end].view(dtype)
            self._served[key] = rows[: self.layout.capacity * width]
        return self._served[key].view(self.layout.capacity, width)  # autograd needs a new view

    def served_scalars(self, served: Region, dtype: torch.dtype) -> torch.Tensor:
        """[capacity] the part of a region for one scalar of every arrived row."""
        return served.local[: dtype.itemsize * self.layout.capacity].view(dtype)

    def scalars(self, dtype: torch.dtype) -> torch.Tensor:
        """[N] the part of the tables for one scalar of every routed row."""
        begin = self.layout.scalars_at
        end = begin + dtype.itemsize * self.layout.rows
        return self.region.local[begin:end].view(dtype)

    def tables(self, rows_of_slot: torch.Tensor, received: torch.Tensor, row_map: RowMap) -> None:
        """Write the tables of [S] the rows this rank sends and [R, L] the rows it receives."""
        layout = self.layout
        assert rows_of_slot.numel() == layout.num_slots
        self._check_received(received)
        tile = min(2048, power_of_2(max(layout.num_slots, received.numel(), 1)))
        quick(kernels.make_tables)[(2,)](
            rows_of_slot,
            received,
            self.begins,
            self.blocks,
            row_map.offsets,
            self.faults,
            layout.num_slots,
            self.num_local,
            layout.ranks,
            layout.rows,
            layout.capacity,
            layout.most_local,
            B=tile,
            num_warps=max(1, tile // 256),
        )

    def expose(self, order: torch.Tensor, scalars: torch.Tensor) -> None:
        """Publish the sending order [N], and a scalar of every routed row."""
        self._check_rows(order.numel())
        assert scalars.numel() == order.numel()
        assert scalars.is_contiguous()
        if order.numel():
            quick(kernels.expose_routes)[(self.programs,)](
                order,
                scalars,
                self.order,
                self.scalars(accumulator(scalars.dtype)),
                order.numel(),
                B=1024,
                num_warps=8,
            )

    def expose_values(self, values: torch.Tensor, region: Region) -> None:
        """Publish the rows [T, D] of this rank's tokens, of any dtype."""
        self._check_rows(len(values) * self.layout.top_k)
        assert values.is_contiguous()
        assert values.nbytes <= region.local.numel()
        if not values.numel():
            return
        size = word_size(values.data_ptr())
        quick(kernels.expose_values)[(self.programs,)](
            values.view(-1).view(torch.uint8),
            region.local,
            values.nbytes,
            WORD=TYPES[size],
            LANES=16 // size,
            B=IN_FLIGHT // size,
            num_warps=WARPS,
        )

    def origins(self, received: torch.Tensor, row_map: RowMap, scalars: torch.Tensor) -> None:
        """Read the origin of every arrived row, and its scalar `[capacity]`."""
        layout, rows = self.layout, 1024
        self._check_received(received)
        if not received.numel():
            return
        parts = min(cdiv(layout.rows, rows), self.programs // received.numel())
        quick(kernels.origins)[(self.num_local, layout.ranks, max(1, parts))](
            self.region.addresses,
            received,
            self.blocks,
            self.first_slot_of_rank,
            row_map.origins,
            scalars,
            self.rank,
            self.num_local,
            layout.capacity,
            layout.rows,
            layout.most_local,
            BEGINS=layout.begins_at,
            SCALARS=layout.scalars_at,
            B=rows,
            num_warps=4,
        )

    def gather_rows(self, values: Region, row_map: RowMap, gathered: torch.Tensor) -> None:
        """Read the values [capacity, D] of all arrived rows; the rest stays."""
        row_bytes = gathered.shape[1] * gathered.itemsize
        assert gathered.is_contiguous()
        assert len(gathered) >= self.layout.capacity
        assert values.local.numel() >= self.layout.value_bytes(row_bytes)
        size = word_size(gathered.data_ptr() | row_bytes)
        rows, columns = tile_of(row_bytes // size, IN_FLIGHT // size)
        quick(kernels.gather_rows)[(self.programs,)](
            values.addresses,
            row_map.origins,
            row_map.offsets,
            gathered.view(-1).view(WORDS[size]),
            self.num_local,
            ROWS=self.layout.rows,
            CHOICES=self.layout.top_k,
            WORDS=row_bytes // size,
            B=rows,
            C=columns,
            num_warps=WARPS,
        )

    def landings(self, slots: torch.Tensor, positions: torch.Tensor, row_map: RowMap) -> None:
        """Read where every routed row `[T, K]` is served."""
        layout, rows = self.layout, 256
        self._check_rows(slots.numel())
        if not slots.numel():
            return
        quick(kernels.landings)[(cdiv(slots.numel(), rows),)](
            self.region.addresses,
            slots,
            positions,
            self.begins,
            self.rank_of_slot,
            self.first_slot_of_rank,
            row_map.landings,
            self.rank,
            layout.num_slots,
            slots.numel(),
            layout.capacity,
            layout.most_local,
            BLOCKS=layout.blocks_at,
            B=rows,
            num_warps=4,
        )

    def sum_rows(
        self,
        served: Region,
        row_map: RowMap,
        summed: torch.Tensor,
        scalars: torch.Tensor | None = None,
    ) -> None:
        """Read the served rows of every token and sum them [T, D], in the order of choices.

        scalars: [T, K] receives the scalars of the rows; None: not needed.
        """
        layout, (tokens, width) = self.layout, summed.shape
        self._check_rows(tokens * layout.top_k)
        assert summed.is_contiguous()
        assert served.local.numel() >= layout.served_bytes(width * summed.itemsize)
        assert scalars is None or scalars.is_contiguous()
        if not tokens:
            return
        per_choice = max(IN_FLIGHT // power_of_2(layout.top_k), 4 << 10)
        rows, columns = tile_of(width, per_choice // summed.itemsize)
        quick(kernels.sum_rows)[(self.programs,)](
            served.addresses,
            row_map.landings,
            summed,
            scalars,
            tokens,
            CHOICES=layout.top_k,
            CAPACITY=layout.capacity,
            ROWS_AT=layout.served_at,
            WIDTH=width,
            B=rows,
            C=columns,
            num_warps=WARPS if layout.top_k <= 8 else WARPS // 2,
        )

    def _check_rows(self, rows: int) -> None:
        if rows > self.layout.rows:
            raise LoadError(
                f"got {rows} routed rows, but the regions hold {self.layout.rows}; allocate more"
            )

    def _check_received(self, received: torch.Tensor) -> None:
        assert received.shape == (self.layout.ranks, self.num_local)
        assert received.is_contiguous()


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
