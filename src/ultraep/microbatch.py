"""Microbatch: the tokens of all ranks passing through one layer. Its methods are the stages.

    layer = Layer(index, weights, experts)
    microbatch = balancer.begin(layer, ids, gates, tokens)
    microbatch.count()                          1  exact loads of all ranks
    microbatch.plan()                           2  replicas and quotas, the same on every rank
    with microbatch.replicate() as replicas:    3  fill the spare slots; 8 reduces their gradients
        microbatch.reroute()                    4  a slot for every routed row
        rows = microbatch.dispatch()            5
        outputs = experts(rows, replicas)       6
    y = microbatch.combine(outputs)             7

All ranks call the same verbs in the same order. A microbatch stores the results of its verbs;
backward keeps only its replicas and the exchange of its rows. A data plane keeps what outlives a
microbatch: slots, shared memory and the communicator. Each plane derives a microbatch and
implements the verbs 1 to 4: `messages` (torch.distributed) and `mapped` (memory that GPUs map from
each other).

Shapes: T tokens, R ranks, E experts, A arrived rows of this rank, D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from ultraep.comm import Communicator
from ultraep.config import BalanceConfig
from ultraep.dispatch import Arrivals, Exchange, combine, dispatch
from ultraep.errors import ConfigError
from ultraep.inputs import Inputs
from ultraep.inputs import Layer as Layer  # users import it from here
from ultraep.plan import Plan
from ultraep.replicas import Replicas
from ultraep.runtime.agreement import Agreement
from ultraep.runtime.cost import CostModel
from ultraep.runtime.dispatched import DispatchedRows, probe, slot_routes
from ultraep.runtime.settings import Settings
from ultraep.topology import Topology

T = TypeVar("T")


class AnyPlan(Protocol):
    """A plan, on the host or on a device."""

    def to_host(self) -> Plan:
        """Return the plan on the host, waiting for the device."""

    def to_host_async(self) -> Callable[[], Plan]:
        """Return a callable that yields the plan once the device has produced it; do not block."""


@dataclass(frozen=True, eq=False)
class Context:
    """The parts of a balancer that its data planes use."""

    comm: Communicator
    topology: Topology
    config: BalanceConfig
    settings: Settings
    agreement: Agreement
    cost: CostModel
    first_rank: int = 0  # number of rank 0 of the topology, for errors
    dispatched: set[Any] = field(default_factory=set)  # layers, and rows with which it was probed
    # Replicas that hold slots in a backward pass, with the number of the pass.
    lent_in_backward: dict[Replicas, int] = field(default_factory=dict)


class Microbatch(ABC):
    """One microbatch of one rank. Each verb uses the results of the verbs before it."""

    def __init__(self, inputs: Inputs, context: Context) -> None:
        self.passes, self._record = inputs.passes, inputs.passes.record
        self._inputs, self._context = inputs, context
        self._exchange: Exchange | None = None
        self._dispatched: DispatchedRows | None = None

    @abstractmethod
    def count(self) -> torch.Tensor:
        """Stage 1: return the `[R, E]` loads of all ranks, on the device of the ids. Collective."""

    @abstractmethod
    def plan(self) -> AnyPlan:
        """Stage 2: return the plan, which is the same on every rank.

        The mapped plane returns a plan that stays on the device; `to_host` fetches it. If the plan
        depends on rates, the first call of a layer measures them.
        """

    @abstractmethod
    def replicate(self) -> Replicas:
        """Stage 3: return the replicas of the plan, for a `with` block."""

    @abstractmethod
    def reroute(self) -> Exchange:
        """Stage 4: assign a slot to every routed row of this rank.

        To send rows with the dispatcher of another library, use `slots` of the result.
        """

    def dispatch(self) -> Arrivals:
        """Stage 5: return the rows that the slots of this rank serve."""
        inputs, exchange = self._inputs, self._after("reroute", self._exchange)
        if inputs.tokens is None or inputs.gates is None:
            raise ConfigError("dispatch() needs tokens and gates: pass both to Balancer.begin")
        self.passes.gradients_leave = inputs.tokens.requires_grad or inputs.gates.requires_grad
        if self._dispatched is not None:
            return self._dispatched.dispatch(inputs.tokens, inputs.gates)
        return dispatch(inputs.tokens, inputs.gates, exchange, inputs.layer.pack)

    def combine(self, outputs_AD: torch.Tensor) -> torch.Tensor:
        """Stage 7: return the `[T, D]` outputs of this rank's tokens."""
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

    def _rerouted(self, exchange: Exchange) -> Exchange:
        """End stage 4. If a dispatcher moves the rows, probe it with new shapes."""
        self._exchange, context, tokens = exchange, self._context, self._inputs.tokens
        dispatcher, layer = context.settings.dispatcher, self.passes.layer
        if tokens is None:  # the caller dispatches them
            self._record.at("")
        elif dispatcher is not None:
            routes = slot_routes(exchange, context.topology, context.comm.rank)
            shape = tokens.shape[1], tokens.dtype, routes.slots.shape[1]
            if shape not in context.dispatched:
                probe(dispatcher, routes, tokens, context.comm)
            first = layer not in context.dispatched
            context.dispatched.update((layer, shape))
            self._dispatched = DispatchedRows(dispatcher, exchange, routes, first=first)
        return exchange
