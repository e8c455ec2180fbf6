"""MappedRows: the rows of one microbatch; each rank pulls its rows from the memory of others.

Shapes: T tokens, K experts per token, A arrived rows, L slots of this rank, D model width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ultraep.backends.triton.exchange import SCALAR, RowMap
from ultraep.dispatch import Moved
from ultraep.errors import ConfigError
from ultraep.ops.modes import outside_dispatch_modes
from ultraep.ops.products import accumulator
from ultraep.passes import Passes
from ultraep.position import At
from ultraep.runtime.device_plan import DeviceRoutes
from ultraep.runtime.mapped.memory import MappedMemory

if TYPE_CHECKING:
    from ultraep.runtime.mapped.replicas import MappedReplicas


class MappedRows:
    """Moves rows between tokens and slots.

    rank_loads: [R] rows that every rank serves.
    begins: first row of each slot of this rank, if the host knows them.
    most_rows: length of the tensors of rows otherwise; rows behind the last one are unused.
    """

    def __init__(
        self,
        passes: Passes,
        memory: MappedMemory,
        routes: DeviceRoutes,
        rank_loads: torch.Tensor,
        replicas: MappedReplicas | None,
        begins: list[int] | None,
        most_rows: int = 0,
    ) -> None:
        num_rows = most_rows if begins is None else begins[-1]
        self._keep(passes, memory, routes.slots, replicas, num_rows, begins)
        self._routes = routes
        self._tokens, top_k = memory.tokens, self._shape[1]
        self._capacity = memory.rows
        memory.tables_of = passes.count
        self.offsets, self._wrong = memory.exchange.tables(
            memory.tables(top_k),
            routes.rows_of_slot,
            routes.receive_counts,
            rank_loads,
            self._tokens * top_k,
            self._capacity,
        )

    def _keep(
        self,
        passes: Passes,
        memory: MappedMemory,
        slots: torch.Tensor,
        replicas: MappedReplicas | None,
        num_rows: int,
        begins: list[int] | None = None,
    ) -> None:
        self.passes, self._memory, self._replicas, self.slots = passes, memory, replicas, slots
        self._shape, self._num_rows = slots.shape, num_rows
        self._begins = begins
        self._map: RowMap | None = None

    @outside_dispatch_modes
    def begins(self) -> list[int]:
        if self._begins is None:
            self._begins = self.offsets.tolist()
        return self._begins

    def begin_backward(self) -> None:
        self.passes.begin_backward()
        self._meet()
        if self._replicas is not None:
            self._replicas.begin_again()

    def _meet(self) -> None:
        """Compare this position at the next barrier."""
        at = At.BACKWARD if self.passes.record.backward else At.ROWS
        self._memory.position = *self.passes.position(at).words, 0

    def to_slots(self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None) -> Moved:
        record, memory, exchange = self.passes.record, self._memory, self._memory.exchange
        record.at("dispatch", "combine back")
        self._meet()
        values_TD = values_TD.contiguous()
        nbytes = memory.tokens * values_TD.shape[1] * values_TD.itemsize
        exchange.expose_values(memory.writable("values", nbytes), values_TD)
        gates_A = None
        if scalars_TK is None:
            memory.barrier()
        else:
            gates_A = self._exchange_routes(scalars_TK.contiguous())
        assert self._map is not None, "forward sends the gates"
        rows_AD = values_TD.new_empty(self._num_rows, values_TD.shape[1])
        values = memory.readable("values", nbytes)
        exchange.gather_rows(values, self._map, rows_AD, self._shape[1])
        record.at("experts", "experts back")
        return rows_AD, gates_A

    def _exchange_routes(self, gates_TK: torch.Tensor) -> torch.Tensor:
        """Publish the gates, meet the other ranks, and find the routes of all rows.

        Returns [A] the gates of the arrived rows.
        """
        memory, exchange, routes = self._memory, self._memory.exchange, self._routes
        if memory.tables_of != self.passes.count:
            raise ConfigError(
                f"microbatch {self.passes.count} cannot be dispatched after microbatch "
                f"{memory.tables_of} was rerouted: on a GPU, dispatch one microbatch before "
                "reroute of the next"
            )
        top_k, arrived = self._shape[1], self._num_rows
        tables, rows = memory.tables(top_k), self._tokens * top_k
        exchange.expose(tables, routes.order, gates_TK, rows)
        memory.barrier()
        gates_A = gates_TK.new_empty(arrived, dtype=accumulator(gates_TK.dtype))
        piece = self._wrong.new_empty(arrived + gates_TK.numel(), dtype=torch.int64)
        origins, landings = piece[:arrived], piece[arrived:]
        exchange.origins(tables, routes.receive_counts, origins, gates_A, rows)
        exchange.landings(tables, routes.slots, routes.positions, landings, self._capacity)
        self._map = RowMap(self.offsets, self._wrong, origins, landings)
        return gates_A

    def to_tokens(self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None) -> Moved:
        record, memory, exchange = self.passes.record, self._memory, self._memory.exchange
        record.at("combine", "dispatch back")
        self._meet()
        assert self._map is not None, "rows move to the slots first"
        count, width = rows_AD.shape
        nbytes = memory.rows * width * rows_AD.itemsize
        if rows_AD.data_ptr() != memory.region("served", nbytes).local.data_ptr():
            memory.writable("served", nbytes)
            memory.served(width, rows_AD.dtype, count).copy_(rows_AD)
        scalars_TK = region = None
        if scalars_A is not None:
            region = memory.writable("scalars", memory.rows * SCALAR)
            region.local[: scalars_A.nbytes].view(scalars_A.dtype).copy_(scalars_A)
            scalars_TK = scalars_A.new_empty(self._shape)
        memory.barrier()
        sums_TD = rows_AD.new_empty(self._shape[0], width)
        if region is not None:
            region = memory.readable("scalars", memory.rows * SCALAR)
        rows = memory.readable("served", nbytes)
        exchange.sum_rows(rows, region, self._map, sums_TD, scalars_TK, self._shape[1])
        if record.backward:
            record.end()
        return sums_TD, scalars_TK


class OwnRows(MappedRows):
    """The rows of a rank alone: it serves all of them, so their map needs no tables of others.

    order, positions: `[N]` the rows in the order of the slots, and where each row is there; -1:
        padding, which the order has at its end.
    """

    def __init__(
        self,
        passes: Passes,
        memory: MappedMemory,
        slots: torch.Tensor,
        replicas: MappedReplicas | None,
        offsets: torch.Tensor,
        order: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        self._keep(passes, memory, slots, replicas, slots.numel())
        self.offsets = offsets
        self._map = RowMap(offsets, memory.signals.words[:1], order, positions)

    def _meet(self) -> None:
        """There is no other rank."""

    def _exchange_routes(self, gates_TK: torch.Tensor) -> torch.Tensor:
        assert self._map is not None
        return gates_TK.take(self._map.origins).to(accumulator(gates_TK.dtype))
