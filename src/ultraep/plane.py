"""What a balancer does with one microbatch, whatever carries its bytes. Protocols, no code.

A data plane has the verbs of the stages that need other ranks, and hands out objects for the
microbatch that has begun:

    loads    = plane.gather(ids, call)                1   tokens of every rank for every expert
    plan     = plane.plan(loads, ...)                 2   the same on every rank
    copies   = plane.replicate(plan, loads, bundle)   3   lent slots, and 8 their gradients
    exchange = plane.reroute(ids, plan, loads)        4   moves rows in 5 and 7, and back

Two exist: `messages` of torch.distributed, and memory that GPUs have `mapped`. All ranks call the
same verbs in the same order. Nothing here says that a rank reaches the memory of every other.

Shapes: T tokens, K experts per token, A arrived rows, L slots of this rank, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch

from ultraep.bundle import Bundle
from ultraep.config import BalanceConfig
from ultraep.ops.products import Beside
from ultraep.plan import Plan
from ultraep.topology import Topology

NO_LAYER = -1  # of what is made up
Kinds = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shape and type of tensors, by name


@dataclass(eq=False, slots=True, weakref_slot=True)
class Microbatch:
    """One microbatch on its way through one layer and back."""

    layer: int
    step: int  # microbatches of all layers, counted from 1
    again: bool  # whether forward is computed again, in backward
    back: bool = False  # whether backward has begun
    began: float = 0.0  # seconds since 1970, of forward or of backward
    timed: bool = True  # whether the clock of its data plane looks at it


class Loads(Protocol):
    """The loads of all ranks in one microbatch."""

    @property
    def microbatch(self) -> Microbatch: ...

    @property
    def on_device(self) -> torch.Tensor:
        """[R, E] where the ids are."""

    @property
    def about_rows(self) -> int:
        """Routed rows of all ranks as the hosts know them, alike on all: no less than there are."""


class AnyPlan(Protocol):
    """A plan, on the host or on a device."""

    def to_host(self) -> Plan:
        """The plan with its numbers on the host; may wait for a device."""

    def later(self) -> Callable[[], Plan]:
        """A function that returns it when the device has come so far; does not wait."""


class Copies(Protocol):
    """The copies that a plan wants in the slots of this rank; lent for a `with` block.

    Entering begins to fill the slots; `tensors` waits for the last byte. After the block others
    may overwrite them. Entering again, in backward, fills them again where that is necessary, in
    the same memory unless somebody else has it now.
    """

    @property
    def num_homes(self) -> int: ...

    @property
    def sms(self) -> int | None:
        """Multiprocessors of this rank; None: all."""

    @property
    def possible(self) -> bool:
        """Whether there can be copies in this microbatch, as far as the host knows."""

    @property
    def kernels(self) -> bool:
        """Whether the kernels of a GPU can work on the rows of this microbatch."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """`[slots, ...]` for every tensor of the bundle; an error outside of the block."""

    def served_rows(self, like_AD: torch.Tensor) -> torch.Tensor | None:
        """`[A, D]` memory from which others get such rows; None: any memory will do."""

    def gradient_slots(self, kinds: Kinds) -> dict[str, torch.Tensor]:
        """`[slots, ...]` memory for the gradients of the copies of this rank, not cleared."""

    def spans(self) -> torch.Tensor:
        """[H, 2] where the copies of each home expert begin and end in the plan, for kernels."""

    def reduce(
        self,
        homes: Mapping[str, Any],
        own: Mapping[str, Any] | None = None,
        *,
        beside: bool = False,
    ) -> Beside | None:
        """Stage 8: begin to add the gradients of all copies to those of the home experts.

        homes: `[H, ...]` or H tensors, for the names that `gradient_slots` was last asked for.
        own: what the home experts that have copies gave themselves; None: it stands in `homes`.
        beside: a product follows, which leaves it those programs of a GPU that are returned.
        """

    def reduced(self) -> None:
        """From here on, they are added."""


class Exchange(Protocol):
    """Moves rows between tokens and slots, both ways; each is the other's gradient.

    A row may take a scalar along, which is not summed.
    """

    @property
    def offsets(self) -> torch.Tensor:
        """[L + 1] where the rows of each slot begin, as int32 where the rows are."""

    @property
    def slots(self) -> torch.Tensor:
        """[T, K] slot of every routed row, counted over all ranks, for dispatchers; -1: padding."""

    def begins(self) -> list[int]:
        """The offsets on the host; may wait for a device."""

    def to_slots(
        self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[A, D] a row for each choice of every token, and `[A]` its scalar, in slot order."""

    def to_tokens(
        self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, D] the rows of each token, summed in the order of its choices; `[T, K]` scalars.

        Zeros for padding, which was not sent.
        """

    def returns(self) -> None:
        """Backward begins, before its first row moves."""


class DataPlane(Protocol):
    """One rank of a group: the verbs of the stages that need the others."""

    @property
    def name(self) -> str:
        """`messages` or `mapped`."""

    @property
    def topology(self) -> Topology:
        """Where experts live, and where copies may go."""

    def gather(self, ids: torch.Tensor, microbatch: Microbatch, bundle: Bundle, **rows: Any) -> Any:
        """Stage 1: the exact loads of all ranks from the `[T, K]` ids of this one; -1: padding.

        bundle, rows: what is to be copied and sent; ranks compare of which kinds they are.
        """

    def plan(self, loads: Any, config: BalanceConfig) -> Any:
        """Stage 2: the plan of this microbatch; every rank finds the same."""

    def replicate(self, plan: Any, loads: Any, bundle: Bundle) -> Copies:
        """Stage 3: the copies of the plan."""

    def reroute(self, ids: torch.Tensor, plan: Any, loads: Any) -> Exchange:
        """Stage 4: a slot for every routed row of this rank, and the way there."""

    def trial(self, plan: Plan, loads: Any, bundle: Bundle, number: int, /) -> Copies:
        """Copies of a plan that is made up, to be timed; none of that number were sent before."""

    def verify(self, plan: Any, loads: Any, /) -> None:
        """Raise if ranks have other plans."""

    def prepare(self, ids: torch.Tensor, rows: torch.Tensor, bundle: Bundle, /) -> None:
        """Take the memory that microbatches like this need; collective."""

    def promise(self) -> None:
        """Tell a device whether the weights of this rank are promised to stay, from here on."""

    @property
    def nbytes(self) -> int:
        """Memory taken for slots and what moves through them."""

    def check(self) -> None:
        """Raise what a device has noted and the host has not seen yet; waits for it."""

    def close(self) -> None:
        """Give back what was taken; the group itself stays."""
