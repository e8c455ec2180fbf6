"""Buffers and launches of stages 5 and 7 between GPUs that read each other's memory.

Every rank exposes what it has, and pulls what it needs:

    exchange.tables(rows_of_slot, receive_counts, row_map)
    exchange.expose(order, weights)
    exchange.expose_values(tokens, values)
    ...                                                     all ranks wait for each other
    exchange.origins(receive_counts, row_map, gates)
    exchange.landings(slots, positions, row_map)
    exchange.gather_rows(values, row_map, arrivals)
    ...                                                     experts fill `served_rows(served, ...)`
    ...                                                     all ranks wait for each other
    exchange.sum_rows(served, row_map, outputs)

Nobody may expose anew before the others have pulled. The way back of gradients is the same with
gradients of outputs as values, and needs no tables: they are in the `RowMap`.

Shapes: T tokens, K choices, N = T * K routed rows, A arrived rows, S slots of all ranks, L slots of
this rank, R ranks, D width of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import triton.language as tl

from ultraep.arrays import IntArray
from ultraep.backends.triton.kernels import exchange as kernels
from ultraep.backends.triton.launch import cdiv, power_of_2, quick
from ultraep.comm import Region
from ultraep.errors import ConfigError, LoadError

ALIGNMENT = 128  # bytes, of every part of a region
WORDS = {4: torch.int32, 2: torch.int16, 1: torch.int8}  # in which rows are moved, by their bytes
TYPES = {4: tl.int32, 2: tl.int16, 1: tl.int8}
SCALAR = 8  # bytes, at most
IN_FLIGHT = 64 << 10  # bytes that a program has asked for at once; few programs suffice then
WARPS = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class RegionLayout:
    """What the regions of a group hold. It must be the same on every rank.

    first_slot_of_rank: [R + 1] of the topology.
    tokens, top_k: the most tokens that a rank has at once, and the choices of each.
    capacity: rows that may arrive at a rank.
    """

    first_slot_of_rank: IntArray
    tokens: int
    top_k: int
    capacity: int

    def __post_init__(self) -> None:
        for name in ("tokens", "top_k", "capacity"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")

    @cached_property
    def ranks(self) -> int:
        return len(self.first_slot_of_rank) - 1

    @cached_property
    def num_slots(self) -> int:
        return int(self.first_slot_of_rank[-1])

    @cached_property
    def most_local(self) -> int:
        """Slots of the rank that has the most of them."""
        return int(np.diff(self.first_slot_of_rank).max())

    @cached_property
    def rows(self) -> int:
        """Routed rows of a rank, at most."""
        return self.tokens * self.top_k

    @cached_property
    def begins_at(self) -> int:
        """Bytes from the beginning of the tables, where the order stands."""
        return aligned(4 * self.rows)

    @cached_property
    def blocks_at(self) -> int:
        return self.begins_at + aligned(4 * self.num_slots)

    @cached_property
    def scalars_at(self) -> int:
        return self.blocks_at + aligned(4 * self.ranks * self.most_local)

    @cached_property
    def table_bytes(self) -> int:
        """Size of the region of the tables."""
        return self.scalars_at + aligned(SCALAR * self.rows)

    def value_bytes(self, row_bytes: int) -> int:
        """Size of a region for the values of all tokens."""
        return aligned(self.tokens * row_bytes)

    @cached_property
    def served_at(self) -> int:
        """Bytes from the beginning of what was served, where the scalars stand, to the rows."""
        return aligned(SCALAR * self.capacity)

    def served_bytes(self, row_bytes: int) -> int:
        """Size of a region for served rows and their scalars."""
        return self.served_at + aligned(self.capacity * row_bytes)


@dataclass(frozen=True, slots=True)
class RowMap:
    """Where every row came from, and where it went: all that is needed until the gradients."""

    offsets: torch.Tensor  # [L + 1] where the arrivals of each slot begin; the last: A
    origins: torch.Tensor  # [capacity] rank * rows + routed row of each arrived row; -1: unknown
    landings: torch.Tensor  # [rows] rank * capacity + arrived row of each routed row; -1: none


class RowExchange:
    """Moves rows between the ranks of a group. All verbs only launch kernels, always the same.

    tables: a region of `layout.table_bytes`, for the routes of one microbatch after the other.
    programs: of the kernels that move rows; no more of them than this run at a time.
    `faults`: how often more rows arrived than there is room for, and the most that ever arrived.
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
        """Buffers for the routes of one microbatch, in one piece."""
        capacity, rows = self.layout.capacity, self.layout.rows
        offsets = cdiv(self.num_local + 1, 2)  # of half the size
        piece = torch.zeros(capacity + rows + offsets, dtype=torch.int64, device=self.device)
        origins, landings, rest = piece.split([capacity, rows, offsets])
        return RowMap(rest.view(torch.int32)[: self.num_local + 1], origins, landings)

    def served_rows(self, served: Region, width: int, dtype: torch.dtype) -> torch.Tensor:
        """[capacity, D] the part of a region for what this rank serves, by arrived row."""
        known = (served.local.data_ptr(), width, dtype)
        if known not in self._served:
            begin, end = self.layout.served_at, self.layout.served_bytes(width * dtype.itemsize)
            rows = served.local[begin:end].view(dtype)
            self._served[known] = rows[: self.layout.capacity * width]
        return self._served[known].view(self.layout.capacity, width)  # autograd wants a new one

    def served_scalars(self, served: Region, dtype: torch.dtype) -> torch.Tensor:
        """[capacity] the part for one scalar of every arrived row."""
        return served.local[: dtype.itemsize * self.layout.capacity].view(dtype)

    def scalars(self, dtype: torch.dtype) -> torch.Tensor:
        """[N] the part of the tables for a scalar of every routed row."""
        begin = self.layout.scalars_at
        end = begin + dtype.itemsize * self.layout.rows
        return self.region.local[begin:end].view(dtype)

    def tables(self, rows_of_slot: torch.Tensor, received: torch.Tensor, row_map: RowMap) -> None:
        """Where the rows of every slot begin, here and for the others.

        rows_of_slot: [S] rows that this rank sends.   received: [R, L] those that it gets.
        """
        layout = self.layout
        assert rows_of_slot.numel() == layout.num_slots
        self._check_received(received)
        most = max(layout.num_slots, received.numel(), 1)
        tile = min(2048, power_of_2(most))
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
        """[N] the routed rows in the order of sending, and a scalar of each by routed row."""
        self._check_rows(order.numel())
        assert scalars.numel() == order.numel()
        assert scalars.is_contiguous()
        if order.numel():
            quick(kernels.expose_routes)[(self.programs,)](
                order,
                scalars,
                self.order,
                self.scalars(scalar_type(scalars.dtype)),
                order.numel(),
                B=1024,
                num_warps=8,
            )

    def expose_values(self, values: torch.Tensor, region: Region) -> None:
        """[T, D] rows of this rank's tokens, of any type."""
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
        """Pulls from where every arrived row comes, and its scalar `[capacity]`."""
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
        """[capacity, D] pulls the values of all arrived rows; what is behind them stays."""
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
        """Pulls where every routed row `[T, K]` is served."""
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
        """[T, D] pulls what was served for every token and adds it up, in the order of choices.

        scalars: [T, K] where to put the scalars that stand beside the rows, if they are wanted.
        """
        layout, (tokens, width) = self.layout, summed.shape
        self._check_rows(tokens * layout.top_k)
        assert summed.is_contiguous()
        assert served.local.numel() >= layout.served_bytes(width * summed.itemsize)
        assert scalars is None or scalars.is_contiguous()
        if not tokens:
            return
        of_choice = max(IN_FLIGHT // power_of_2(layout.top_k), 4 << 10)
        rows, columns = tile_of(width, of_choice // summed.itemsize)
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
            raise LoadError(f"{rows} routed rows, but the regions are for {self.layout.rows}")

    def _check_received(self, received: torch.Tensor) -> None:
        assert received.shape == (self.layout.ranks, self.num_local)
        assert received.is_contiguous()


def scalar_type(dtype: torch.dtype) -> torch.dtype:
    """In which scalars of that type travel."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def word_size(number: int) -> int:
    """Bytes of the widest words that divide an address, or a length, or both joined by `|`."""
    return next(size for size in WORDS if number % size == 0)


def tile_of(width: int, most: int) -> tuple[int, int]:
    """Rows and columns of a tile of so many elements: powers of two, few columns of it unused."""
    columns = [1 << power for power in range(11, 6, -1) if 1 << power <= most]
    best = min(columns, key=lambda number: -width % number)
    best = min(best, power_of_2(width))
    return most // best, best
