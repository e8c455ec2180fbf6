"""MessageReplicas: the replicas of one microbatch in one layer, sent by messages.

    with microbatch.replicate() as replicas:                         # stage 3
        outputs = ... replicas.tensors()["down"][slot] ...
    ...
    with replicas:                                                   # in backward: filled again
        ...
        replicas.reduce(gradients)                                   # stage 8

The slots are lent for the `with` block only; other layers overwrite them afterwards. Entering a
second time restores them, and sends nothing if they were not overwritten.

Shapes: R ranks, H home experts of this rank, L spare slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch

from ultraep.arrays import IntArray
from ultraep.backends import backend_for
from ultraep.bundle import Bundle, Layout, Stack, device_of_bundle, resolve
from ultraep.comm import moved
from ultraep.errors import SlotError
from ultraep.hops import hops
from ultraep.microbatch import Kinds, MicrobatchInfo
from ultraep.ops.modes import unseen
from ultraep.plan import Plan
from ultraep.runtime.messages.slots import Buffer, Contents, SlotPool
from ultraep.runtime.messages.transfers import reduce_gradients, send_weights
from ultraep.runtime.microbatch import Shared
from ultraep.runtime.observe import Observers, staged

SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")


@dataclass(eq=False, repr=False)
class MessageReplicas:
    """The replicas that one plan places of one bundle of home weights."""

    shared: Shared
    pool: SlotPool
    info: MicrobatchInfo
    plan: Plan
    bundle: Bundle
    versions: IntArray  # [R] of the weights of all ranks
    device: torch.device  # of the tokens
    _lent: ExitStack | None = None
    _buffer: Buffer | None = None  # that was lent last
    _layout: Layout | None = None
    _gradients: tuple[Layout, torch.Tensor] | None = None

    @property
    def observers(self) -> Observers:
        return self.shared.observers

    @property
    def sms(self) -> None:
        """All multiprocessors."""

    @property
    def num_homes(self) -> int:
        return len(self.plan.topology.home_experts(self.shared.comm.rank))

    @property
    def possible(self) -> bool:
        """Whether there are any: the host knows, alike on all ranks."""
        return self.plan.num_replicas > 0

    @property
    def kernels(self) -> bool:
        """On a GPU, if its kernels are installed."""
        kind = self.device.type
        return kind != "cpu" and backend_for(kind).name == "triton"

    @unseen()
    @staged("replicate", "weights again")
    def __enter__(self) -> Self:
        self.pool.in_backward.give_back()
        tensors = resolve(self.bundle)
        layout = self._layout = Layout.of(tensors, self.num_homes)
        with ExitStack() as stack:
            lend = self.pool.lend(
                layout, device_of_bundle(tensors), str(self), self._wanted(), self._buffer
            )
            self._buffer = stack.enter_context(lend)
            self._fill(self._buffer, layout, tensors)
            self._lent = stack.pop_all()
        self.pool.in_backward.add(self)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._lent is not None, "left a block that was not entered"
        self.pool.in_backward.discard(self)
        self._lent.close()
        self._lent = None

    def __str__(self) -> str:
        return f"layer {self.info.layer} (step {self.info.step})"

    @unseen()
    @staged("replicate", "weights again")
    def tensors(self) -> dict[str, torch.Tensor]:
        """`[L, ...]` for every tensor of the bundle."""
        if self._lent is None or self._buffer is None or self._layout is None:
            raise SlotError(f"the copies of {self} are lent inside of their `with` block only")
        return self._layout.views(self._buffer.rows)

    def served_rows(self, like_AD: torch.Tensor) -> None:
        """Rows are sent from wherever they are."""

    @unseen()
    def gradient_slots(self, kinds: Kinds) -> dict[str, torch.Tensor]:
        """`[L, ...]` memory that all layers share."""
        layout = Layout(tuple((name, *kind) for name, kind in kinds.items()))
        rows = self._rows("copies", self.plan.topology.slots, layout)
        self._gradients = layout, rows
        return layout.views(rows)

    @unseen()
    def spans(self) -> torch.Tensor:
        """[H, 2] from the plan."""
        mine = self.plan.topology.home_experts(self.shared.comm.rank)
        copied = self.plan.replicas[:, 0]
        spans = np.stack([np.searchsorted(copied, mine, side) for side in SIDES], axis=1)
        return moved(torch.from_numpy(spans.astype(np.int32)), self.device)

    @unseen()
    @staged("reduce")
    def reduce(
        self,
        homes: Mapping[str, Stack],
        own: Mapping[str, torch.Tensor] | None = None,
        *,
        beside: bool = False,
    ) -> None:
        """Stage 8; when it returns, all are added."""
        del beside
        assert self._gradients is not None, "nobody asked where to put the gradients of copies"
        layout, rows = self._gradients
        nbytes = reduce_gradients(
            homes,
            own or homes,
            rows,
            layout,
            self.plan,
            self.shared.comm,
            staging=lambda count: self._rows("arriving", count, layout),
        )
        self._sent("gradients", layout, nbytes)

    @staged("reduce")
    def reduced(self) -> None:
        """Do nothing: all are added already."""

    def _rows(self, use: str, count: int, layout: Layout) -> torch.Tensor:
        return self.pool.gradient_rows(use, count, layout.nbytes, self.device)

    def _wanted(self) -> Contents:
        """What is to be in the slots of all ranks."""
        versions = self.versions[self.plan.topology.home_of_expert]
        return {
            (host, slot): (self.info.layer, expert, int(versions[expert]))
            for expert, host, slot in self.plan.replicas.tolist()
        }

    def _fill(self, buffer: Buffer, layout: Layout, tensors: dict[str, Stack]) -> None:
        wanted, settings = self._wanted(), self.shared.settings
        if not wanted:
            self._sent("weights", layout, 0)
            return
        resident = {place for place, content in wanted.items() if buffer.held.get(place) == content}
        found = hops(self.plan, settings.relay, chunks=settings.chunks, skip=resident)
        for hop in found:  # until the last byte is there, the slot holds nothing
            buffer.held.pop((hop.receiver, hop.slot), None)
        nbytes = send_weights(
            found,
            tensors,
            buffer.rows,
            layout=layout,
            plan=self.plan,
            comm=self.shared.comm,
            chunks=settings.chunks,
        )
        buffer.held.update(wanted)
        self._sent("weights", layout, nbytes)

    def _sent(self, what: str, layout: Layout, nbytes: int) -> None:
        copies = nbytes // layout.nbytes
        self.observers.sent(self.info, what, layout.nbytes, copies)
