"""The hybrid data plane: one group of ranks over several fast-link domains.

Loads are gathered, planned and rerouted as by messages, so the host knows the plan. Inside of a
domain (`inside.py`), replicas, their gradients and rows move through mapped memory, or by messages
between CPU ranks. Between domains every token travels once (`crossing.py`).

Shapes: T tokens of this rank, K experts per token, T' its tokens and the tokens that arrive from
other domains, A arrived rows, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch

from ultraep.arrays import PADDING, IntArray
from ultraep.bundle import Bundle
from ultraep.comm import Communicator, Peers, moved
from ultraep.dispatch import Moved
from ultraep.errors import ConfigError, LoadError
from ultraep.microbatch import NO_LAYER, Foreseen, Inputs, MicrobatchInfo, Replicas
from ultraep.plan import Plan
from ultraep.reroute import Routes, routes_of, rows_received
from ultraep.runtime.agreement import Records
from ultraep.runtime.hybrid.crossing import Crossing, Domains
from ultraep.runtime.hybrid.inside import Inside, MessagesInside, Size
from ultraep.runtime.messages.plane import MessagesMicrobatch, MessagesPlane
from ultraep.runtime.microbatch import Shared
from ultraep.runtime.observe import BaseExchange


class HybridPlane(MessagesPlane):
    """One rank of a group with several domains; see `DataPlane`.

    inside: the ranks of its domain.   peers: their mapped memory; None: they send messages.
    """

    name = "hybrid"

    def __init__(self, shared: Shared, inside: Communicator, peers: Peers | None = None) -> None:
        super().__init__(shared)
        self.domain = shared.comm.rank // shared.topology.domain_size
        self.of_domain = replace(
            shared, comm=inside, topology=shared.topology.of_domain(self.domain)
        )
        self.inside: Inside = MessagesInside(self.of_domain, self.pool)
        if peers is not None:
            from ultraep.runtime.hybrid.mapped_inside import MappedInside  # imports triton

            self.inside = MappedInside(self.of_domain, peers)
        self._domains: Domains | None = None

    def begin(self, inputs: Inputs) -> HybridMicrobatch:
        self.kernels = self._kernels_for(inputs.ids)
        return HybridMicrobatch(self, inputs)

    def foresee(self, inputs: Sequence[Inputs], refusal: LoadError | None) -> list[Foreseen]:
        del inputs, refusal
        raise ConfigError(
            "foresee() is not possible on the data plane 'hybrid': pass data_plane='messages', or "
            "do without it"
        )

    def prepare(self, ids: torch.Tensor, rows: torch.Tensor, bundle: Bundle) -> None:
        """Allocate memory as if every token had experts in all domains."""
        tokens, top_k = ids.shape
        most_tokens = tokens * self.topology.num_domains
        self.inside.prepare(Size(most_tokens, top_k, most_tokens * top_k), rows, bundle)
        self.kernels = self._kernels_for(ids)

    def domains(self, device: torch.device) -> Domains:
        """Return the domains as tables on a device."""
        if self._domains is None:
            self._domains = Domains(self.topology, self.shared.comm.rank, device)
        return self._domains

    @property
    def nbytes(self) -> int:
        return self.inside.nbytes

    def check(self) -> None:
        super().check()
        self.inside.check()

    def close(self) -> None:
        self.inside.close()
        self.of_domain.comm.close()


class HybridMicrobatch(MessagesMicrobatch):
    """One microbatch of one rank."""

    _plane: HybridPlane
    # From `count`:
    _crossing_counts: IntArray  # [R, D] tokens of every rank that each domain serves
    _most_tokens: int  # of a rank in this domain, with those that arrive
    # From `plan`:
    _own_plan: Plan  # of this domain
    _own_replicas: Replicas | None = None

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
        top_k = self._inputs.ids.shape[1]
        self._plane.inside.fit(Size(self._most_tokens, top_k, rows))

    def _settled(self, plan: Plan) -> Plan:
        self._own_plan = plan.of_domain(self._plane.domain)
        self._fit(int(self._own_plan.rank_loads.max()))
        return plan

    def _replicas(self, plan: Plan) -> Replicas:
        del plan
        plane, size = self._plane, self._plane.topology.domain_size
        versions = self._versions[plane.domain * size :][:size]
        bundle, device = self._inputs.layer.bundle, self._inputs.ids.device
        self._own_replicas = plane.inside.replicas(
            self.info, self._own_plan, bundle, versions, device
        )
        return self._own_replicas

    def _trial(self, plan: Plan, bundle: Bundle, number: int) -> Replicas:
        return self._plane.inside.trial(
            MicrobatchInfo(NO_LAYER, self.info.step),
            plan.of_domain(self._plane.domain),
            bundle,
            number,
            self._inputs.ids.device,
        )

    def _rows(self, plan: Plan) -> BaseExchange:
        plane, shared = self._plane, self._shared
        slots = self._routes(plan).slots
        domains = plane.domains(slots.device)
        crossing = Crossing(domains, shared.comm, slots, self._crossing_counts)
        own = self._own_plan

        def rows_inside(local: torch.Tensor) -> BaseExchange:
            routes = routes_inside(own, domains.place, local)
            return plane.inside.rows(self.info, routes, local)

        begins = [0, *accumulate(rows_received(own, domains.place).sum(axis=0).tolist())]
        at_backward = partial(plane.inside.at_backward, self.info, self._own_replicas)
        return HybridRows(self.info, shared, crossing, rows_inside, at_backward, slots, begins)


def routes_inside(plan: Plan, place: int, slots: torch.Tensor) -> Routes:
    """Return the routes of [T', K] rows to slots of their domain, by the plan of the domain."""
    flat = slots.reshape(-1)
    last = int(plan.topology.first_slot_of_rank[-1])
    order = torch.where(flat == PADDING, last, flat).argsort(stable=True)
    sent = int(plan.loads[place].sum())
    positions = torch.empty_like(order)
    positions[order] = torch.arange(len(order), device=order.device).clamp_(max=max(0, sent - 1))
    return routes_of(plan, place, slots.shape, order[:sent], positions)


class HybridRows(BaseExchange):
    """Moves rows between tokens and slots, through the domain of the slots.

    rows_inside: returns the exchange inside of this domain for [T', K] slots.
    at_backward: called when backward begins.   begins: first row of each slot of this rank.
    """

    def __init__(
        self,
        info: MicrobatchInfo,
        shared: Shared,
        crossing: Crossing,
        rows_inside: Callable[[torch.Tensor], BaseExchange],
        at_backward: Callable[[], None],
        slots: torch.Tensor,
        begins: list[int],
    ) -> None:
        super().__init__(info, shared.observers)
        self._slots, self._crossing, self._begins = slots, crossing, begins
        self.offsets = moved(torch.tensor(begins, dtype=torch.int32), slots.device)
        self._rows_inside, self._begin_inside = rows_inside, at_backward
        self._inside: BaseExchange | None = None

    @property
    def slots(self) -> torch.Tensor:
        return self._slots

    def begins(self) -> list[int]:
        return self._begins

    def _dispatched(self) -> BaseExchange:
        assert self._inside is not None, "rows move to the slots first"
        return self._inside

    def _at_backward(self) -> None:
        self._begin_inside()

    def _to_slots(self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None) -> Moved:
        if self._inside is None:
            assert scalars_TK is not None, "forward sends the gates"
            values_TD, scalars_TK, slots = self._crossing.to_domains_first(values_TD, scalars_TK)
            self._inside = self._rows_inside(slots)
        elif scalars_TK is None:
            (values_TD,) = self._crossing.to_domains(values_TD)
        else:
            values_TD, scalars_TK = self._crossing.to_domains(values_TD, scalars_TK)
        return self._inside.to_slots(values_TD, scalars_TK)

    def _to_tokens(self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None) -> Moved:
        sums_TD, scalars_TK = self._dispatched().to_tokens(rows_AD, scalars_A)
        if scalars_TK is None:
            (sums_TD,) = self._crossing.to_tokens(sums_TD)
        else:
            sums_TD, scalars_TK = self._crossing.to_tokens(sums_TD, scalars_TK)
        return sums_TD, scalars_TK
