"""MappedReplicas: the replicas of one microbatch, which kernels move without the host.

Shapes: A rows that this rank serves, D model width, R ranks, L spare slots, H home experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import torch

from ultraep.bundle import Bundle, Layout, Stack, resolve
from ultraep.microbatch import Context
from ultraep.ops.modes import outside_dispatch_modes
from ultraep.ops.products import Beside
from ultraep.passes import Passes
from ultraep.replicas import Replicas, TensorSpecs
from ultraep.runtime.mapped.memory import GradientSlots, MappedMemory


class MappedReplicas(Replicas):
    """The replicas of one plan and one bundle of home weights.

    replicas: [C, 3] of a device plan.   possible: whether there may be any.
    """

    kernels = True

    def __init__(
        self,
        context: Context,
        memory: MappedMemory,
        passes: Passes,
        replicas: torch.Tensor,
        bundle: Bundle,
        *,
        possible: bool = True,
    ) -> None:
        super().__init__(context.lent_in_backward, passes, bundle)
        self._context, self._memory, self._replicas = context, memory, replicas
        self._schedule: torch.Tensor | None = None  # the work of this rank
        self.possible = possible and memory.topology.can_replicate
        self.num_homes = memory.streamer.homes
        self._buffer: int | None = None  # the one that was lent last
        self._tensors: dict[str, torch.Tensor] = {}
        self._sending: dict[str, Stack] = {}  # kept alive while kernels may read them
        self._gradients: dict[str, GradientSlots] = {}

    def begin(self) -> None:
        if self.possible:
            super().begin()
            return
        layout = Layout.of(resolve(self.bundle), self.num_homes)
        self._tensors = self._memory.slot_tensors(layout, 0)  # which serve no rows
        self._loan = ExitStack()

    def give_back(self) -> None:
        if self._sending:  # a failed pass did not wait for the slots
            self.tensors()
        super().give_back()

    def begin_again(self) -> None:
        if self._buffer is not None and not self.begun:
            self.begin()
            self.begun = True

    @outside_dispatch_modes
    def _fill(self, loan: ExitStack) -> None:
        """Fill the slots on the second stream; sends nothing if they still hold this very fill."""
        memory, tensors = self._memory, resolve(self.bundle)
        layout = Layout.of(tensors, self.num_homes)
        lend = memory.lend(str(self), self._buffer)
        buffer = self._buffer = loan.enter_context(lend)
        rows = memory.slots(layout, buffer)
        self._tensors = memory.slot_tensors(layout, buffer)
        with memory.overlap.aside():
            schedule = self._scheduled(layout)
            self._sending = tensors
            memory.streamer.fill(schedule, layout, tensors, rows, buffer)
        record = self.passes.record
        if not record.backward:
            record.sent.append(("weights", layout.nbytes, None))

    def _scheduled(self, layout: Layout) -> torch.Tensor:
        """Return the work of this rank, the same in forward and backward."""
        if self._schedule is None:
            streamer, device = self._memory.streamer, self._memory.peers.device
            self._schedule = torch.empty(streamer.size, dtype=torch.int32, device=device)
            streamer.schedule(self._replicas, layout, self._schedule)
        return self._schedule

    def _slot_tensors(self) -> dict[str, torch.Tensor]:
        """The main stream waits for them."""
        record = self.passes.record
        if not self.possible:
            record.at("experts", "experts back")
            return self._tensors
        record.at("replicate", "weights again")
        self._memory.overlap.join()
        self._sending = {}
        record.at("experts", "experts back")
        return self._tensors

    @outside_dispatch_modes
    def served_rows(self, like_AD: torch.Tensor) -> torch.Tensor | None:
        if self._context.settings.dispatcher is not None:
            return None
        memory, (rows, width) = self._memory, like_AD.shape
        memory.writable("served", memory.rows * width * like_AD.itemsize)
        return memory.served(width, like_AD.dtype, rows)

    @outside_dispatch_modes
    def gradient_slots(self, specs: TensorSpecs) -> dict[str, torch.Tensor]:
        self._gradients = self._memory.gradient_slots(specs)
        if self._gradients:
            return {name: slots.local for name, slots in self._gradients.items()}
        device = self._memory.peers.device
        return {
            name: torch.empty(0, *shape, dtype=dtype, device=device)
            for name, (shape, dtype) in specs.items()
        }

    @outside_dispatch_modes
    def spans(self) -> torch.Tensor:
        """[H, 2] at the end of the schedule."""
        assert self._schedule is not None, "nothing was sent"
        return self._schedule[self._memory.streamer.size - 2 * self.num_homes :].view(-1, 2)

    @outside_dispatch_modes
    def reduce(
        self,
        homes: Mapping[str, Stack],
        own: Mapping[str, torch.Tensor] | None = None,
        *,
        beside: bool = False,
    ) -> Beside | None:
        """Stage 8; beside a product if one follows and the gradients are stacked."""
        if not self._gradients or self._schedule is None:
            return None
        record = self.passes.record
        record.at("reduce")
        memory, stacked = self._memory, {name: _stacked(stack) for name, stack in homes.items()}
        beside = beside and memory.beside > 0 and all(stacked[n] is homes[n] for n in homes)
        memory.reduce(stacked, own or stacked, self._gradients, self._schedule, beside=beside)
        for name, stack in homes.items():
            if stacked[name] is not stack:
                for gradient, total in zip(stack, stacked[name], strict=True):
                    gradient.copy_(total)
        nbytes = sum(slots.nbytes for slots in self._gradients.values())
        record.sent.append(("gradients", nbytes, None))
        record.at("experts back")
        return Beside(memory.beside, memory.overlap.aside) if beside else None

    def reduced(self) -> None:
        """Make the main stream wait for the sums."""
        record = self.passes.record
        record.at("reduce")
        self._memory.overlap.join()
        record.at("experts back")
        if not self.passes.gradients_leave:
            record.end()


def _stacked(stack: Stack) -> torch.Tensor:
    return stack if isinstance(stack, torch.Tensor) else torch.stack(list(stack))
