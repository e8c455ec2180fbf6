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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeAlias

import torch

from ultraep.bundle import Bundle, Stack
from ultraep.config import BalanceConfig
from ultraep.dispatch import Arrivals, Exchange, Pack
from ultraep.ops.products import Beside
from ultraep.passes import Passes
from ultraep.plan import Plan
from ultraep.topology import Topology

NO_LAYER = -1  # layer index of synthetic microbatches
TensorSpecs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype, by name
Serve: TypeAlias = "Callable[[Arrivals, Replicas], torch.Tensor]"


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


@dataclass(frozen=True, eq=False, slots=True)
class Inputs:
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


class Replicas(Protocol):
    """The replicas of a plan in the slots of this rank, valid inside a `with` block.

    Entering starts to fill the slots; `tensors` waits until they are filled. After the block, other
    microbatches may overwrite the slots. Entering again in backward refills them if necessary, in
    the same memory unless another microbatch holds it.
    """

    @property
    def bundle(self) -> Bundle:
        """The weights of the home experts of this rank."""

    @property
    def num_homes(self) -> int: ...

    @property
    def possible(self) -> bool:
        """Whether this microbatch may have replicas. A device plan may still have none."""

    @property
    def kernels(self) -> bool:
        """Whether Triton kernels can run on the rows of this microbatch."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return `[slots, ...]` for every tensor of the bundle; raises outside of the block."""

    def served_rows(self, like_AD: torch.Tensor) -> torch.Tensor | None:
        """Return `[A, D]` memory that other ranks read outputs from; None: use any memory."""

    def gradient_slots(self, specs: TensorSpecs) -> dict[str, torch.Tensor]:
        """Return `[slots, ...]` memory for the gradients of replicas, not cleared."""

    def spans(self) -> torch.Tensor:
        """Return `[H, 2]` first and end of each home expert's replicas in the plan, for kernels."""

    def reduce(
        self,
        homes: Mapping[str, Stack],
        own: Mapping[str, torch.Tensor] | None = None,
        *,
        beside: bool = False,
    ) -> Beside | None:
        """Stage 8: start to add the gradients of all replicas to the home gradients.

        homes: `[H, ...]` or H tensors, for the names last passed to `gradient_slots`.
        own: gradients that home experts with replicas computed; None: they are in `homes`.
        beside: run the reduction next to the following product, which leaves it the returned
            number of GPU programs.
        """

    def reduced(self) -> None:
        """Wait until `reduce` has finished."""


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
