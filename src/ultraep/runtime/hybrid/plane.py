"""The hybrid data plane: one group of ranks over several fast-link domains.

Loads are gathered, planned and rerouted as by messages, so the host knows the plan. Inside of a
domain, replicas, their gradients and rows move through mapped memory (`mapped_inside.py`), or by
messages between CPU ranks. Between domains every token travels once (`crossing.py`).

Shapes: T tokens of this rank, K experts per token, T' its tokens and the tokens that arrive from
other domains, A arrived rows, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from ultraep.arrays import PADDING, IntArray
from ultraep.bundle import Bundle
from ultraep.comm import Communicator, moved
from ultraep.dispatch import Moved
from ultraep.microbatch import Inputs, Rows
from ultraep.ops.modes import outside_dispatch_modes
from ultraep.passes import Passes
from ultraep.plan import Plan
from ultraep.position import At
from ultraep.replicas import Replicas
from ultraep.reroute import Routes, routes_of, rows_received
from ultraep.runtime.agreement import Agreement, Records
from ultraep.runtime.hybrid.crossing import Crossing, Domains
from ultraep.runtime.messages.plane import MessagesMicrobatch, MessagesPlane, RowMessages
from ultraep.runtime.microbatch import Context


class HybridPlane(MessagesPlane):
    """One rank of a group with several domains, whose ranks send messages; see `DataPlane`.

    inside: the ranks of its domain.
    """

    name = "hybrid"

    def __init__(self, context: Context, inside: Communicator) -> None:
        super().__init__(context)
        self.domain = context.comm.rank // context.topology.domain_size
        self.of_domain = of_own_domain(context, inside)
        self._domains: Domains | None = None
        self._hosts = context.comm.hosts()
        self._agreement = context.agreement.over(self._hosts)

    def verifier(self, device: torch.device) -> tuple[Agreement, torch.device]:
        """Hosts compare plans and positions by messages that wait for no device."""
        del device
        return self._agreement, torch.device("cpu")

    def begin(self, inputs: Inputs) -> HybridMicrobatch:
        self.kernels = self._kernels_for(inputs.ids)
        return HybridMicrobatch(self, inputs)

    def domains(self, device: torch.device) -> Domains:
        """Return the domains as tables on a device."""
        if self._domains is None:
            self._domains = Domains(self.topology, self.context.comm.rank, device)
        return self._domains

    def close(self) -> None:
        self.of_domain.comm.close()
        if self._hosts is not self.context.comm:
            self._hosts.close()


class HybridMicrobatch(MessagesMicrobatch):
    """One microbatch of one rank; `mapped_inside.py` moves it through mapped memory."""

    _plane: HybridPlane
    # From `count`:
    _crossing_counts: IntArray  # [R, D] tokens of every rank that each domain serves
    _most_tokens: int  # of a rank in this domain, with those that arrive
    # From `plan`:
    _own_plan: Plan  # of this domain
    # From `reroute`:
    _begins: list[int]  # first row of each slot of this rank

    def _crossing(self) -> torch.Tensor:
        ids = self._inputs.ids
        return self._plane.domains(ids.device).counts(ids)

    def _counted(self, records: Records) -> None:
        size, domain = self._plane.topology.domain_size, self._plane.domain
        self._crossing_counts = records.crossing
        arriving = records.crossing[:, domain].reshape(-1, size).copy()
        arriving[domain] = records.column("tokens").reshape(-1, size)[domain]
        self._most_tokens = int(arriving.sum(axis=0).max())
        self._fit(0)

    def _fit(self, rows: int) -> None:
        """Provide memory for ranks of the domain that serve this many rows; may be collective."""

    def _settled(self, plan: Plan) -> Plan:
        self._own_plan = plan.of_domain(self._plane.domain)
        self._fit(int(self._own_plan.rank_loads.max()))
        return plan

    def _replicas(self, plan: Plan) -> Replicas:
        del plan
        return super()._replicas(self._own_plan)

    def _trial(self, plan: Plan, bundle: Bundle) -> Replicas:
        return super()._trial(plan.of_domain(self._plane.domain), bundle)

    def _rows(self, plan: Plan) -> Rows:
        context, slots = self._context, self._routes(plan).slots
        domains = self._plane.domains(slots.device)
        crossing = Crossing(domains, context.comm, slots, self._crossing_counts)
        counts = rows_received(self._own_plan, domains.place).sum(axis=0)
        begins = self._begins = [0, *accumulate(counts.tolist())]
        offsets = moved(torch.tensor(begins, dtype=torch.int32), slots.device)
        steps = self._rows_inside, self._begin_backward
        rows = HybridRows(self.passes, crossing, *steps, slots, offsets)
        rows.known_begins = begins
        return rows

    def _rows_inside(self, slots: torch.Tensor) -> Rows:
        """Return the exchange of the [T', K] slots of this domain, which no record shows."""
        unlogged = Passes(self.passes.layer, self.passes.step)
        return RowMessages(self._routes_inside(slots), self._plane.of_domain, unlogged)

    def _routes_inside(self, slots: torch.Tensor) -> Routes:
        return routes_inside(self._own_plan, self._plane.domains(slots.device).place, slots)

    def _begin_backward(self) -> None:
        """Called before the first row moves in backward."""
        agreement, device = self._plane.verifier(self._inputs.ids.device)
        agreement.compare(self._place(At.BACKWARD), device)


def of_own_domain(context: Context, inside: Communicator) -> Context:
    """Return the parts of a balancer for the ranks of one domain."""
    domain = context.comm.rank // context.topology.domain_size
    topology, first = context.topology.of_domain(domain), domain * context.topology.domain_size
    return replace(context, comm=inside, topology=topology, first_rank=first)


def routes_inside(plan: Plan, place: int, slots: torch.Tensor) -> Routes:
    """Return the routes of [T', K] rows to slots of their domain, by the plan of the domain."""
    flat = slots.reshape(-1)
    last = int(plan.topology.first_slot_of_rank[-1])
    order = _stable_order(torch.where(flat == PADDING, last, flat), last)
    sent = int(plan.loads[place].sum())
    numbers = torch.arange(len(order), device=order.device).clamp_(max=max(0, sent - 1))
    positions = torch.empty_like(order).scatter_(0, order, numbers)
    return routes_of(plan, place, slots.shape, order[:sent], positions)


def _stable_order(slots: torch.Tensor, most: int) -> torch.Tensor:
    """Return the order of slots up to `most`; equal ones keep theirs."""
    if slots.device.type != "cpu" or most >= 1 << 15:
        return slots.argsort(stable=True)
    return torch.from_numpy(slots.numpy().astype(np.int16).argsort(kind="stable"))  # radix sort


class HybridRows:
    """Moves rows between tokens and slots, through the domain of the slots.

    rows_inside: returns the exchange inside of this domain for [T', K] slots.
    at_backward: called when backward begins.   offsets: first row of each slot of this rank.
    """

    known_begins: list[int] | None = None  # `offsets`, if the host knows them

    def __init__(
        self,
        passes: Passes,
        crossing: Crossing,
        rows_inside: Callable[[torch.Tensor], Rows],
        at_backward: Callable[[], None],
        slots: torch.Tensor,
        offsets: torch.Tensor,
    ) -> None:
        self.passes = passes
        self._slots, self._crossing, self.offsets = slots, crossing, offsets
        self._rows_inside, self._begin_inside = rows_inside, at_backward
        self._inside: Rows | None = None

    @property
    def slots(self) -> torch.Tensor:
        return self._slots

    @outside_dispatch_modes
    def begins(self) -> list[int]:
        return self.offsets.tolist() if self.known_begins is None else self.known_begins

    def begin_backward(self) -> None:
        self.passes.begin_backward()
        self._begin_inside()

    def to_slots(self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None) -> Moved:
        record = self.passes.record
        if not record.backward:
            record.at("dispatch")
        if self._inside is None:
            assert scalars_TK is not None, "forward sends the gates"
            values_TD, scalars_TK, slots = self._crossing.to_domains_first(values_TD, scalars_TK)
            self._inside = self._rows_inside(slots)
        else:
            values_TD, scalars_TK = _both(self._crossing.to_domains, values_TD, scalars_TK)
        moved = self._inside.to_slots(values_TD, scalars_TK)
        record.at("experts", "experts back")
        return moved

    def to_tokens(self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None) -> Moved:
        assert self._inside is not None, "rows move to the slots first"
        record = self.passes.record
        record.at("combine", "dispatch back")
        moved = _both(self._crossing.to_tokens, *self._inside.to_tokens(rows_AD, scalars_A))
        if record.backward:
            record.end()
        return moved


def _both(
    cross: Callable[..., list[torch.Tensor]], values: torch.Tensor, scalars: torch.Tensor | None
) -> Moved:
    """Let values cross, and scalars if there are some."""
    if scalars is None:
        return cross(values)[0], None
    values, scalars = cross(values, scalars)
    return values, scalars
