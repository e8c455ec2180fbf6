"""MappedRows: stages 5 and 7 of one microbatch in one layer, without the host.

Shapes: T tokens, K experts per token, A rows that there is room for, D model width.
"""

from __future__ import annotations

import torch

from ultraep.backends.triton.exchange import scalar_type
from ultraep.ops.modes import unseen
from ultraep.runtime.control import DeviceRoutes
from ultraep.runtime.mapped.memory import MappedMemory


class MappedRows:
    """Moves rows between tokens and slots; each rank pulls what it needs."""

    def __init__(self, memory: MappedMemory, routes: DeviceRoutes) -> None:
        self._memory, self._routes = memory, routes
        self._rows = memory.exchange.row_map()
        self.slots, self._shape = routes.slots, routes.slots.shape
        self.offsets = self._rows.offsets

    @unseen()
    def begins(self) -> list[int]:
        """The offsets on the host; waits for the device."""
        begins: list[int] = self.offsets.tolist()
        return begins

    def to_slots(
        self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[A, D] a row for each choice of every token, and `[A]` its scalar, in slot order."""
        memory, exchange, routes = self._memory, self._memory.exchange, self._routes
        values_TD = values_TD.contiguous()
        nbytes = exchange.layout.value_bytes(values_TD.shape[1] * values_TD.itemsize)
        exchange.expose_values(values_TD, memory.to_write("values", nbytes))
        if scalars_TK is not None:
            exchange.tables(routes.rows_of_slot, routes.receive_counts, self._rows)
            exchange.expose(routes.order, scalars_TK.contiguous())
        memory.meet()
        gates_A = None
        if scalars_TK is not None:
            gates_A = scalars_TK.new_empty(memory.capacity, dtype=scalar_type(scalars_TK.dtype))
            exchange.origins(routes.receive_counts, self._rows, gates_A)
            exchange.landings(routes.slots, routes.positions, self._rows)
        rows_AD = values_TD.new_empty(memory.capacity, values_TD.shape[1])
        exchange.gather_rows(memory.to_read("values", nbytes), self._rows, rows_AD)
        return rows_AD, gates_A

    def to_tokens(
        self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, D] the rows of each token, summed in the order of its choices; `[T, K]` scalars."""
        memory, exchange, width = self._memory, self._memory.exchange, rows_AD.shape[1]
        nbytes = exchange.layout.served_bytes(width * rows_AD.itemsize)
        served = exchange.served_rows(memory.region("served", nbytes), width, rows_AD.dtype)
        if rows_AD.data_ptr() != served.data_ptr():
            memory.to_write("served", nbytes)
            served[: len(rows_AD)].copy_(rows_AD)
        scalars_TK = None
        if scalars_A is not None:
            region = memory.to_write("served", nbytes)
            scalars = exchange.served_scalars(region, scalars_A.dtype)
            scalars[: len(scalars_A)].copy_(scalars_A)
            scalars_TK = scalars_A.new_empty(self._shape)
        memory.meet()
        sums_TD = rows_AD.new_empty(self._shape[0], width)
        exchange.sum_rows(memory.to_read("served", nbytes), self._rows, sums_TD, scalars_TK)
        return sums_TD, scalars_TK
