"""MappedReplicas: the replicas of one microbatch, which kernels move without the host.

Shapes: A rows that fit the workspace, D model width, R ranks, L spare slots, H home experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import torch

from ultraep.bundle import Bundle, Layout, Stack, resolve
from ultraep.microbatch import MicrobatchInfo, TensorSpecs
from ultraep.ops.modes import hidden
from ultraep.ops.products import Beside
from ultraep.runtime.mapped.memory import GradientSlots, MappedMemory
from ultraep.runtime.microbatch import Shared
from ultraep.runtime.observe import Later, staged
from ultraep.runtime.replicas import BaseReplicas
from ultraep.runtime.streams import Fetch, capturing


class MappedReplicas(BaseReplicas):
    """The replicas of one plan and one bundle of home weights.

    replicas: [C, 3] of a device plan.
    versions: [R] versions of the weights of all ranks.
    schedule: the work of this rank, if the replicas are in their slots already.
    """

    kernels = True

    def __init__(
        self,
        shared: Shared,
        memory: MappedMemory,
        info: MicrobatchInfo,
        replicas: torch.Tensor,
        bundle: Bundle,
        versions: torch.Tensor,
        schedule: torch.Tensor | None = None,
    ) -> None:
        super().__init__(shared, info, bundle)
        self._memory, self._replicas, self._versions = memory, replicas, versions
        self.schedule, self._resident = schedule, schedule is not None
        self.possible = memory.topology.can_replicate
        self.num_homes = memory.streamer.homes
        self._buffer: int | None = None  # the one that was lent last
        self._tensors: dict[str, torch.Tensor] = {}
        self._sending: dict[str, Stack] = {}  # kept alive while kernels may read them
        self._gradients: dict[str, GradientSlots] = {}

    def give_back(self) -> None:
        if self._sending:  # a failed pass did not wait for the slots
            self.tensors()
        super().give_back()

    def begin_again(self) -> None:
        """Begin to fill the slots for backward, if forward used them."""
        if self._buffer is not None and not self.begun:
            self.begin()
            self.begun = True

    @hidden
    def _fill(self, loan: ExitStack) -> None:
        """Fill the slots on the second stream; sends nothing if they still hold the weights."""
        memory, tensors = self._memory, resolve(self.bundle)
        layout = Layout.of(tensors, self.num_homes)
        lend = memory.lend(str(self), self.info.layer, self._buffer)
        buffer = self._buffer = loan.enter_context(lend)
        rows = memory.slots(layout, buffer)
        self._tensors = memory.slot_tensors(layout, buffer)
        if not self.possible:
            self._report(layout)
            return
        with memory.overlap.aside():
            schedule = self._scheduled(layout, buffer)
            self._sending = tensors
            memory.streamer.fill(schedule, layout, tensors, rows, buffer)
            self._report(layout)

    def _scheduled(self, layout: Layout, buffer: int) -> torch.Tensor:
        """Return the work of this rank now: other layers may have filled the slots since."""
        memory, again = self._memory, self.schedule is not None
        if self.schedule is None:
            device = memory.peers.device
            self.schedule = torch.empty(memory.streamer.size, dtype=torch.int32, device=device)
        if self._resident:  # may overwrite any slot without noting it in the table
            memory.contents_of_all(layout, buffer).zero_()
        else:
            wanted = memory.contents(layout, buffer, self.info.layer, self._versions)
            memory.streamer.schedule(self._replicas, layout, self.schedule, wanted, again=again)
        return self.schedule

    def _report(self, layout: Layout) -> None:
        """Report the replicas sent: under a promise as the device counts them, else as planned."""
        sent: Later | None = None
        if self._shared.versions.promise and not self._resident and self.schedule is not None:
            sent = _fetched(self.schedule[:1])
        elif self.info.in_backward:
            return
        self._sent("weights", layout.nbytes, sent)

    def _slot_tensors(self) -> dict[str, torch.Tensor]:
        """The main stream waits for them."""
        self._memory.overlap.join()
        self._sending = {}
        return self._tensors

    @hidden
    def served_rows(self, like_AD: torch.Tensor) -> torch.Tensor | None:
        if self._shared.settings.dispatcher is not None:
            return None
        memory, width = self._memory, like_AD.shape[1]
        nbytes = memory.exchange.layout.served_bytes(width * like_AD.itemsize)
        region = memory.writable("served", nbytes)
        return memory.exchange.served_rows(region, width, like_AD.dtype)

    @hidden
    def gradient_slots(self, specs: TensorSpecs) -> dict[str, torch.Tensor]:
        self._gradients = self._memory.gradient_slots(specs)
        if self._gradients:
            return {name: slots.local for name, slots in self._gradients.items()}
        device = self._memory.peers.device
        return {
            name: torch.empty(0, *shape, dtype=dtype, device=device)
            for name, (shape, dtype) in specs.items()
        }

    @hidden
    def spans(self) -> torch.Tensor:
        """[H, 2] at the end of the schedule."""
        assert self.schedule is not None, "nothing was sent"
        return self.schedule[self._memory.streamer.size - 2 * self.num_homes :].view(-1, 2)

    @hidden
    @staged("reduce")
    def reduce(
        self,
        homes: Mapping[str, Stack],
        own: Mapping[str, torch.Tensor] | None = None,
        *,
        beside: bool = False,
    ) -> Beside | None:
        """Stage 8; beside a product if one follows and the gradients are stacked."""
        if not self._gradients or self.schedule is None:
            return None
        memory, stacked = self._memory, {name: _stacked(stack) for name, stack in homes.items()}
        beside = beside and memory.beside > 0 and all(stacked[n] is homes[n] for n in homes)
        memory.reduce(stacked, own or stacked, self._gradients, self.schedule, beside=beside)
        for name, stack in homes.items():
            if stacked[name] is not stack:
                for gradient, total in zip(stack, stacked[name], strict=True):
                    gradient.copy_(total)
        nbytes = sum(slots.nbytes for slots in self._gradients.values())
        self._sent("gradients", nbytes, None)
        return Beside(memory.beside, memory.overlap.aside) if beside else None

    @staged("reduce")
    def reduced(self) -> None:
        """Make the main stream wait for the sums."""
        self._memory.overlap.join()


def _fetched(number: torch.Tensor) -> Later:
    """Return a callable that yields the number once the device has produced it."""
    if capturing(number.device):
        return lambda: 0  # observers ignore what a graph captures
    fetch = Fetch(number)
    return lambda: int(fetch.wait())


def _stacked(stack: Stack) -> torch.Tensor:
    return stack if isinstance(stack, torch.Tensor) else torch.stack(list(stack))
