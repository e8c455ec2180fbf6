"""MappedCopies: the copies of one microbatch in one layer, without the host.

Shapes: A rows that there is room for, D model width, L spare slots, H home experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

import torch

from ultraep.bundle import Bundle, Layout, Stack, resolve
from ultraep.errors import SlotError
from ultraep.modes import unseen
from ultraep.plane import Kinds, Microbatch
from ultraep.runtime.mapped.control import DevicePlan
from ultraep.runtime.mapped.memory import GradientSlots, MappedMemory

if TYPE_CHECKING:
    from ultraep.runtime.mapped.plane import MappedPlane


class MappedCopies:
    """The copies that one plan wants of one bundle of home weights."""

    kernels = True

    def __init__(
        self,
        plane: MappedPlane,
        memory: MappedMemory,
        plan: DevicePlan,
        microbatch: Microbatch,
        bundle: Bundle,
        schedule: torch.Tensor | None = None,
    ) -> None:
        self._plane, self._memory, self._plan, self._bundle = plane, memory, plan, bundle
        self._microbatch = microbatch
        self.schedule = schedule  # all that backward needs of the plan
        self.sms, self.possible = memory.sms, memory.topology.can_copy
        self._lent: ExitStack | None = None
        self._buffer: int | None = None  # that was lent last
        self._held: dict[str, torch.Tensor] = {}
        self._sent: dict[str, Stack] = {}  # kept while kernels aside may read them
        self._gradients: dict[str, GradientSlots] = {}

    @property
    def num_homes(self) -> int:
        return self._memory.streamer.homes

    def __enter__(self) -> Self:
        if self._lent is None:
            self.begin()
        self._plane.lent = self
        return self

    def __exit__(self, *error: object) -> None:
        assert self._lent is not None, "left a block that was not entered"
        self._plane.lent = None
        self._lent.close()
        self._lent = None

    def __str__(self) -> str:
        return f"layer {self._microbatch.layer} (step {self._microbatch.step})"

    @unseen()
    def begin(self) -> None:
        """Begin to fill the slots, aside; nothing is sent if they still hold what is wanted."""
        memory, tensors = self._memory, resolve(self._bundle)
        layout = Layout.of(tensors, self.num_homes)
        with ExitStack() as stack:
            self._buffer = stack.enter_context(memory.lend(str(self), self._buffer))
            rows = memory.slots(layout, self._buffer)
            self._held = memory.held(layout, self._buffer)
            if self.possible:
                with memory.overlap.aside("weights"):
                    if self.schedule is None:
                        self.schedule = rows.local.new_empty(
                            memory.streamer.size, dtype=torch.int32
                        )
                        memory.streamer.schedule(self._plan.replicas, layout, self.schedule)
                    self._sent = tensors
                    memory.streamer.fill(self.schedule, layout, tensors, rows, self._buffer)
            self._lent = stack.pop_all()
        if not self._microbatch.back:
            self._plane.watch.sent(self._microbatch, "weights", layout.nbytes, None)

    def tensors(self) -> dict[str, torch.Tensor]:
        """`[L, ...]` for every tensor of the bundle; the main stream waits for them."""
        if self._lent is None:
            raise SlotError(f"the copies of {self} are lent inside of their `with` block only")
        self._memory.overlap.join("weights")
        self._sent = {}
        return self._held

    def served_rows(self, like_AD: torch.Tensor) -> torch.Tensor:
        """[A, D] where others can pull from."""
        memory, width = self._memory, like_AD.shape[1]
        nbytes = memory.exchange.layout.served_bytes(width * like_AD.itemsize)
        region = memory.to_write("served", nbytes)
        return memory.exchange.served_rows(region, width, like_AD.dtype)

    @unseen()
    def gradient_slots(self, kinds: Kinds) -> dict[str, torch.Tensor]:
        """`[L, ...]` memory that all layers share."""
        self._gradients = self._memory.gradient_slots(kinds)
        if self._gradients:
            return {name: slots.local for name, slots in self._gradients.items()}
        device = self._memory.peers.device
        return {
            n: torch.empty(0, *s, dtype=dtype, device=device) for n, (s, dtype) in kinds.items()
        }

    def spans(self) -> torch.Tensor:
        """[H, 2] which stand at the end of the schedule."""
        assert self.schedule is not None, "nothing was sent"
        return self.schedule[self._memory.streamer.size - 2 * self.num_homes :].view(-1, 2)

    @unseen()
    def reduce(
        self, homes: Mapping[str, Stack], own: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Stage 8: begins."""
        if not self._gradients or self.schedule is None:
            return
        stacked = {name: _stacked(stack) for name, stack in homes.items()}
        self._memory.reduce(stacked, own or stacked, self._gradients, self.schedule)
        for name, stack in homes.items():
            if stacked[name] is not stack:
                self._memory.overlap.join("gradients")
                for one, added in zip(stack, stacked[name], strict=True):
                    one.copy_(added)
        nbytes = sum(slots.nbytes for slots in self._gradients.values())
        self._plane.watch.sent(self._microbatch, "gradients", nbytes, None)

    def reduced(self) -> None:
        """The main stream waits for the sums."""
        self._memory.overlap.join("gradients")


def _stacked(stack: Stack) -> torch.Tensor:
    return stack if isinstance(stack, torch.Tensor) else torch.stack(list(stack))
