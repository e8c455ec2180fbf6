"""The hybrid data plane: one group of ranks over several fast-link domains.

Loads are gathered, planned and rerouted as by messages, so the host knows the plan. Every domain
has a plane of its own for replicas, their gradients and rows: `MappedInside`, or `MessagesInside`
between CPU ranks. Between domains every token travels once (`crossing.py`).

Shapes: T tokens of this rank, K experts per token, T' its tokens and the tokens that arrive from
other domains, C replicas, R ranks, N domains.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate

import numpy as np
import torch

from ultraep.arrays import PADDING, IntArray
from ultraep.bundle import Bundle
from ultraep.comm import Communicator, Peers, moved
from ultraep.dispatch import Exchange
from ultraep.inputs import Inputs
from ultraep.microbatch import Context
from ultraep.ops.modes import outside_dispatch_modes
from ultraep.passes import Passes
from ultraep.plan import Plan
from ultraep.position import At, Position
from ultraep.replicas import Replicas
from ultraep.reroute import Routes, routes_of, rows_received
from ultraep.runtime.agreement import Agreement
from ultraep.runtime.device_plan import DeviceRoutes
from ultraep.runtime.hybrid.crossing import Crossing, Domains
from ultraep.runtime.messages.plane import MessagesMicrobatch, MessagesPlane, RowMessages

CPU = torch.device("cpu")


class MessagesInside(MessagesPlane):
    """The plane of a domain whose ranks send messages."""

    def fit(self, tokens: int, rows: int) -> None:
        """Do nothing: messages need no memory."""

    def rows(self, passes: Passes, plan: Plan, slots: torch.Tensor) -> Exchange:
        return RowMessages(routes_inside(plan, self.context.comm.rank, slots), self.context, passes)


class MappedInside:
    """The plane of a domain whose ranks map each other's memory."""

    @torch.inference_mode(False)
    def __init__(self, context: Context, peers: Peers) -> None:
        from ultraep.runtime.mapped.memory import MappedMemory  # imports triton

        self._context, self._memory = context, MappedMemory(peers, context)
        self.fit, self.check, self.close = self._memory.fit, self._memory.check, peers.close

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def replicas(
        self, passes: Passes, plan: Plan, bundle: Bundle, device: torch.device
    ) -> Replicas:
        from ultraep.runtime.mapped.replicas import MappedReplicas  # imports triton

        table = np.full((plan.topology.ranks * plan.topology.slots, 3), PADDING, np.int32)
        table[: plan.num_replicas] = plan.replicas
        return MappedReplicas(
            self._context,
            self._memory,
            passes,
            moved(torch.from_numpy(table), device),
            bundle,
            possible=plan.num_replicas > 0,
        )

    def rows(self, passes: Passes, plan: Plan, slots: torch.Tensor) -> Exchange:
        from ultraep.runtime.mapped.rows import MappedRows  # imports triton

        on_host = routes_inside(plan, self._context.comm.rank, slots)
        routes, begins = _device_routes(on_host, slots), _begins(on_host.receive_counts)
        return MappedRows(passes, self._memory, routes, routes.send_counts, None, begins)


class HybridPlane(MessagesPlane):
    """One rank of a group with several domains; see `DataPlane`.

    comm: the ranks of its domain.   peers: memory that they map; None: they send messages.
    """

    name = "hybrid"

    def __init__(self, context: Context, comm: Communicator, peers: Peers | None) -> None:
        super().__init__(context)
        size = context.topology.domain_size
        self.domain = context.comm.rank // size
        of_domain = replace(
            context,
            comm=comm,
            topology=context.topology.of_domain(self.domain),
            first_rank=self.domain * size,
        )
        self.inside: MessagesInside | MappedInside = (
            MessagesInside(of_domain) if peers is None else MappedInside(of_domain, peers)
        )
        self._comm_inside, self._hosts = comm, context.comm.hosts()
        self._agreement = context.agreement.over(self._hosts)
        self._domains: Domains | None = None

    def verifier(self, device: torch.device) -> tuple[Agreement, torch.device]:
        """Hosts compare plans and positions by messages that wait for no device."""
        del device
        return self._agreement, CPU

    def begin(self, inputs: Inputs) -> HybridMicrobatch:
        self.kernels = self._kernels_for(inputs.ids)
        return HybridMicrobatch(self, inputs)

    def domains(self, device: torch.device) -> Domains:
        """Return the domains as tables on a device."""
        if self._domains is None:
            self._domains = Domains(self.topology, self.context.comm.rank, device)
        return self._domains

    def replicas(
        self, passes: Passes, plan: Plan, bundle: Bundle, device: torch.device
    ) -> Replicas:
        """Return the replicas of the plan of this domain."""
        return self.inside.replicas(passes, plan, bundle, device)

    def begin_backward(self, place: Position, replicas: Replicas | None) -> None:
        """Compare positions before the first row moves, and begin to fill the slots."""
        self._agreement.compare(place, CPU)
        if replicas is not None:
            replicas.begin_again()

    @property
    def nbytes(self) -> int:
        return self.inside.nbytes

    def check(self) -> None:
        super().check()
        self.inside.check()

    def close(self) -> None:
        self.inside.close()
        self._comm_inside.close()
        if self._hosts is not self.context.comm:
            self._hosts.close()


