"""The hybrid plane with a fixed row capacity: no stage waits for the host.

Loads, plan, routes and rows stay on the device, as on the mapped plane. Every rank sends all its
tokens to every other domain, padded to the most tokens of a rank. So the sizes of all messages are
known in advance, and a CUDA graph can capture a layer if it can capture the messages of the group.

Shapes: T tokens of this rank, K experts per token, T' the tokens of a rank of every domain, R
ranks, E experts, C replicas, S slots; the last three of the domain if so named.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import pad

from ultraep.arrays import PADDING
from ultraep.comm import Communicator, Peers
from ultraep.config import BalanceConfig
from ultraep.microbatch import Inputs, Rows
from ultraep.passes import Passes
from ultraep.plan import Plan
from ultraep.runtime.agreement import At
from ultraep.runtime.device_planner import DevicePlan, DeviceRoutes
from ultraep.runtime.hybrid.crossing import Domains, PaddedCrossing
from ultraep.runtime.hybrid.mapped_inside import replica_table
from ultraep.runtime.hybrid.plane import HybridRows, of_own_domain
from ultraep.runtime.mapped.plane import MappedMicrobatch, MappedPlane, MappedRows
from ultraep.runtime.microbatch import Context


class StaticPlane(MappedPlane):
    """One rank of a group with several domains; see `DataPlane`.

    inside: the ranks of its domain.   peers: their mapped memory.
    """

    name = "hybrid"

    def __init__(self, context: Context, inside: Communicator, peers: Peers) -> None:
        super().__init__(context, peers, of_own_domain(context, inside))
        self.domains = Domains(context.topology, context.comm.rank, peers.device)
        self.tables = Tables(self.domains, self.of_domain)

    def begin(self, inputs: Inputs) -> StaticMicrobatch:
        return StaticMicrobatch(self, inputs)

    def close(self) -> None:
        super().close()
        self.of_domain.comm.close()


class Tables:
    """Where the experts of one domain are, on the device."""

    def __init__(self, domains: Domains, context: Context) -> None:
        whole, own, device = domains.topology, context.topology, domains.numbers.device
        experts = whole.experts_of_domain(domains.own)
        numbers = np.zeros(whole.experts, np.int64)
        numbers[experts] = np.arange(len(experts))
        first = int(whole.first_slot_of_rank[domains.own * domains.size])
        self.size, self.place, self.num_domains = domains.size, domains.place, whole.num_domains
        self.first_rank, self.first_slot = domains.own * domains.size, first
        self.copies, self.num_slots = own.ranks * own.slots, int(own.first_slot_of_rank[-1])
        begin, end = own.first_slot_of_rank[domains.place :][:2].tolist()
        self.slots_of_rank = slice(begin, end)
        self.experts = torch.from_numpy(experts).to(device)
        self.number_of_expert = torch.from_numpy(numbers).to(device)  # inside of the domain
        self.home_slots = torch.from_numpy(own.home_slot_of_expert.copy()).to(device)
        self.first_slots = torch.from_numpy(own.first_slot_of_rank.copy()).to(device)

    def replicas_and_rows(self, plan: DevicePlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the [C, 3] replicas of this domain, and [ranks, S] rows from its ranks to slots.

        As in `Plan.of_domain`, a rank of the domain also sends the rows of its place elsewhere.
        """
        hosts = plan.replicas[:, 1]
        inside = (hosts >= self.first_rank) & (hosts < self.first_rank + self.size)
        order = (~inside).int().argsort(stable=True)[: self.copies]
        chosen, valid = plan.replicas[order].long(), inside[order][:, None]
        experts = self.number_of_expert[chosen[:, 0].clamp(min=0)]
        local = torch.stack([experts, chosen[:, 1] - self.first_rank, chosen[:, 2]], dim=1)
        split = torch.where(valid, plan.split[order].long(), 0)
        split = split.view(-1, self.num_domains, self.size).sum(dim=1).T
        loads = plan.loads.long()[:, self.experts]
        loads = loads.view(self.num_domains, self.size, -1).sum(dim=0)
        spare = (plan.slot_of_copy[order].long() - self.first_slot).clamp(min=0)
        spare = torch.where(valid[:, 0], spare, 0)
        rows = loads.new_zeros(self.size, self.num_slots).index_copy_(1, self.home_slots, loads)
        rows.index_add_(1, self.home_slots[torch.where(valid[:, 0], experts, 0)], -split)
        rows.index_add_(1, spare, split)
        return torch.where(valid, local, PADDING).int(), rows.int()

    def routes(self, rows: torch.Tensor, slots: torch.Tensor) -> DeviceRoutes:
        """Return the routes of [T', K] slots of this domain."""
        flat = slots.reshape(-1)
        key = torch.where(flat == PADDING, self.num_slots, flat)
        in_order, order = key.sort(stable=True)
        positions = torch.empty_like(order)
        positions[order] = torch.arange(len(order), device=order.device)
        sent = rows[self.place]
        ends = pad(sent.cumsum(dim=0), (1, 0))
        return DeviceRoutes(
            slots,
            torch.where(flat == PADDING, PADDING, positions).int(),
            torch.where(in_order == self.num_slots, PADDING, order).int(),
            sent.contiguous(),
            ends[self.first_slots].diff().int(),
            rows[:, self.slots_of_rank].contiguous(),
        )


class StaticMicrobatch(MappedMicrobatch):
    """One microbatch of one rank, on its device."""

    _plane: StaticPlane
    _own_replicas: torch.Tensor  # [C, 3] of this domain
    _own_rows: torch.Tensor  # [ranks, S] of this domain

    def _gather_loads(self, counts_E: torch.Tensor, digest: int) -> torch.Tensor:
        own = counts_E[self._plane.tables.experts]
        self._workspace.memory.share_loads(own, digest)
        return self._context.comm.all_gather(counts_E)

    def _make_plan(self, config: BalanceConfig) -> DevicePlan:
        plan = super()._make_plan(config)
        self._own_replicas, self._own_rows = self._plane.tables.replicas_and_rows(plan)
        return plan

    def _replica_table(self, plan: DevicePlan) -> torch.Tensor:
        del plan
        return self._own_replicas

    def _trial_table(self, plan: Plan) -> torch.Tensor:
        return replica_table(plan.of_domain(self._plane.domains.own), self._plane.device)

    def _rows(self, plan: DevicePlan) -> Rows:
        plane, workspace, passes = self._plane, self._current(), self.passes
        ids, tables = self._inputs.ids.contiguous(), plane.tables
        slots = workspace.control.reroute(ids, counted=True).slots.long()
        overflow = workspace.overflow(plan)
        replicas, rows = self._last_replicas, self._own_rows
        offsets = pad(rows[:, tables.slots_of_rank].sum(dim=0).cumsum(dim=0), (1, 0)).int()
        crossing = PaddedCrossing(plane.domains, self._context.comm, slots, workspace.tokens)

        def rows_inside(local: torch.Tensor) -> Rows:
            routes = tables.routes(rows, local)
            memory, unseen = workspace.memory, Passes(passes.layer, passes.step)
            return MappedRows(unseen, memory, routes, None, plane.compare_places, overflow)

        def at_backward() -> None:
            plane.compare_places(self._place(At.BACKWARD))
            if replicas is not None:
                replicas.begin_again()

        return HybridRows(passes, crossing, rows_inside, at_backward, slots, offsets)
