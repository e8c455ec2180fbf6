"""DeviceRoads: stages 5 and 7 of one microbatch in one layer, without the host.

Shapes: T tokens, K experts per token, A rows that there is room for, D model width.
"""

from __future__ import annotations

import torch

from ultraep.runtime.control import DeviceRoutes
from ultraep.runtime.data import DataPlane
from ultraep.runtime.device_replicas import DeviceReplicas


class DeviceRoads:
    """Both directions of the way between tokens and slots; each rank pulls what it needs."""

    def __init__(
        self, data: DataPlane, routes: DeviceRoutes, replicas: DeviceReplicas | None
    ) -> None:
        self._data, self._routes, self._replicas = data, routes, replicas
        self._ways = data.exchange.ways()
        self._shape = routes.slots.shape
        self.counts = self._ways.offsets

    def on_return(self) -> None:
        """Backward begins: the weights of the copies are needed again."""
        if self._replicas is not None:
            self._replicas.begin()

    def to_slots(
        self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[A, D] a row for each choice of every token, and `[A]` its scalar, in slot order."""
        data, exchange, routes = self._data, self._data.exchange, self._routes
        values_TD = values_TD.contiguous()
        nbytes = exchange.layout.value_bytes(values_TD.shape[1] * values_TD.itemsize)
        exchange.expose_values(values_TD, data.to_write("values", nbytes))
        if scalars_TK is not None:
            exchange.tables(routes.rows_of_slot, routes.receive_counts, self._ways)
            exchange.expose(routes.order, scalars_TK.contiguous())
        data.meet()
        if scalars_TK is not None:
            exchange.origins(routes.receive_counts, self._ways)
            exchange.landings(routes.slots, routes.positions, self._ways)
        rows_AD = values_TD.new_empty(data.capacity, values_TD.shape[1])
        exchange.gather_rows(data.to_read("values", nbytes), self._ways, rows_AD)
        return rows_AD, None if scalars_TK is None else self._ways.weights

    def to_tokens(
        self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, D] the rows of each token, summed in the order of its choices; `[T, K]` scalars."""
        data, exchange, width = self._data, self._data.exchange, rows_AD.shape[1]
        nbytes = exchange.layout.served_bytes(width * rows_AD.itemsize)
        served = exchange.served_rows(data.region("served", nbytes), width, rows_AD.dtype)
        if rows_AD.data_ptr() != served.data_ptr():
            data.to_write("served", nbytes)
            served.copy_(rows_AD)
        scalars_TK = None
        if scalars_A is not None:
            exchange.served_scalars(data.to_write("served", nbytes)).copy_(scalars_A)
            scalars_TK = scalars_A.new_empty(self._shape)
        data.meet()
        sums_TD = rows_AD.new_empty(self._shape[0], width)
        exchange.sum_rows(data.to_read("served", nbytes), self._ways, sums_TD, scalars_TK)
        return sums_TD, scalars_TK
