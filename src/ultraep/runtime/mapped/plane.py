"""The data plane of mapped memory: the stages of a microbatch without a host between them.

Loads, plan, routes, rows and weights stay on the GPUs of a group that map each other's memory.
Every verb launches the same kernels whatever the loads are, so a CUDA graph can capture a whole
layer, forward and backward. Run one step before the capture, or `prepare`, to allocate memory.
Outside of graphs the hosts also exchange their positions and numbers of tokens, without waiting for
their GPUs. So memory grows, and a rank at another position is named.

Shapes: T tokens, K experts per token, R ranks, E experts, A rows that fit the workspace, D model
width.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch.nn.functional import pad

from ultraep.backends.triton.exchange import RowMap
from ultraep.bundle import Bundle, resolve, signature
from ultraep.comm import Peers
from ultraep.config import BalanceConfig
from ultraep.dispatch import Moved
from ultraep.errors import CommunicationError, ConfigError
from ultraep.microbatch import NO_LAYER, Inputs, Replicas, Rows
from ultraep.ops.modes import outside_dispatch_modes
from ultraep.ops.products import accumulator
from ultraep.passes import Passes
from ultraep.plan import Plan
from ultraep.plan import plan as make_plan
from ultraep.runtime.agreement import At, Position
from ultraep.runtime.device_planner import DevicePlan, DeviceRoutes
from ultraep.runtime.mapped.memory import MappedMemory
from ultraep.runtime.mapped.replicas import MappedReplicas
from ultraep.runtime.mapped.workspace import Workspace, Workspaces
from ultraep.runtime.microbatch import BaseMicrobatch, Context
from ultraep.runtime.streams import capturing


class MappedPlane:
    """One rank of a group of GPUs that map each other's memory; see `DataPlane`.

    inside: the ranks that map each other's memory, if these are not all.
    """

    name = "mapped"

    def __init__(self, context: Context, peers: Peers, inside: Context | None = None) -> None:
        _check_current(peers.device)
        self.context, self.topology, self.device = context, context.topology, peers.device
        self._peers, self._hosts = peers, context.comm.hosts()
        agreement = context.agreement.over(self._hosts)
        self.of_domain = inside or context
        self.workspaces = Workspaces(context, peers, agreement, self.of_domain)
        self.counted: Passes | None = None  # whose ids and loads the device holds

    def begin(self, inputs: Inputs) -> MappedMicrobatch:
        return MappedMicrobatch(self, inputs)

    def prepare(self, ids: torch.Tensor, rows: torch.Tensor, bundle: Bundle) -> None:
        tokens, top_k = ids.shape
        workspace = self.workspaces.for_tokens(tokens, top_k)
        workspace.memory.prepare(resolve(bundle), None if workspace.dispatched else rows)

    def compare_places(self, place: Position) -> None:
        """Raise if the hosts of all ranks are not at this place, unless a graph is captured."""
        if not capturing(self.device):
            self.workspaces.agreement.compare(place, torch.device("cpu"))

    @property
    def nbytes(self) -> int:
        return sum(workspace.memory.nbytes for workspace in self.workspaces.all)

    def check(self) -> None:
        try:
            for workspace in self.workspaces.all:
                workspace.check()
        except CommunicationError as error:
            self._ask_hosts(error)
            raise

    def _ask_hosts(self, error: CommunicationError) -> None:
        """Raise with what the hosts know: a rank that is late may have waited for another."""
        try:
            self._hosts.gather_objects(None)
        except CommunicationError as cause:
            ranks = *error.ranks, *cause.ranks
            raise CommunicationError(f"{error}; {cause}", ranks=ranks, place=error.place) from error

    def close(self) -> None:
        self.workspaces.all.clear()
        self._peers.close()
        if self._hosts is not self.context.comm:
            self._hosts.close()


class MappedMicrobatch(BaseMicrobatch[DevicePlan]):
    """One microbatch of one rank, on its device.

    All microbatches use the same buffers for ids, loads and routes. So stages 1, 2 and 4 of one
    microbatch run before the next one is counted.
    """

    # From `count`:
    _workspace: Workspace
    _most_tokens: int  # of a rank

    def __init__(self, plane: MappedPlane, inputs: Inputs) -> None:
        super().__init__(inputs, plane.context)
        self._plane = plane
        self._last_replicas: Any = None
        self._host_plan: Plan | None = None  # if it was not made on the device

    def _count(self) -> torch.Tensor:
        plane, inputs, passes = self._plane, self._inputs, self.passes
        own = signature(resolve(inputs.layer.bundle), rows=inputs.tokens, gates=inputs.gates)
        workspaces, place = plane.workspaces, self._loads_place()
        workspace, self._most_tokens = workspaces.for_microbatch(inputs.ids, place, own)
        workspace.poll()
        self._workspace, plane.counted = workspace, passes
        digest = zlib.crc32(f"layer {passes.layer}: {own}".encode()) >> 1
        return self._gather_loads(workspace.control.count(inputs.ids.contiguous()), digest)

    def _gather_loads(self, counts_E: torch.Tensor, digest: int) -> torch.Tensor:
        """Return [R, E] the loads of all ranks; compares digests."""
        return self._workspace.memory.share_loads(counts_E, digest)

    def _rows_of_all(self) -> int:
        """As if every rank had the tokens of the rank with the most tokens."""
        return self._most_tokens * self._inputs.ids.shape[1] * self._plane.topology.ranks

    def _current(self) -> Workspace:
        """Return the workspace if its buffers still hold this microbatch."""
        counted = self._plane.counted
        if counted is not self.passes:
            raise ConfigError(
                f"microbatch {self.passes.step} cannot be planned or rerouted after microbatch "
                f"{counted.step if counted else '?'} was counted: on a GPU, call count, plan and "
                "reroute of one microbatch before count of the next"
            )
        return self._workspace

    def _make_plan(self, config: BalanceConfig) -> DevicePlan:
        plane, control, loads = self._plane, self._current().control, self._loads
        assert loads is not None
        if control.use(config):
            plan = control.plan(loads)
            if plane.workspaces.must_wait(self._current(), self.passes.layer):
                plan = self._in_fitting_workspace(plan, int(plan.rank_loads.max()))
            return plan.copied()
        if capturing(plane.device):
            raise ConfigError(
                f"policy {config.policy!r} plans on the host and cannot be captured in a graph; "
                f"the device plans {control.config.policy!r}"
            )
        host_plan = make_plan(loads.cpu().numpy().astype("int64"), plane.topology, config)
        self._context.capacity.check(host_plan)
        self._host_plan = host_plan
        return control.adopt(host_plan).copied()

    def _settled(self, plan: DevicePlan) -> DevicePlan:
        if self._host_plan is None:
            return plan
        fitting = self._in_fitting_workspace(plan, int(self._host_plan.rank_loads.max()))
        return plan if fitting is plan else fitting.copied()

    def _in_fitting_workspace(self, plan: DevicePlan, most_rows: int) -> DevicePlan:
        """Return the plan; if a rank serves more rows than fit, move to a larger workspace first.

        Collective then: all ranks have the same plan.
        """
        plane, ids = self._plane, self._inputs.ids
        larger = plane.workspaces.larger(self._current(), most_rows)
        if larger is None:
            return plan
        host_plan = plan.to_host()
        self._workspace = larger
        larger.control.count(ids.contiguous())
        return larger.control.adopt(host_plan)

    def replicate(self) -> Replicas:
        replicas = self._last_replicas = super().replicate()
        return replicas

    def _replicas(self, plan: DevicePlan) -> MappedReplicas:
        return MappedReplicas(
            self._plane.of_domain,
            self._workspace.memory,
            self.passes,
            self._replica_table(plan),
            self._inputs.layer.bundle,
        )

    def _replica_table(self, plan: DevicePlan) -> torch.Tensor:
        """Return [C, 3] the replicas of the plan that these ranks send each other."""
        return plan.replicas

    def _trial(self, plan: Plan, bundle: Bundle) -> MappedReplicas:
        passes = Passes(NO_LAYER, self.passes.step)
        context, memory = self._plane.of_domain, self._workspace.memory
        return MappedReplicas(context, memory, passes, self._trial_table(plan), bundle)

    def _trial_table(self, plan: Plan) -> torch.Tensor:
        """Return the same of a synthetic plan."""
        return self._workspace.control.adopt(plan).copied().replicas

    def _rows(self, plan: DevicePlan) -> Rows:
        assert plan.topology == self._plane.topology
        workspace = self._current()
        routes = workspace.control.reroute(self._inputs.ids.contiguous(), counted=True)
        return MappedRows(
            self.passes,
            workspace.memory,
            routes,
            self._last_replicas,
            self._plane.compare_places,
            workspace.overflow(plan),
            dispatched=workspace.dispatched,
        )


class MappedRows:
    """Moves rows between tokens and slots; each rank pulls its rows from the memory of others.

    compare_places: raises if not all ranks are at the same place.
    overflow: whether some rank has more rows than fit, on the device; None: that is impossible.
    dispatched: a dispatcher moves the rows.
    """

    def __init__(
        self,
        passes: Passes,
        memory: MappedMemory,
        routes: DeviceRoutes,
        replicas: Any,
        compare_places: Callable[[Position], None],
        overflow: torch.Tensor | None = None,
        *,
        dispatched: bool = False,
    ) -> None:
        self.passes = passes
        self._replicas, self._compare_places = replicas, compare_places
        self._memory, self._routes, self._overflow = memory, routes, overflow
        self._shape = routes.slots.shape
        if not dispatched:
            self.offsets = self._rows.offsets
        else:  # `_rows` would fill them while it moves rows
            counts = routes.receive_counts.sum(dim=0).cumsum(dim=0)
            self.offsets = pad(counts, (1, 0)).to(torch.int32)

    @cached_property
    def _rows(self) -> RowMap:
        return self._memory.exchange.row_map()

    @property
    def slots(self) -> torch.Tensor:
        return self._routes.slots

    @outside_dispatch_modes
    def begins(self) -> list[int]:
        begins: list[int] = self.offsets.tolist()
        return begins

    def begin_backward(self) -> None:
        self.passes.begin_backward()
        self._compare_places(Position(At.BACKWARD, self.passes.layer, self.passes.step))
        if self._replicas is not None:
            self._replicas.begin_again()

    def to_slots(self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None) -> Moved:
        record = self.passes.record
        if not record.backward:
            record.at("dispatch")
        memory, exchange, routes = self._memory, self._memory.exchange, self._routes
        values_TD = values_TD.contiguous()
        nbytes = exchange.layout.value_bytes(values_TD.shape[1] * values_TD.itemsize)
        exchange.expose_values(values_TD, memory.writable("values", nbytes))
        if scalars_TK is not None:
            exchange.tables(routes.rows_of_slot, routes.receive_counts, self._rows)
            exchange.expose(routes.order, scalars_TK.contiguous())
        memory.barrier()
        gates_A = None
        if scalars_TK is not None:
            gates_A = scalars_TK.new_empty(memory.capacity, dtype=accumulator(scalars_TK.dtype))
            exchange.origins(routes.receive_counts, self._rows, gates_A)
            exchange.landings(routes.slots, routes.positions, self._rows)
        rows_AD = values_TD.new_empty(memory.capacity, values_TD.shape[1])
        exchange.gather_rows(memory.readable("values", nbytes), self._rows, rows_AD)
        record.at("experts", "experts back")
        return rows_AD, gates_A

    def to_tokens(self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None) -> Moved:
        record = self.passes.record
        record.at("combine", "dispatch back")
        memory, exchange, width = self._memory, self._memory.exchange, rows_AD.shape[1]
        nbytes = exchange.layout.served_bytes(width * rows_AD.itemsize)
        served = exchange.served_rows(memory.region("served", nbytes), width, rows_AD.dtype)
        if rows_AD.data_ptr() != served.data_ptr():
            memory.writable("served", nbytes)
            served[: len(rows_AD)].copy_(rows_AD)
        scalars_TK = None
        if scalars_A is not None:
            region = memory.writable("served", nbytes)
            scalars = exchange.served_scalars(region, scalars_A.dtype)
            scalars[: len(scalars_A)].copy_(scalars_A)
            scalars_TK = scalars_A.new_empty(self._shape)
        memory.barrier()
        sums_TD = rows_AD.new_empty(self._shape[0], width)
        exchange.sum_rows(memory.readable("served", nbytes), self._rows, sums_TD, scalars_TK)
        self._mark_overflow(sums_TD)
        if record.backward:
            record.end()
        return sums_TD, scalars_TK

    def _mark_overflow(self, sums_TD: torch.Tensor) -> None:
        """Put a NaN into the result if rows were dropped: the host learns of it only later."""
        if self._overflow is not None and sums_TD.numel():
            sums_TD.view(-1)[:1].masked_fill_(self._overflow, torch.nan)


def _check_current(device: torch.device) -> None:
    """Raise if kernels would be launched on another device than this one."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ConfigError(
            f"the memory is on {device}, the current device is cuda:{torch.cuda.current_device()}: "
            "call torch.cuda.set_device first"
        )
