"""The interface of a microbatch: the tokens of all ranks passing through one layer.

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
microbatch: slots, shared memory and the communicator. Two data planes implement these protocols:
`messages` (torch.distributed) and `mapped` (memory that GPUs map from each other).

Shapes: T tokens, K experts per token, R ranks, E experts, H home experts and A arrived rows of this
rank, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import torch

from ultraep.bundle import Bundle
from ultraep.config import BalanceConfig
from ultraep.dispatch import Arrivals, Exchange, Pack
from ultraep.passes import Passes
from ultraep.plan import Plan
from ultraep.replicas import Replicas
from ultraep.topology import Topology

NO_LAYER = -1  # layer index of synthetic microbatches
Serve: TypeAlias = Callable[[Arrivals, Replicas], torch.Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class Layer:
    """The home experts of this rank in one layer.

    index: the value that `Balancer.register_layer` returned.
    bundle: the weights to replicate; empty: nothing can be replicated.
    serve: stage 6. The balancer times it on synthetic rows if plans depend on rates. None: the
        planner optimises balance, unless `BalanceConfig(rates=...)` is set.
    pack: converts rows to bytes before the data plane sends them; a dispatcher sends plain rows.
    """

    index: int = 0
    bundle: Bundle = field(default_factory=dict)
    serve: Serve | None = None
    pack: Pack | None = None


class Inputs(NamedTuple):
    """The inputs of a microbatch."""

    passes: Passes
    layer: Layer
    config: BalanceConfig
    ids: torch.Tensor  # [T, K] experts of every token; -1: padding
    gates: torch.Tensor | None  # [T, K]
    tokens: torch.Tensor | None  # [T, D]
    shares_slots: bool  # whether other layers may overwrite the slots before backward


class AnyPlan(Protocol):
    """A plan, on the host or on a device."""

    def to_host(self) -> Plan:
        """Return the plan on the host, waiting for the device."""

    def to_host_async(self) -> Callable[[], Plan]:
        """Return a callable that yields the plan once the device has produced it; do not block."""


class Rows(Exchange, Protocol):
    """The rows of one microbatch, which mark the stages of its passes as they move."""

    @property
    def passes(self) -> Passes: ...


class Microbatch(Protocol):
    """The verbs of one microbatch. Each uses the results of the verbs before it."""

    @property
    def passes(self) -> Passes: ...

    def count(self) -> torch.Tensor:
        """Stage 1: return the `[R, E]` loads of all ranks, on the device of the ids. Collective."""

    def plan(self) -> AnyPlan:
        """Stage 2: return the plan, which is the same on every rank.

        The mapped plane returns a plan that stays on the device; `to_host` fetches it. If the plan
        depends on rates, the first call of a layer measures them.
        """

    def replicate(self) -> Replicas:
        """Stage 3: return the replicas of the plan, for a `with` block."""

    def reroute(self) -> Rows:
        """Stage 4: assign a slot to every routed row of this rank.

        To send rows with the dispatcher of another library, use `slots` of the result.
        """

    def dispatch(self) -> Arrivals:
        """Stage 5: return the rows that the slots of this rank serve."""

    def combine(self, outputs_AD: torch.Tensor) -> torch.Tensor:
        """Stage 7: return the `[T, D]` outputs of this rank's tokens."""


class DataPlane(Protocol):
    """Runs the microbatches of one rank and owns the memory that outlives them."""

    @property
    def name(self) -> str:
        """`messages` or `mapped`."""

    @property
    def topology(self) -> Topology: ...

    def begin(self, inputs: Inputs, /) -> Microbatch:
        """Return a microbatch with these inputs."""

    def prepare(self, ids: torch.Tensor, rows: torch.Tensor, bundle: Bundle, /) -> None:
        """Allocate the memory for microbatches of this size. Collective."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated for slots and transfers."""

    def check(self) -> None:
        """Wait for the device and raise the errors that it has recorded."""

    def close(self) -> None:
        """Free the memory. The process group stays open."""
