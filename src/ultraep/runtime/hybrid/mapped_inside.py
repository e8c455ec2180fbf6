"""Inside of a domain whose ranks map each other's memory.

The host knows the plan, so it also knows how much memory a microbatch needs.
"""

from __future__ import annotations

import numpy as np
import torch

from ultraep.arrays import PADDING, IntArray
from ultraep.bundle import Bundle, resolve
from ultraep.comm import Peers, moved
from ultraep.microbatch import MicrobatchInfo, Replicas
from ultraep.plan import Plan
from ultraep.reroute import Routes
from ultraep.runtime.control import DeviceRoutes
from ultraep.runtime.hybrid.inside import Size
from ultraep.runtime.mapped.memory import MappedMemory
from ultraep.runtime.mapped.plane import MappedRows, even
from ultraep.runtime.mapped.replicas import MappedReplicas
from ultraep.runtime.microbatch import Shared


class MappedInside:
    """A domain whose ranks map each other's memory."""

    def __init__(self, shared: Shared, peers: Peers) -> None:
        self._observed, self._shared, self._peers = shared, shared.unobserved(), peers
        self._memories: list[MappedMemory] = []

    def fit(self, size: Size) -> MappedMemory:
        if not any(_fits(memory, size) for memory in self._memories[-1:]):
            self._allocate(size)
        return self._memories[-1]

    @torch.inference_mode(False)
    def _allocate(self, size: Size) -> None:
        """Allocate somewhat more than is needed. Microbatches that have begun keep their memory."""
        shared, last = self._shared, self._memories[-1] if self._memories else None
        tokens = max(size.tokens, shared.settings.tokens or 1)
        rows = max(size.rows, tokens * size.top_k)
        if last is not None:
            tokens, rows = max(tokens, last.tokens), max(rows, last.capacity)
        self._memories.append(
            MappedMemory(
                self._peers,
                shared,
                name=f"memory {len(self._memories)}",
                tokens=1 << (tokens - 1).bit_length(),
                top_k=size.top_k,
                capacity=rows + rows // 2,
            )
        )

    def prepare(self, size: Size, rows: torch.Tensor, bundle: Bundle) -> None:
        self.fit(size).prepare(resolve(bundle), rows)

    def replicas(
        self,
        memory: MappedMemory,
        info: MicrobatchInfo,
        plan: Plan,
        bundle: Bundle,
        versions: IntArray,
        device: torch.device,
    ) -> MappedReplicas:
        numbers = torch.from_numpy(np.array([even(int(v)) for v in versions], np.int32))
        return self._replicas(self._observed, memory, info, plan, bundle, moved(numbers, device))

    def trial(
        self,
        memory: MappedMemory,
        info: MicrobatchInfo,
        plan: Plan,
        bundle: Bundle,
        number: int,
        device: torch.device,
    ) -> MappedReplicas:
        del number
        no_versions = torch.zeros(plan.topology.ranks, dtype=torch.int32, device=device)
        info.in_backward = True  # its replicas are not reported
        return self._replicas(self._shared, memory, info, plan, bundle, no_versions)

    def _replicas(
        self,
        shared: Shared,
        memory: MappedMemory,
        info: MicrobatchInfo,
        plan: Plan,
        bundle: Bundle,
        versions: torch.Tensor,
    ) -> MappedReplicas:
        replicas = replica_table(plan, versions.device)
        return MappedReplicas(shared, memory, info, replicas, bundle, versions)

    def rows(
        self, memory: MappedMemory, info: MicrobatchInfo, routes: Routes, slots: torch.Tensor
    ) -> MappedRows:
        on_device = device_routes(routes, slots)
        return MappedRows(info, [], memory, on_device, None, lambda _: None)  # see `at_backward`

    def at_backward(self, replicas: Replicas | None) -> None:
        if isinstance(replicas, MappedReplicas):
            replicas.begin_again()

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memories)

    def check(self) -> None:
        for memory in self._memories:
            memory.check()

    def close(self) -> None:
        self._memories.clear()
        self._peers.close()


def _fits(memory: MappedMemory, size: Size) -> bool:
    enough = size.tokens <= memory.tokens and size.rows <= memory.capacity
    return enough and size.top_k == memory.top_k


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
