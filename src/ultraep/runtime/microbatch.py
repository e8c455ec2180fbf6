"""The base of all data planes: their registration, and their microbatches.

`BaseMicrobatch` checks the order of the verbs, marks their stages in the record of the pass, and
measures rates where a plan needs them. A data plane implements `_count`, `_rows_of_all`,
`_make_plan`, `_replicas`, `_trial` and `_rows`.

Shapes: T tokens, R ranks, E experts, A arrived rows, D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ultraep.bundle import Bundle
from ultraep.combine import combine
from ultraep.comm import Communicator, Peers
from ultraep.config import BalanceConfig
from ultraep.dispatch import Arrivals, Dispatcher, dispatch
from ultraep.errors import ConfigError
from ultraep.microbatch import AnyPlan, DataPlane, Inputs, Rows
from ultraep.ops.modes import outside_dispatch_modes
from ultraep.plan import Plan
from ultraep.position import At, Position
from ultraep.replicas import Replicas
from ultraep.runtime.agreement import Agreement
from ultraep.runtime.capacity import Capacity
from ultraep.runtime.cost import CostModel
from ultraep.runtime.dispatched import DispatchedRows, probe, slot_routes
from ultraep.runtime.hosts import FastLinks
from ultraep.runtime.settings import Settings
from ultraep.topology import Topology

AnyPlanT = TypeVar("AnyPlanT", bound=AnyPlan)
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Context:
    """The parts of a balancer that its data planes use."""

    comm: Communicator
    topology: Topology
    config: BalanceConfig
    settings: Settings
    capacity: Capacity
    agreement: Agreement
    cost: CostModel
    first_rank: int = 0  # number of rank 0 of the topology, for errors
    dispatched: set[Any] = field(default_factory=set)  # layers, and rows with which it was probed
    # Replicas that hold slots in a backward pass, with the number of the pass.
    lent_in_backward: dict[Replicas, int] = field(default_factory=dict)


class PlaneRequest(NamedTuple):
    """Where a data plane is needed: one rank of a group, with tokens on this device."""

    comm: Communicator
    topology: Topology
    links: FastLinks
    device: torch.device
    peers: Peers | None = None  # mapped memory that the user passed


class PlaneKind(NamedTuple):
    """A data plane that balancers can use; `connect.PLANES` registers it.

    connect: collective; returns the function that makes the plane. If the group cannot be served,
        raises ConfigError or CommunicationError with the reason.
    obstacle: why this rank cannot use the plane, found without messages; empty if it can. None: the
        plane serves every group, so ranks need not compare their obstacles.
    passed_over: why data_plane="auto" does not try the plane here; empty if it does.
    reason: shown by `repr(balancer)` when the plane is chosen, with {size} ranks.
    """

    name: str
    connect: Callable[[PlaneRequest], Callable[[Context], DataPlane]]
    obstacle: Callable[[PlaneRequest], str] | None = None
    passed_over: Callable[[PlaneRequest], str] = lambda _: ""
    reason: str = "requested"


class BaseMicrobatch(ABC, Generic[AnyPlanT]):
    """One microbatch of one rank; see `ultraep.microbatch.Microbatch`."""

    def __init__(self, inputs: Inputs, context: Context) -> None:
        self.passes, self._record = inputs.passes, inputs.passes.record
        self._inputs, self._context = inputs, context
        self._loads: torch.Tensor | None = None
        self._plan: AnyPlanT | None = None
        self._exchange: Rows | None = None
        self._dispatched: DispatchedRows | None = None

    @outside_dispatch_modes
    def count(self) -> torch.Tensor:
        self._record.at("loads")
        self._loads = self._count()
        return self._loads

    @outside_dispatch_modes
    def plan(self) -> AnyPlanT:
        self._after("count", self._loads)
        record, context = self._record, self._context
        config = context.cost.config(self._inputs, self._rows_of_all(), self._trial)
        record.at("plan")
        plan = record.plan = self._make_plan(config)
        record.at("verify")
        self._verify(plan)
        plan = self._plan = self.passes.plan = record.plan = self._settled(plan)
        if self._inputs.tokens is None:  # the caller dispatches rows
            record.at("")
        return plan

    def replicate(self) -> Replicas:
        return self._replicas(self._after("plan", self._plan))

    @outside_dispatch_modes
    def reroute(self) -> Rows:
        self._record.at("reroute")
        exchange = self._exchange = self._rows(self._after("plan", self._plan))
        dispatcher, tokens = self._context.settings.dispatcher, self._inputs.tokens
        if dispatcher is not None and tokens is not None:
            self._dispatched = self._through(dispatcher, exchange, tokens)
        if tokens is None:
            self._record.at("")
        return exchange

    def _through(
        self, dispatcher: Dispatcher, exchange: Rows, tokens: torch.Tensor
    ) -> DispatchedRows:
        """Return the rows of this microbatch through a dispatcher; probe it with new shapes."""
        context, layer = self._context, self.passes.layer
        routes = slot_routes(exchange, context.topology, context.comm.rank)
        shape = tokens.shape[1], tokens.dtype, routes.slots.shape[1]
        if shape not in context.dispatched:
            probe(dispatcher, routes, tokens, context.comm)
        first = layer not in context.dispatched
        context.dispatched.update((layer, shape))
        return DispatchedRows(dispatcher, exchange, routes, first=first)

    def dispatch(self) -> Arrivals:
        inputs, exchange = self._inputs, self._after("reroute", self._exchange)
        if inputs.tokens is None or inputs.gates is None:
            raise ConfigError("dispatch() needs tokens and gates: pass both to Balancer.begin")
        self.passes.gradients_leave = inputs.tokens.requires_grad or inputs.gates.requires_grad
        if self._dispatched is not None:
            return self._dispatched.dispatch(inputs.tokens, inputs.gates)
        return dispatch(inputs.tokens, inputs.gates, exchange, inputs.layer.pack)

    def combine(self, outputs_AD: torch.Tensor) -> torch.Tensor:
        if self._dispatched is not None:
            y_TD = self._dispatched.combine(outputs_AD)
        else:
            y_TD = combine(outputs_AD, self._after("reroute", self._exchange))
        self._record.end()
        return y_TD

    def _after(self, verb: str, result: T | None) -> T:
        """Return the result of an earlier verb; raise if that verb was not called."""
        if result is None:
            raise ConfigError(
                f"call {verb}() first: the verbs of a microbatch are count, plan, replicate, "
                "reroute, dispatch, combine, in this order"
            )
        return result

    def _place(self, point: At) -> Position:
        return Position(point, self.passes.layer, self.passes.step)

    def _loads_place(self) -> Position:
        return self._place(At.LOADS_RECOMPUTED if self.passes.recomputed else At.LOADS)

    @abstractmethod
    def _count(self) -> torch.Tensor:
        """Return [R, E] the loads of all ranks."""

    @abstractmethod
    def _rows_of_all(self) -> int:
        """Return the routed rows of all ranks or an upper bound, the same number on every host."""

    @abstractmethod
    def _make_plan(self, config: BalanceConfig) -> AnyPlanT:
        """Return the plan for the loads that were counted."""

    def _verify(self, plan: AnyPlanT) -> None:
        """Raise if ranks have different plans."""

    def _settled(self, plan: AnyPlanT) -> AnyPlanT:
        """Return a plan that all ranks have, once there is memory for it; may be collective."""
        return plan

    @abstractmethod
    def _replicas(self, plan: AnyPlanT) -> Replicas:
        """Return the replicas of the plan."""

    @abstractmethod
    def _trial(self, plan: Plan, bundle: Bundle) -> Replicas:
        """Return the replicas of a synthetic plan, to be timed."""

    @abstractmethod
    def _rows(self, plan: AnyPlanT) -> Rows:
        """Return the object that moves the rows of this microbatch."""
