"""The microbatch: the tokens of all ranks on their way through one layer. Protocols, no code.

    layer = Layer(index, weights, experts)
    microbatch = balancer.begin(layer, ids, gates, tokens)
    microbatch.count()                          1  exact loads of all ranks
    microbatch.plan()                           2  replicas and quotas, the same on every rank
    with microbatch.replicate() as replicas:    3  spare slots filled, and 8 their gradients
        microbatch.reroute()                    4  a slot for every routed row
        rows = microbatch.dispatch()            5
        outputs = experts(rows, replicas)       6
    y = microbatch.combine(outputs)             7

A microbatch owns what its verbs find out. What backward needs outlives it: its replicas, and the
exchange of its rows. A data plane keeps what outlives both: slots, workspaces, the communicator.
Two data planes exist: `messages` of torch.distributed, and memory that GPUs have `mapped`. All
ranks call the same verbs in the same order.

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
from ultraep.plan import Plan
from ultraep.topology import Topology

NO_LAYER = -1  # of synthetic microbatches
Kinds = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of tensors, by name
Serve: TypeAlias = "Callable[[Arrivals, Replicas], torch.Tensor]"


@dataclass(eq=False, slots=True, weakref_slot=True)
class MicrobatchInfo:
    """Which microbatch this is, and how far it has come: what observers and traces store."""

    layer: int
    step: int  # microbatches of all layers, counted from 1
    again: bool  # whether forward is recomputed, in backward
    back: bool = False  # whether backward has begun
    began: float = 0.0  # seconds since 1970, of forward or of backward
    timed: bool = True  # whether the clock of its data plane times it


@dataclass(frozen=True, eq=False, slots=True)
class Layer:
    """The home experts of this rank in one layer, as they are now.

    index: see `Balancer.register_layer`.
    bundle: their weights, which replicas consist of; empty: nothing can be replicated.
    serve: stage 6, which is timed on synthetic rows if plans depend on rates. None: plans are made
        for balance, unless `BalanceConfig(rates=...)` is given.
    pack: turns rows into bytes, which travel in their place.
    """

    index: int = 0
    bundle: Bundle = field(default_factory=dict)
    serve: Serve | None = None
    pack: Pack | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Inputs:
    """What a microbatch begins with."""

    info: MicrobatchInfo
    layer: Layer
    config: BalanceConfig
    ids: torch.Tensor  # [T, K] experts of every token; -1: padding
    gates: torch.Tensor | None  # [T, K]
    tokens: torch.Tensor | None  # [T, D]
    shares_slots: bool  # whether other layers use the same slots before backward


class AnyPlan(Protocol):
    """A plan, on the host or on a device."""

    def to_host(self) -> Plan:
        """Return the plan on the host, waiting for the device."""

    def to_host_async(self) -> Callable[[], Plan]:
        """Return a callable that yields the plan once the device has produced it; does not wait."""


class Replicas(Protocol):
    """The replicas of a plan in the slots of this rank, lent for a `with` block.

    Entering begins to fill the slots; `tensors` waits for the last byte. After the block other
    microbatches may overwrite them. Entering again, in backward, fills them again if necessary, in
    the same memory unless another microbatch holds it.
    """

    @property
    def bundle(self) -> Bundle:
        """The weights of the home experts of this rank."""

    @property
    def num_homes(self) -> int: ...

    @property
    def sms(self) -> int | None:
        """Multiprocessors of this rank; None: all."""

    @property
    def possible(self) -> bool:
        """Whether this microbatch can have replicas, as far as the host knows."""

    @property
    def kernels(self) -> bool:
        """Whether the kernels of a GPU can work on the rows of this microbatch."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """`[slots, ...]` for every tensor of the bundle; an error outside of the block."""

    def served_rows(self, like_AD: torch.Tensor) -> torch.Tensor | None:
        """`[A, D]` memory from which other ranks read such rows; None: use any memory."""

    def gradient_slots(self, kinds: Kinds) -> dict[str, torch.Tensor]:
        """`[slots, ...]` memory for the gradients of the replicas of this rank, not cleared."""

    def spans(self) -> torch.Tensor:
        """[H, 2] where the replicas of each home expert begin and end in the plan, for kernels."""

    def reduce(
        self,
        homes: Mapping[str, Stack],
        own: Mapping[str, torch.Tensor] | None = None,
        *,
        beside: bool = False,
    ) -> Beside | None:
        """Stage 8: begin to add the gradients of all replicas to those of the home experts.

        homes: `[H, ...]` or H tensors, for the names that `gradient_slots` was last called with.
        own: gradients that home experts with replicas computed; None: they stand in `homes`.
        beside: a product follows, which leaves the returned programs of a GPU to the reduction.
        """

    def reduced(self) -> None:
        """Wait until they are added."""


class Microbatch(Protocol):
    """The verbs of one microbatch. Each uses what the verbs before it have found."""

    @property
    def info(self) -> MicrobatchInfo: ...

    def count(self) -> torch.Tensor:
        """Stage 1: [R, E] the exact loads of all ranks, where the ids are; collective."""

    def plan(self) -> AnyPlan:
        """Stage 2: the plan, which is the same on every rank.

        A `Plan`, or on the mapped plane a plan that stays on the device; both have `to_host`.
        Measures the rates of the layer first if the plan depends on them and they are unknown.
        """

    def replicate(self) -> Replicas:
        """Stage 3: the replicas of the plan, for a `with` block."""

    def reroute(self) -> Exchange:
        """Stage 4: a slot for every routed row of this rank.

        A dispatcher of another library takes `slots` from what is returned.
        """

    def dispatch(self) -> Arrivals:
        """Stage 5: the rows that the slots of this rank serve."""

    def combine(self, outputs_AD: torch.Tensor) -> torch.Tensor:
        """Stage 7: [T, D] the outputs of the tokens of this rank."""


class DataPlane(Protocol):
    """Carries the microbatches of one rank, and keeps what outlives them."""

    @property
    def name(self) -> str:
        """`messages` or `mapped`."""

    @property
    def topology(self) -> Topology: ...

    def begin(self, inputs: Inputs, /) -> Microbatch:
        """Return a microbatch with these inputs."""

    def prepare(self, ids: torch.Tensor, rows: torch.Tensor, bundle: Bundle, /) -> None:
        """Allocate the memory that microbatches like this need; collective."""

    def promise(self) -> None:
        """Pass the current promise about the weights of this rank to the device."""

    @property
    def nbytes(self) -> int:
        """Memory allocated for slots and what moves through them."""

    def check(self) -> None:
        """Raise errors that a device has recorded and the host has not seen; waits for it."""

    def close(self) -> None:
        """Free what was allocated; the group itself stays."""
