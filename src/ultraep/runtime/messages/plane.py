"""The data plane of messages: loads, weights, rows and gradients travel through a communicator.

The host knows loads and plan. Ranks also compare their weights and their positions in the program
(agreement.py). If they differ, every rank raises an error that names the ranks.

Shapes: T tokens, K experts per token, N routed rows, M of them without padding, A arrived rows, L
slots of this rank, R ranks, E experts, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import embedding_bag

from ultraep.arrays import IntArray, digest_of
from ultraep.backends import has_kernels
from ultraep.bundle import Bundle, resolve, signature
from ultraep.comm import moved
from ultraep.config import AUTO
from ultraep.dispatch import Exchange, Moved
from ultraep.errors import LoadError
from ultraep.inputs import NO_LAYER, Inputs
from ultraep.loads import MAX_TOTAL, count_loads
from ultraep.microbatch import Context, Microbatch
from ultraep.ops.modes import outside_dispatch_modes
from ultraep.passes import Passes
from ultraep.plan import Plan
from ultraep.plan import plan as make_plan
from ultraep.position import At
from ultraep.replicas import Replicas
from ultraep.reroute import Routes, reroute, routes_of
from ultraep.runtime.agreement import Agreement, Records
from ultraep.runtime.messages.replicas import MessageReplicas, SlotPool

if TYPE_CHECKING:
    from ultraep.runtime.device_plan import DeviceRoutes
    from ultraep.runtime.device_planner import DevicePlanner


class MessagesPlane:
    """One rank of a group that exchanges messages, and its kernels on a GPU; see `DataPlane`."""

    name = "messages"

    def __init__(self, context: Context) -> None:
        self.context, self.topology = context, context.topology
        self.pool = SlotPool(context.topology.slots, context.settings.in_flight)
        self.kernels: Kernels | None = None

    def begin(self, inputs: Inputs) -> MessagesMicrobatch:
        self.kernels = self._kernels_for(inputs.ids)
        return MessagesMicrobatch(self, inputs)

    def replicas(
        self, passes: Passes, plan: Plan, bundle: Bundle, device: torch.device
    ) -> Replicas:
        """Return the replicas of a plan; device: where the tokens are."""
        return MessageReplicas(self.context, self.pool, passes, plan, bundle, device)

    def verifier(self, device: torch.device) -> tuple[Agreement, torch.device]:
        """Return what compares plans, and the device of its messages."""
        return self.context.agreement, device

    @property
    def nbytes(self) -> int:
        return self.pool.nbytes

    def check(self) -> None:
        if self.kernels is not None:
            self.kernels.control.check()

    def close(self) -> None:
        """Do nothing: only memory was allocated."""

    def _kernels_for(self, ids: torch.Tensor) -> Kernels | None:
        """Return kernels for these ids if they are on a GPU, or if the settings ask for them."""
        chosen, kernels, rows = self.context.settings.kernels, self.kernels, ids.numel()
        if not (has_kernels(ids.device.type) if chosen is None else chosen):
            return None
        if kernels is not None and kernels.fit(ids):
            return kernels
        from ultraep.runtime.device_planner import DevicePlanner, device_config  # imports triton

        config = device_config(self.context.config)
        rows = min(1 << max(rows, 1024).bit_length(), MAX_TOTAL // self.topology.ranks)
        rank, device = self.context.comm.rank, ids.device
        return Kernels(DevicePlanner(self.topology, config, rows=rows, rank=rank, device=device))


@dataclass(eq=False)
class Kernels:
    """The kernels of a GPU, and the microbatches whose ids and plan their buffers hold."""

    control: DevicePlanner
    counted: Passes | None = None
    planned: Passes | None = None

    def fit(self, ids: torch.Tensor) -> bool:
        """Whether the buffers are large enough for these ids."""
        return self.control.device == ids.device and ids.numel() <= self.control.rows


class MessagesMicrobatch(Microbatch):
    """One microbatch of one rank."""

    def __init__(self, plane: MessagesPlane, inputs: Inputs) -> None:
        super().__init__(inputs, plane.context)
        self._plane, self._kernels = plane, plane.kernels
        self._counted: Records | None = None  # from `count`, with the loads of all ranks
        self._plan: Plan | None = None

    @outside_dispatch_modes
    def count(self) -> torch.Tensor:
        self._record.at("loads")
        inputs, context = self._inputs, self._context
        counts_E, refused = self._own_counts()
        own = signature(resolve(inputs.layer.bundle), rows=inputs.tokens, gates=inputs.gates)
        records = context.agreement.gather_loads(
            self.passes.position(At.LOADS),
            counts_E,
            signature=own,
            refused=refused,
            tokens=len(inputs.ids),
            crossing_D=None if isinstance(refused, int) and refused else self._crossing(),
        )
        if records.column("refused")[context.comm.rank]:
            self._refuse()
        context.agreement.compare_inputs(records, own)
        self._counted = records
        return records.loads_on_device

    def _crossing(self) -> torch.Tensor | None:
        """Return [D] the tokens that each fast-link domain serves; None: not needed."""
        return None

    def _own_counts(self) -> tuple[torch.Tensor, torch.Tensor | int]:
        """Return [E] the loads of this rank, and whether its ids are invalid.

        On a GPU, the second also covers faults since the last step. The error is raised later.
        """
        ids, experts = self._inputs.ids, self._context.topology.experts
        try:
            if self._kernels is not None:
                control, self._kernels.counted = self._kernels.control, self.passes
                return control.count(ids.contiguous()), control.faults.any()
            counts = count_loads(ids, experts, backend=self._context.settings.backend)
            return torch.from_numpy(counts).to(ids.device), 0
        except LoadError:
            return torch.zeros(experts, dtype=torch.int64, device=ids.device), 1

    def _refuse(self) -> None:
        """Raise the error that `_own_counts` caught."""
        ids, context = self._inputs.ids, self._context
        if self._kernels is not None:
            self._kernels.control.check()
            self._kernels.control.count(ids.contiguous())
        count_loads(ids, context.topology.experts, backend=context.settings.backend)

    @outside_dispatch_modes
    def plan(self) -> Plan:
        counted, context, record = self._after("count", self._counted), self._context, self._record
        loads, kernels = counted.loads, self._kernels
        config = context.cost.config(self._inputs, int(loads.sum()), self._trial)
        record.at("plan")
        if kernels is not None and kernels.control.use(config):
            kernels.planned = self.passes
            plan = kernels.control.plan(counted.loads_on_device).to_host(loads)
        else:
            plan = make_plan(loads, context.topology, config, backend=context.settings.backend)
        if context.settings.capacity != AUTO:
            context.settings.check_rows(plan)
        record.plan = plan
        record.at("verify")
        if context.comm.size > 1:
            agreement, device = self._plane.verifier(self._inputs.ids.device)
            agreement.compare(
                self.passes.position(At.PLAN),
                device,
                digest=digest_of(plan.replicas, plan.quotas),
                description=f"{plan.num_replicas} replicas by policy {plan.config.policy!r}",
            )
        self._plan = self.passes.plan = plan
        if self._inputs.tokens is None:  # the caller dispatches rows
            record.at("")
        return plan

    def _trial(self, plan: Plan, bundle: Bundle) -> Replicas:
        """Return the replicas of a synthetic plan, to be timed."""
        passes = Passes(NO_LAYER, self.passes.step)
        return self._plane.replicas(passes, plan, bundle, self._inputs.ids.device)

    def replicate(self) -> Replicas:
        plan, inputs = self._after("plan", self._plan), self._inputs
        return self._plane.replicas(self.passes, plan, inputs.layer.bundle, inputs.ids.device)

    @outside_dispatch_modes
    def reroute(self) -> Exchange:
        self._record.at("reroute")
        routes = self._routes(self._after("plan", self._plan))
        return self._rerouted(RowMessages(routes, self._context, self.passes))

    def _routes(self, plan: Plan) -> Routes:
        ids, rank, kernels = self._inputs.ids, self._context.comm.rank, self._kernels
        if kernels is None:
            return reroute(ids, plan, rank, backend=self._context.settings.backend)
        if kernels.planned is not self.passes:
            kernels.control.adopt(plan)
        counted = kernels.counted is self.passes
        kernels.planned = kernels.counted = self.passes
        order, positions = _copied(kernels.control.reroute(ids.contiguous(), counted=counted))
        sent = int(plan.loads[rank].sum())
        return routes_of(plan, rank, ids.shape, order[:sent], positions)


def _copied(routes: DeviceRoutes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return order and positions in their own memory, clamped where a row is padding."""
    most = max(0, routes.order.numel() - 1)
    return routes.order.long().clamp_(0, most), routes.positions.long().clamp_(0, most)


