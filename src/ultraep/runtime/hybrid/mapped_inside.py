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
from ultraep.runtime.device_planner import DeviceRoutes
from ultraep.runtime.hybrid.plane import HybridMicrobatch, HybridPlane
from ultraep.runtime.mapped.memory import MappedMemory
from ultraep.runtime.mapped.plane import MappedRows
from ultraep.runtime.mapped.replicas import MappedReplicas
from ultraep.runtime.microbatch import Context


class MappedHybridPlane(HybridPlane):
    """One rank of a group with several domains, whose ranks map each other's memory."""

    def __init__(self, context: Context, inside: Communicator, peers: Peers) -> None:
        super().__init__(context, inside)
        self._peers = peers
        self._memories: list[MappedMemory] = []

    def begin(self, inputs: Inputs) -> MappedHybridMicrobatch:
        self.kernels = self._kernels_for(inputs.ids)
        return MappedHybridMicrobatch(self, inputs)

    def prepare(self, ids: torch.Tensor, rows: torch.Tensor, bundle: Bundle) -> None:
        """Allocate memory as if every token had experts in all domains."""
        tokens, top_k = len(ids) * self.topology.num_domains, ids.shape[1]
        self.memory_for(tokens, top_k, tokens * top_k).prepare(resolve(bundle), rows)
        self.kernels = self._kernels_for(ids)

    def memory_for(self, tokens: int, top_k: int, rows: int) -> MappedMemory:
        """Return memory for a microbatch of this size; collective if it is allocated.

        tokens, rows: the most of a rank in the domain, and the most that it serves.
        """
        last = self._memories[-1] if self._memories else None
        if last is None or top_k != last.top_k or tokens > last.tokens or rows > last.capacity:
            last = self._allocate(tokens, top_k, rows, last)
            self._memories.append(last)
        return last

    @torch.inference_mode(False)
    def _allocate(
        self, tokens: int, top_k: int, rows: int, last: MappedMemory | None
    ) -> MappedMemory:
        """Allocate somewhat more than is needed. Microbatches that have begun keep their memory."""
        tokens = max(tokens, 1)
        rows = max(rows, tokens * top_k)
        if last is not None:
            tokens, rows = max(tokens, last.tokens), max(rows, last.capacity)
        return MappedMemory(
            self._peers,
            self.of_domain,
            tokens=1 << (tokens - 1).bit_length(),
            top_k=top_k,
            capacity=rows + rows // 2,
        )

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memories)

    def check(self) -> None:
        super().check()
        for memory in self._memories:
            memory.check()

    def close(self) -> None:
        self._memories.clear()
        self._peers.close()
        super().close()


class MappedHybridMicrobatch(HybridMicrobatch):
    """One microbatch of one rank."""

    _plane: MappedHybridPlane
    _memory: MappedMemory  # of the domain
    _own_replicas: MappedReplicas | None = None

    def _fit(self, rows: int) -> None:
        top_k = self._inputs.ids.shape[1]
        self._memory = self._plane.memory_for(self._most_tokens, top_k, rows)

    def _replicas(self, plan: Plan) -> MappedReplicas:
        del plan
        device, bundle = self._inputs.ids.device, self._inputs.layer.bundle
        replicas = self._own_replicas = MappedReplicas(
            self._plane.of_domain,
            self._memory,
            self.passes,
            replica_table(self._own_plan, device),
            bundle,
        )
        return replicas

    def _trial(self, plan: Plan, bundle: Bundle) -> MappedReplicas:
        plane, device = self._plane, self._inputs.ids.device
        return MappedReplicas(
            plane.of_domain,
            self._memory,
            Passes(NO_LAYER, self.passes.step),
            replica_table(plan.of_domain(plane.domain), device),
            bundle,
        )

    def _rows_inside(self, slots: torch.Tensor) -> MappedRows:
        routes = device_routes(self._routes_inside(slots), slots)
        unseen = Passes(self.passes.layer, self.passes.step)
        return MappedRows(unseen, self._memory, routes, None, lambda _: None)

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
