"""The hybrid plane of ranks that map each other's memory inside of their domain.

The host knows the plan, so it also knows how much memory a microbatch needs.
"""

from __future__ import annotations

import numpy as np
import torch

from ultraep.arrays import PADDING
from ultraep.bundle import Bundle, resolve
from ultraep.comm import Communicator, Peers, moved
from ultraep.microbatch import NO_LAYER, Inputs
from ultraep.passes import Passes
from ultraep.plan import Plan
from ultraep.reroute import Routes
from ultraep.runtime.device_plan import DeviceRoutes
from ultraep.runtime.hybrid.plane import HybridMicrobatch, HybridPlane
from ultraep.runtime.mapped.memory import MappedMemory
from ultraep.runtime.mapped.replicas import MappedReplicas
from ultraep.runtime.mapped.rows import MappedRows
from ultraep.runtime.microbatch import Context


class MappedHybridPlane(HybridPlane):
    """One rank of a group with several domains, whose ranks map each other's memory."""

    def __init__(self, context: Context, inside: Communicator, peers: Peers) -> None:
        super().__init__(context, inside)
        self._peers = peers
        with torch.inference_mode(False):
            self.memory = MappedMemory(peers, self.of_domain)

    def begin(self, inputs: Inputs) -> MappedHybridMicrobatch:
        self.kernels = self._kernels_for(inputs.ids)
        return MappedHybridMicrobatch(self, inputs)

    def prepare(self, ids: torch.Tensor, rows: torch.Tensor, bundle: Bundle) -> None:
        """Allocate memory as if every token had experts in all domains."""
        tokens, top_k = len(ids) * self.topology.num_domains, ids.shape[1]
        self.memory.fit(tokens, tokens * top_k)
        self.memory.prepare(resolve(bundle), rows, top_k)
        self.kernels = self._kernels_for(ids)

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def check(self) -> None:
        super().check()
        self.memory.check()

    def close(self) -> None:
        self._peers.close()
        super().close()


class MappedHybridMicrobatch(HybridMicrobatch):
    """One microbatch of one rank."""

    _plane: MappedHybridPlane
    _own_replicas: MappedReplicas | None = None

    def _fit(self, rows: int) -> None:
        self._plane.memory.fit(self._most_tokens, rows)

    def _replicas(self, plan: Plan) -> MappedReplicas:
        del plan
        device, bundle = self._inputs.ids.device, self._inputs.layer.bundle
        replicas = self._own_replicas = MappedReplicas(
            self._plane.of_domain,
            self._plane.memory,
            self.passes,
            replica_table(self._own_plan, device),
            bundle,
        )
        return replicas

    def _trial(self, plan: Plan, bundle: Bundle) -> MappedReplicas:
        plane, device = self._plane, self._inputs.ids.device
        return MappedReplicas(
            plane.of_domain,
            self._plane.memory,
            Passes(NO_LAYER, self.passes.step),
            replica_table(plan.of_domain(plane.domain), device),
            bundle,
        )

    def _rows_inside(self, slots: torch.Tensor) -> MappedRows:
        routes = device_routes(self._routes_inside(slots), slots)
        unlogged = Passes(self.passes.layer, self.passes.step)
        memory, begins = self._plane.memory, self._begins
        return MappedRows(unlogged, memory, routes, routes.send_counts, None, begins)

    def _begin_backward(self) -> None:
        super()._begin_backward()
        if self._own_replicas is not None:
            self._own_replicas.begin_again()


def replica_table(plan: Plan, device: torch.device) -> torch.Tensor:
    """Return [C, 3] the replicas of a plan as kernels read them, padded to the most possible."""
    table = np.full((plan.topology.ranks * plan.topology.slots, 3), PADDING, np.int32)
    table[: plan.num_replicas] = plan.replicas
    return moved(torch.from_numpy(table), device)


def device_routes(routes: Routes, slots: torch.Tensor) -> DeviceRoutes:
    """Return the routes of [T', K] slots as kernels read them."""
    device, sent, rows = routes.order.device, len(routes.order), routes.num_rows
    order = torch.full((rows,), PADDING, dtype=torch.int32, device=device)
    order[:sent] = routes.order
    received = torch.from_numpy(routes.receive_counts.astype(np.int32))
    of_slot = torch.from_numpy(routes.rows_of_slot.astype(np.int32))
    send_counts = torch.tensor(routes.send_counts, dtype=torch.int32)
    return DeviceRoutes(
        slots,
        torch.where(slots.view(-1) == PADDING, PADDING, routes.positions).int(),
        order,
        moved(of_slot, device),
        moved(send_counts, device),
        moved(received, device),
    )
