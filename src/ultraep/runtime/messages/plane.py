"""MessagesPlane: loads, weights, rows and gradients travel as messages of a communicator.

The host knows loads and plan. Some messages also carry what the ranks must agree on (agreement.py),
so that a rank with other weights, or at another place of the program, is an error that names it, on
every rank.

Shapes: T tokens, K experts per token, R ranks, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ultraep.arrays import IntArray
from ultraep.backends import backend_for
from ultraep.bundle import (
    Bundle,
    Layout,
    device_of_bundle,
    given_tensors,
    resolve,
    signature,
)
from ultraep.comm import Communicator
from ultraep.config import BalanceConfig
from ultraep.dispatch import RowMessages
from ultraep.errors import LoadError
from ultraep.loads import MAX_TOTAL, count_loads
from ultraep.plan import Plan
from ultraep.plan import plan as make_plan
from ultraep.plane import Microbatch
from ultraep.reroute import Routes, reroute, routes_of
from ultraep.runtime.agreement import Agreement, Place, Point, short_digest
from ultraep.runtime.history import History
from ultraep.runtime.messages.copies import MessageCopies
from ultraep.runtime.messages.slots import SlotPool
from ultraep.runtime.observe import Watch
from ultraep.runtime.settings import Settings
from ultraep.runtime.versions import Versions
from ultraep.topology import Topology

if TYPE_CHECKING:
    from ultraep.runtime.mapped.control import ControlPlane, DevicePlan


@dataclass(frozen=True, slots=True)
class HostLoads:
    """The loads of all ranks, and the versions of their weights."""

    microbatch: Microbatch
    loads: IntArray  # [R, E]
    versions: IntArray  # [R]
    on_device: torch.Tensor  # [R, E] the loads where the ids are
    ids: torch.Tensor  # those of this rank that were counted


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
        self._history = History()
        self._control: ControlPlane | None = None
        # What the control plane has planned before it was asked, and for whom.
        self._ahead: tuple[Microbatch | None, DevicePlan | None] = None, None
        self._known_to_control: Plan | None = None

    def gather(
        self, ids: torch.Tensor, microbatch: Microbatch, bundle: Bundle, **rows: Any
    ) -> HostLoads:
        """Stage 1."""
        self._control = self._control_for(ids)
        loads_E, refused = self._count(ids)
        told = signature(resolve(bundle), **rows)
        records = self._agreement.loads(
            _place(Point.LOADS_AGAIN if microbatch.again else Point.LOADS, microbatch),
            loads_E,
            told=told,
            version=self._versions.of(microbatch.layer, given_tensors(bundle)),
            refused=refused,
            meanwhile=lambda on_device: self._plan_ahead(microbatch, on_device),
        )
        if records.column("refused")[self.comm.rank]:
            self._refuse(ids)
        self._agreement.compare_inputs(records, told)
        versions, on_device = records.column("version"), records.loads_on_device
        return HostLoads(microbatch, records.loads, versions, on_device, ids)

    def _plan_ahead(self, microbatch: Microbatch, loads: torch.Tensor) -> None:
        """Begin to plan on the device, while the host waits for the loads."""
        if self._control is not None:
            self._known_to_control = None
            self._ahead = microbatch, self._control.plan(loads)

    def plan(self, loads: HostLoads, config: BalanceConfig) -> Plan:
        """Stage 2."""
        microbatch = loads.microbatch
        total, again = loads.loads.sum(axis=0), microbatch.again
        moment = self._history.note(microbatch.layer, total, again=again)
        if self._control is not None and config == self._control.config:
            whose, found = self._ahead
            if found is None or whose is not microbatch:
                found = self._control.plan(loads.on_device)
            self._ahead = None, None
            plan = self._known_to_control = found.to_host(loads.loads)
        else:
            backend = self.settings.backend
            plan = make_plan(
                loads.loads, self.topology, config, backend=backend, history=moment.before
            )
        plan.check_limits()
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
        if self._known_to_control is not plan:
            self._control.adopt(plan)
            self._known_to_control, self._ahead = plan, (None, None)
        counted = ids is loads.ids
        order = self._control.reroute(ids.contiguous(), counted=counted).order
        if self.settings.verify and not counted:
            self._control.check()
        # Where nobody checks, ids of another plan must not lead out of the tokens.
        sent = int(plan.loads[self.comm.rank].sum())
        order = order[:sent].long().clamp_(0, max(0, ids.numel() - 1))
        return routes_of(plan, self.comm.rank, ids.shape, order)

    def prepare(self, ids: torch.Tensor, _rows: torch.Tensor, bundle: Bundle) -> None:
        """Take the memory of one buffer of spare slots."""
        tensors = resolve(bundle)
        layout = Layout.of(tensors, len(self.topology.home_experts(self.comm.rank)))
        with self.pool.lend(layout, device_of_bundle(tensors), "nobody yet"):
            self._control = self._control_for(ids)

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
        from ultraep.runtime.mapped.control import (  # triton, where it is used
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


def _place(point: Point, microbatch: Microbatch) -> Place:
    return Place(point, microbatch.layer, microbatch.step)