class RowMessages:
    """Moves rows between tokens and slots by messages."""

    def __init__(self, routes: Routes, context: Context, passes: Passes) -> None:
        self.passes = passes
        self.routes, self._context, self._comm = routes, context, context.comm
        self._blocks = routes.receive_counts
        self._from_rank: list[int] = self._blocks.sum(axis=1).tolist()
        self._begins = [0, *accumulate(self._blocks.sum(axis=0).tolist())]
        self.offsets = moved(torch.tensor(self._begins, dtype=torch.int32), routes.order.device)

    @property
    def slots(self) -> torch.Tensor:
        return self.routes.slots

    def begins(self) -> list[int]:
        return self._begins

    def begin_backward(self) -> None:
        self.passes.begin_backward()
        position = self.passes.position(At.BACKWARD)
        self._context.agreement.compare(position, self.offsets.device)

    def to_slots(self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None) -> Moved:
        record, order = self.passes.record, self.routes.order
        if not record.backward:
            record.at("dispatch")
        rows_AD = self._to_slot_order(values_TD.index_select(0, self.routes.token_of_row))
        scalars_A = None
        if scalars_TK is not None:
            scalars_A = self._to_slot_order(scalars_TK.reshape(-1).index_select(0, order))
        record.at("experts", "experts back")
        return rows_AD, scalars_A

    def to_tokens(self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None) -> Moved:
        record = self.passes.record
        record.at("combine", "dispatch back")
        sums_TD = self._sums(rows_AD)
        scalars_TK = None if scalars_A is None else self._to_token_order(scalars_A)
        if record.backward:
            record.end()
        return sums_TD, scalars_TK

    def _sums(self, rows_AD: torch.Tensor) -> torch.Tensor:
        """[T, D] the rows of each token, summed in router order."""
        fast = rows_AD.device.type == "cpu" and rows_AD.dtype in (torch.float32, torch.float64)
        if not (fast and self.routes.has_padding and len(self.routes.order)):
            return self._to_token_order(rows_AD).sum(dim=1, dtype=rows_AD.dtype)
        positions, begins = self.routes.bags  # skips padding, of which domains have much
        return embedding_bag(positions, self._back(rows_AD), begins, mode="sum")

    def _to_slot_order(self, sent: torch.Tensor) -> torch.Tensor:
        """[A, ...] in slot order, from `[M, ...]` in the order of sending."""
        if self._comm.size == 1:
            return sent
        arrived = self._comm.all_to_all(sent, self.routes.send_counts, self._from_rank)
        return _transpose_blocks(arrived, self._blocks)

    def _to_token_order(self, served: torch.Tensor) -> torch.Tensor:
        """[T, K, ...] in the order of tokens, from `[A, ...]` in slot order."""
        back = self._back(served)
        shape = *self.routes.shape, *back.shape[1:]
        if not len(back):
            return back.new_zeros(shape)
        rows = back.index_select(0, self.routes.positions)
        if self.routes.has_padding:
            rows[self.routes.padding] = 0
        return rows.reshape(shape)

    def _back(self, served: torch.Tensor) -> torch.Tensor:
        """[M, ...] in the order of sending, from `[A, ...]` in slot order."""
        if self._comm.size == 1:
            return served
        leaving = _transpose_blocks(served.contiguous(), self._blocks.T)
        return self._comm.all_to_all(leaving, self._from_rank, self.routes.send_counts)


def _transpose_blocks(rows: torch.Tensor, lengths: IntArray) -> torch.Tensor:
    """Rows in blocks `[i, j]` of `lengths[i, j]` rows, reordered to blocks `[j, i]`."""
    outer, inner = lengths.shape
    if outer <= 1 or inner <= 1:
        return rows
    blocks = rows.split(lengths.reshape(-1).tolist())
    return torch.cat([blocks[i * inner + j] for j in range(inner) for i in range(outer)])
