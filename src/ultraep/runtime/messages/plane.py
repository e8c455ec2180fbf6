"""MessagesPlane: loads, weights, rows and gradients travel as messages of a communicator.

The host knows loads and plan. Some messages also carry what the ranks must agree on (agreement.py),
so that a rank with other weights, or at another place of the program, is an error that names it, on
every rank.

Shapes: T tokens, K experts per token, R ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ultraep.arrays import IntArray
from ultraep.backends import backend_for
from ultraep.bundle import Bundle, Layout, device_of_bundle, resolve, signature
from ultraep.comm import Communicator
from ultraep.config import BalanceConfig
from ultraep.dispatch import RowMessages
from ultraep.errors import LoadError
from ultraep.loads import MAX_TOTAL, count_loads
from ultraep.plan import Plan
from ultraep.plan import plan as make_plan
from ultraep.plane import NO_LAYER, Microbatch
from ultraep.reroute import Routes, reroute, routes_of
from ultraep.runtime.agreement import Agreement, Place, Point, short_digest
from ultraep.runtime.backward import LentInBackward
from ultraep.runtime.capacity import Capacity
from ultraep.runtime.history import History
from ultraep.runtime.messages.copies import MessageCopies
from ultraep.runtime.messages.slots import SlotPool
from ultraep.runtime.observe import Watch
from ultraep.runtime.settings import Settings
from ultraep.runtime.versions import Versions
from ultraep.topology import Topology

if TYPE_CHECKING:
    from ultraep.runtime.control import ControlPlane, DeviceRoutes


@dataclass(frozen=True, slots=True)
class HostLoads:
    """The loads of all ranks, and the versions of their weights."""

    microbatch: Microbatch
    loads: IntArray  # [R, E]
    versions: IntArray  # [R]
    on_device: torch.Tensor  # [R, E] the loads where the ids are
    ids: torch.Tensor  # those of this rank that were counted

    @property
    def about_rows(self) -> int:
        """Exactly those of all ranks."""
        return int(self.loads.sum())


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What a GPU does for a microbatch before the host knows its loads."""

    microbatch: Microbatch
    config: BalanceConfig  # how the last microbatch of the layer was planned
    ids: torch.Tensor
    plan: Callable[[], Plan]  # when the loads are known
    order: torch.Tensor  # [N] rows in the order of sending
    positions: torch.Tensor  # [N] where each of them stands there


