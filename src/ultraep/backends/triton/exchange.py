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

import numpy as np
import torch
import triton.language as tl

from ultraep.backends.triton.kernels import arrivals
from ultraep.backends.triton.kernels import exchange as kernels
from ultraep.backends.triton.launch import cdiv, power_of_2, quick
from ultraep.backends.triton.regions import RegionLayout
from ultraep.comm import Region
from ultraep.errors import LoadError

WORDS = {4: torch.int32, 2: torch.int16, 1: torch.int8}  # in which rows are moved, by their bytes
TYPES = {4: tl.int32, 2: tl.int16, 1: tl.int8}
IN_FLIGHT = 64 << 10  # bytes that a program has asked for at once; few programs suffice then
WARPS = 16
BY_TOKENS = 16  # ranks, up to which enough tokens have several rows on one of them


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
        self._arrivals = self._room_for_arrivals() if layout.ranks <= BY_TOKENS else None
        self._served: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def _table(self, at: int, length: int) -> torch.Tensor:
        return self.region.local[at : at + 4 * length].view(torch.int32)

    @torch.inference_mode(False)
    def _room_for_arrivals(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens of all ranks] how many rows of each arrived, `[K, these]` which; for one call."""
        tokens = self.layout.ranks * self.layout.tokens
        numbers = (1 + self.layout.top_k) * tokens
        piece = torch.empty(numbers, dtype=torch.int32, device=self.device)
        return piece[:tokens], piece[tokens:]

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
        words, num_words = gathered.view(-1).view(WORDS[size]), row_bytes // size
        if self._arrivals is None:
            self._gather_in_order(values, row_map, words, num_words)
        else:
            self._gather_by_tokens(values, row_map, words, num_words, self._arrivals)

    def _gather_in_order(
        self, values: Region, row_map: RowMap, gathered: torch.Tensor, num_words: int
    ) -> None:
        rows, columns = tile_of(num_words, IN_FLIGHT // gathered.itemsize)
        quick(kernels.gather_rows)[(self.programs,)](
            values.addresses,
            row_map.origins,
            row_map.offsets,
            gathered,
            self.num_local,
            ROWS=self.layout.rows,
            CHOICES=self.layout.top_k,
            WORDS=num_words,
            B=rows,
            C=columns,
            num_warps=WARPS,
        )

    def _gather_by_tokens(
        self,
        values: Region,
        row_map: RowMap,
        gathered: torch.Tensor,
        num_words: int,
        listed: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Many small programs: some look rows up while others move them."""
        numbers, rows_of_token = listed
        numbers.zero_()
        quick(arrivals.list_arrivals)[(6 * self.programs,)](
            row_map.origins,
            row_map.offsets,
            numbers,
            rows_of_token,
            gathered,
            self.num_local,
            TOKENS=len(numbers),
            CHOICES=self.layout.top_k,
            WORDS=num_words,
            B=512,
            C=4,
            num_warps=4,
        )
        rows, columns = tile_of(num_words, IN_FLIGHT // 4 // gathered.itemsize)
        quick(arrivals.gather_tokens)[(6 * self.programs,)](
            values.addresses,
            numbers,
            rows_of_token,
            gathered,
            OWN=self.layout.tokens,
            TOKENS=len(numbers),
            WORDS=num_words,
            CHOICES=self.layout.top_k,
            B=rows,
            C=columns,
            num_warps=WARPS // 4,
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


def word_size(number: int) -> int:
    """Bytes of the widest words that divide an address, or a length, or both joined by `|`."""
    return next(size for size in WORDS if number % size == 0)


def tile_of(width: int, most: int) -> tuple[int, int]:
    """Rows and columns of a tile of so many elements: powers of two, few columns of it unused."""
    columns = [1 << power for power in range(11, 6, -1) if 1 << power <= most]
    best = min(columns, key=lambda number: -width % number)
    best = min(best, power_of_2(width))
    return most // best, best
