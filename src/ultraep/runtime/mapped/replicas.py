"""MappedReplicas: the replicas of one microbatch in one layer, without the host.

Shapes: A rows that fit the workspace, D model width, R ranks, L spare slots, H home experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Self

import torch

from ultraep.bundle import Bundle, Layout, Stack, resolve
from ultraep.errors import SlotError
from ultraep.microbatch import Kinds, MicrobatchInfo
from ultraep.ops.modes import unseen
from ultraep.ops.products import Beside
from ultraep.runtime.backward import LentInBackward
from ultraep.runtime.control import DevicePlan
from ultraep.runtime.mapped.memory import GradientSlots, MappedMemory
from ultraep.runtime.microbatch import Shared
from ultraep.runtime.observe import Later, staged
from ultraep.runtime.streams import Fetch, capturing


class MappedReplicas:
    """The replicas that one plan places of one bundle of home weights.

    versions: [R] of the weights of all ranks.
    schedule: of replicas that are in their slots already; None: to be scheduled.
    """

    kernels = True

    def __init__(
        self,
        shared: Shared,
        memory: MappedMemory,
        in_backward: LentInBackward,
        info: MicrobatchInfo,
        plan: DevicePlan,
        bundle: Bundle,
        versions: torch.Tensor,
        schedule: torch.Tensor | None = None,
    ) -> None:
        self.info, self.observers, self.bundle = info, shared.observers, bundle
        self._promises, self._memory, self._in_backward = shared.versions, memory, in_backward
        self._plan, self._versions = plan, versions
        self.schedule, self._given = schedule, schedule is not None  # what this rank has to do
        self.sms, self.possible = memory.sms, memory.topology.can_replicate
        self._lent: ExitStack | None = None
        self._buffer: int | None = None  # that was lent last
        self._held: dict[str, torch.Tensor] = {}
        self._sent: dict[str, Stack] = {}  # kept while kernels aside may read them
        self._gradients: dict[str, GradientSlots] = {}

    @property
    def num_homes(self) -> int:
        return self._memory.streamer.homes

    @staged("replicate", "weights again")
    def __enter__(self) -> Self:
        self._in_backward.give_back()
        if self._lent is None:
            self.begin()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._lent is not None, "left a block that was not entered"
        if self._sent:  # a failed pass did not wait for the slots
            self.tensors()
        self._in_backward.discard(self)
        self._lent.close()
        self._lent = None

    def begin_again(self) -> None:
        """Begin to fill the slots for backward, if forward had them."""
        if self._buffer is not None:
            self.begin()

    def __str__(self) -> str:
        return f"layer {self.info.layer} (step {self.info.step})"

    @unseen()
    def begin(self) -> None:
        """Begin to fill the slots, aside; nothing is sent if they still hold what is wanted."""
        self._in_backward.give_back()
        memory, tensors = self._memory, resolve(self.bundle)
        layout = Layout.of(tensors, self.num_homes)
        with ExitStack() as stack:
            layer, before = self.info.layer, self._buffer
            self._buffer = stack.enter_context(memory.lend(str(self), layer, before))
            rows = memory.slots(layout, self._buffer)
            self._held = memory.held(layout, self._buffer)
            if self.possible:
                with memory.overlap.aside():
                    schedule = self._scheduled(layout)
                    self._sent = tensors
                    memory.streamer.fill(schedule, layout, tensors, rows, self._buffer)
                    self._tell(layout)
            else:
                self._tell(layout)
            self._lent = stack.pop_all()
        self._in_backward.add(self)

    def _scheduled(self, layout: Layout) -> torch.Tensor:
        """What this rank has to do now: others may have filled the slots since the last time."""
        memory, again, buffer = self._memory, self.schedule is not None, self._buffer
        assert buffer is not None
        if self.schedule is None:
            device = memory.peers.device
            self.schedule = torch.empty(memory.streamer.size, dtype=torch.int32, device=device)
        if self._given:  # it may send over anything, and tells no table
            memory.held_by_all(layout, buffer).zero_()
        else:
            wanted = memory.contents(layout, buffer, self.info.layer, self._versions)
            replicas = self._plan.replicas
            memory.streamer.schedule(replicas, layout, self.schedule, wanted, again=again)
        return self.schedule

    def _tell(self, layout: Layout) -> None:
        """Tell observers what was sent: under a promise the device knows, else what is planned."""
        sent: Later | None = None
        if self._promises.promise and not self._given and self.schedule is not None:
            sent = in_time(self.schedule[:1])
        elif self.info.back:
            return
        self.observers.sent(self.info, "weights", layout.nbytes, sent)

    @unseen()
    @staged("replicate", "weights again")
    def tensors(self) -> dict[str, torch.Tensor]:
        """`[L, ...]` for every tensor of the bundle; the main stream waits for them."""
        if self._lent is None:
            raise SlotError(f"the copies of {self} are lent inside of their `with` block only")
        self._memory.overlap.join()
        self._sent = {}
        return self._held

    @unseen()
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

    @unseen()
    def spans(self) -> torch.Tensor:
        """[H, 2] which stand at the end of the schedule."""
        assert self.schedule is not None, "nothing was sent"
        return self.schedule[self._memory.streamer.size - 2 * self.num_homes :].view(-1, 2)

    @unseen()
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
                for one, added in zip(stack, stacked[name], strict=True):
                    one.copy_(added)
        nbytes = sum(slots.nbytes for slots in self._gradients.values())
        self.observers.sent(self.info, "gradients", nbytes, None)
        return Beside(memory.beside, memory.overlap.aside) if beside else None

    @staged("reduce")
    def reduced(self) -> None:
        """The main stream waits for the sums."""
        self._memory.overlap.join()


def in_time(number: torch.Tensor) -> Later:
    """A function that returns the number when the device has come so far; the current stream's."""
    if capturing(number.device):
        return lambda: 0  # nobody notes what a graph captures
    coming = Fetch(number)
    return lambda: int(coming.wait())


def _stacked(stack: Stack) -> torch.Tensor:
    return stack if isinstance(stack, torch.Tensor) else torch.stack(list(stack))