class MessagesPlane:
    """One rank of a group that exchanges messages."""

    name = "messages"

    def __init__(
        self,
        comm: Communicator,
        topology: Topology,
        config: BalanceConfig,
        settings: Settings,
        agreement: Agreement,
        versions: Versions,
        watch: Watch,
    ) -> None:
        self.comm, self.topology, self.settings, self.watch = comm, topology, settings, watch
        self.pool = SlotPool(topology.slots, settings.in_flight)
        self._config, self._agreement, self._versions = config, agreement, versions
        self._capacity = Capacity(settings.capacity, topology, config)
        self._history = History()
        self.in_backward = LentInBackward()
        self._control: ControlPlane | None = None
        self._ahead: _Ahead | None = None
        self._last_config: dict[int, BalanceConfig] = {}  # by layer
        self._counted: Microbatch | None = None  # whose ids were counted last
        self._known_to_control: Plan | None = None

    def gather(
        self, ids: torch.Tensor, microbatch: Microbatch, bundle: Bundle, **rows: Any
    ) -> HostLoads:
        """Stage 1."""
        self._control = self._control_for(ids)
        loads_E, refused = self._count(ids)
        self._counted = microbatch
        counted = isinstance(refused, torch.Tensor)  # by a GPU
        told = signature(resolve(bundle), **rows)
        records = self._agreement.loads(
            _place(Point.LOADS_AGAIN if microbatch.again else Point.LOADS, microbatch),
            loads_E,
            told=told,
            version=self._versions.of(microbatch.layer, bundle),
            refused=refused,
            meanwhile=(lambda found: self._work_ahead(microbatch, ids, found)) if counted else None,
        )
        if records.column("refused")[self.comm.rank]:
            self._refuse(ids)
        self._agreement.compare_inputs(records, told)
        versions, on_device = records.column("version"), records.loads_on_device
        return HostLoads(microbatch, records.loads, versions, on_device, ids)

    def _work_ahead(self, microbatch: Microbatch, ids: torch.Tensor, loads: torch.Tensor) -> None:
        """Plan and reroute on the device, as if it were asked for, before the host waits for it."""
        self._known_to_control = self._ahead = None
        config = self._last_config.get(microbatch.layer, self._config)
        if self._control is not None and self._control.use(config):
            plan = self._control.plan(loads).later()
            found = self._control.reroute(ids.contiguous(), counted=True)
            self._ahead = _Ahead(microbatch, config, ids, plan, *_copied(found))

    def plan(self, loads: HostLoads, config: BalanceConfig) -> Plan:
        """Stage 2."""
        microbatch = loads.microbatch
        past = self._history.note(microbatch, loads.loads.sum(axis=0)).before
        self._last_config[microbatch.layer] = config
        if self._control is not None and self._control.use(config):
            ahead = self._ahead
            if ahead is not None and ahead.microbatch is microbatch and ahead.config == config:
                plan = ahead.plan()
            else:
                plan, self._ahead = self._control.plan(loads.on_device).to_host(loads.loads), None
            self._known_to_control = plan
        else:
            backend = self.settings.backend
            plan = make_plan(loads.loads, self.topology, config, backend=backend, history=past)
        plan.check_limits()
        self._capacity.check(plan)
        return plan

    def verify(self, plan: Plan, loads: HostLoads) -> None:
        """Raise if ranks have other plans."""
        self._agreement.meet(
            _place(Point.PLAN, loads.microbatch),
            loads.on_device.device,
            digest=short_digest(plan.replicas, plan.quotas),
            told=f"{plan.num_replicas} copies by policy {plan.config.policy!r}",
        )

    def replicate(self, plan: Plan, loads: HostLoads, bundle: Bundle) -> MessageCopies:
        """Stage 3."""
        return MessageCopies(self, plan, loads, bundle)

    def trial(self, plan: Plan, loads: HostLoads, bundle: Bundle, number: int) -> MessageCopies:
        """Copies of a plan that is made up, to be timed."""
        microbatch = Microbatch(NO_LAYER, loads.microbatch.step, again=False)
        versions = np.full(self.topology.ranks, number)  # so that they are nowhere yet
        return MessageCopies(
            self, plan, replace(loads, microbatch=microbatch, versions=versions), bundle
        )

    def reroute(self, ids: torch.Tensor, plan: Plan, loads: HostLoads) -> RowMessages:
        """Stage 4."""

        def on_return() -> None:
            if self.settings.verify:
                place = _place(Point.BACKWARD, loads.microbatch)
                self._agreement.meet(place, loads.on_device.device)

        return RowMessages(self._routes(ids, plan, loads), self.comm, on_return)

    def _routes(self, ids: torch.Tensor, plan: Plan, loads: HostLoads) -> Routes:
        if self._control is None:
            return reroute(ids, plan, self.comm.rank, backend=self.settings.backend)
        known, ahead = self._known_to_control is plan, self._ahead
        if known and ahead is not None and ahead.ids is ids:
            order, positions = ahead.order, ahead.positions
        else:
            if not known:
                self._control.adopt(plan)
                self._known_to_control = plan
            counted = ids is loads.ids and self._counted is loads.microbatch
            found = self._control.reroute(ids.contiguous(), counted=counted)
            if self.settings.verify and not counted:
                self._control.check()
            order, positions = _copied(found)
        self._ahead = None
        sent = int(plan.loads[self.comm.rank].sum())
        return routes_of(plan, self.comm.rank, ids.shape, order[:sent], positions)

    def prepare(self, ids: torch.Tensor, _rows: torch.Tensor, bundle: Bundle) -> None:
        """Take the memory of one buffer of spare slots."""
        tensors = resolve(bundle)
        layout = Layout.of(tensors, len(self.topology.home_experts(self.comm.rank)))
        with self.pool.lend(layout, device_of_bundle(tensors), "nobody yet"):
            self._control = self._control_for(ids)

    def promise(self) -> None:
        """Nothing: the host tells versions in every microbatch."""

    @property
    def nbytes(self) -> int:
        """Memory taken for spare slots and gradients."""
        return self.pool.nbytes

    def check(self) -> None:
        """Raise what a GPU has noted."""
        if self._control is not None:
            self._control.check()

    def close(self) -> None:
        """Nothing but memory was taken."""

    def _control_for(self, ids: torch.Tensor) -> ControlPlane | None:
        """The kernels for these ids, if they are on a GPU, or if the user asks for them."""
        if (self.settings.backend or backend_for(ids.device.type).name) != "triton":
            return None
        control, rows = self._control, ids.numel()
        if control is not None and control.device == ids.device and rows <= control.rows:
            return control
        from ultraep.runtime.control import (  # triton, where it is used
            POLICIES,
            ControlPlane,
        )

        config = self._config
        if config.policy not in POLICIES:
            config = replace(config, policy="ultraep")
        rows = min(1 << max(rows, 1024).bit_length(), MAX_TOTAL // self.topology.ranks)
        self._known_to_control = None
        return ControlPlane(
            self.topology, config, rows=rows, rank=self.comm.rank, device=ids.device
        )

    def _count(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | int]:
        """The loads of this rank, and whether its ids are no good: an error to raise later.

        On the GPU it also counts if something was wrong since the last step.
        """
        try:
            if self._control is not None:
                return self._control.count(ids.contiguous()), self._control.faults.any()
            counts = count_loads(ids, self.topology.experts, backend=self.settings.backend)
            return torch.from_numpy(counts).to(ids.device), 0
        except LoadError:
            return torch.zeros(self.topology.experts, dtype=torch.int64, device=ids.device), 1

    def _refuse(self, ids: torch.Tensor) -> None:
        """Raise the error that `_count` has kept."""
        if self._control is not None:
            self._control.check()
            self._control.count(ids.contiguous())
        count_loads(ids, self.topology.experts, backend=self.settings.backend)


def _copied(routes: DeviceRoutes) -> tuple[torch.Tensor, torch.Tensor]:
    """Order and positions in memory of their own, of padding any.

    Where nobody checks, ids of another plan must not lead out of the tokens.
    """
    most = max(0, routes.order.numel() - 1)
    return routes.order.long().clamp_(0, most), routes.positions.long().clamp_(0, most)


def _place(point: Point, microbatch: Microbatch) -> Place:
    return Place(point, microbatch.layer, microbatch.step)