class HybridMicrobatch(MessagesMicrobatch):
    """One microbatch of one rank."""

    _plane: HybridPlane
    # From `count`:
    _serving: torch.Tensor  # [T, K] the domain of each choice
    _counts: IntArray  # [R, N] tokens of every rank that each domain serves
    _most_tokens: int  # of a rank in this domain, with those that arrive
    # From `plan`:
    _own_plan: Plan  # of this domain
    # From `replicate`:
    _own_replicas: Replicas | None = None

    def _crossing(self) -> torch.Tensor:
        ids = self._inputs.ids
        domains = self._plane.domains(ids.device)
        self._serving = domains.of_ids(ids)
        return domains.serving(self._serving).sum(1)

    @outside_dispatch_modes
    def count(self) -> torch.Tensor:
        loads = super().count()
        records, size, domain = self._counted, self._plane.topology.domain_size, self._plane.domain
        assert records is not None
        self._counts = records.crossing
        arriving = records.crossing[:, domain].reshape(-1, size).copy()
        arriving[domain] = records.column("tokens").reshape(-1, size)[domain]
        self._most_tokens = int(arriving.sum(axis=0).max())
        return loads

    @outside_dispatch_modes
    def plan(self) -> Plan:
        plan = super().plan()
        own = self._own_plan = plan.of_domain(self._plane.domain)
        self._plane.inside.fit(self._most_tokens, int(own.rank_loads.max()))
        return plan

    def _trial(self, plan: Plan, bundle: Bundle) -> Replicas:
        return super()._trial(plan.of_domain(self._plane.domain), bundle)

    def replicate(self) -> Replicas:
        self._after("plan", self._plan)
        inputs, inside = self._inputs, self._plane.inside
        replicas = self._own_replicas = inside.replicas(
            self.passes, self._own_plan, inputs.layer.bundle, inputs.ids.device
        )
        return replicas

    @outside_dispatch_modes
    def reroute(self) -> Exchange:
        self._record.at("reroute")
        slots = self._routes(self._after("plan", self._plan)).slots
        plane, own, domains = self._plane, self._own_plan, self._plane.domains(slots.device)
        unlogged = Passes(self.passes.layer, self.passes.step)
        begin_backward = partial(
            plane.begin_backward, self.passes.position(At.BACKWARD), self._own_replicas
        )
        crossing = Crossing(
            self.passes,
            domains,
            self._context.comm,
            slots,
            self._serving,
            self._counts,
            _begins(rows_received(own, domains.place)),
            inside=partial(plane.inside.rows, unlogged, own),
            at_backward=begin_backward,
        )
        return self._rerouted(crossing)


def _begins(received_RL: IntArray) -> list[int]:
    """Return the first row of each slot of this rank."""
    return [0, *accumulate(received_RL.sum(axis=0).tolist())]


def routes_inside(plan: Plan, place: int, slots: torch.Tensor) -> Routes:
    """Return the routes of [T', K] rows to slots of their domain, by the plan of the domain."""
    flat, last = slots.reshape(-1), int(plan.topology.first_slot_of_rank[-1])
    keys = torch.where(flat == PADDING, last, flat)
    if slots.device.type != "cpu" or last >= 1 << 15:
        order = keys.argsort(stable=True)
    else:  # 16 bits: radix sort
        order = torch.from_numpy(keys.numpy().astype(np.int16).argsort(kind="stable"))
    return routes_of(plan, place, slots.shape, order[: int(plan.loads[place].sum())])


def _device_routes(routes: Routes, slots: torch.Tensor) -> DeviceRoutes:
    """Return the routes of [T', K] slots as kernels read them."""
    device, padding = routes.order.device, slots.view(-1) == PADDING
    order = torch.full((routes.num_rows,), PADDING, dtype=torch.int32, device=device)
    order[: len(routes.order)] = routes.order
    counts = routes.rows_of_slot, routes.send_counts, routes.receive_counts
    on_device = (moved(torch.from_numpy(np.asarray(c, np.int32)), device) for c in counts)
    positions = torch.where(padding, PADDING, routes.positions).int()
    return DeviceRoutes(slots, positions, order, *on_device)
