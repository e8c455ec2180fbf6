"""MessageReplicas: the replicas of one microbatch in one layer, sent by messages.

    with microbatch.replicate() as replicas:                         # stage 3
        outputs = ... replicas.tensors()["down"][slot] ...
    ...
    with replicas:                                                   # in backward: filled again
        ...
        replicas.reduce(gradients)                                   # stage 8

The slots are lent for the `with` block only; other layers overwrite them afterwards. Entering a
second time restores them, and sends nothing if they were not overwritten.

Weights travel along hops (hops.py). In mode `direct` the home sends every replica itself. In mode
`chain` the replicas of an expert stand in a row; each passes a chunk on while the next one arrives,
so that no rank sends an expert more than once and the last replica is complete about when the first
is. Mode `auto` takes the one that is done sooner, plan by plan.

In backward every replica sends its gradient to the home of its expert, all its tensors in one row
of bytes. The home adds them to its own in the order of the plan, by host rank: the same sum in
every run, whatever arrives first. Experts without replicas are not touched.

Shapes: R ranks, H home experts of this rank, L spare slots, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, Self

import numpy as np
import torch

from ultraep.arrays import IntArray
from ultraep.backends import backend_for
from ultraep.bundle import Bundle, Layout, Stack, device_of_bundle, resolve
from ultraep.comm import Communicator, Message, moved
from ultraep.errors import SlotError
from ultraep.hops import HOME, Hop, hops
from ultraep.microbatch import Kinds, MicrobatchInfo
from ultraep.ops.modes import unseen
from ultraep.ops.products import accumulator
from ultraep.plan import Plan
from ultraep.runtime.messages.slots import Buffer, Contents, SlotPool
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


def send_weights(
    found: list[Hop],
    weights: Mapping[str, Stack],
    rows: torch.Tensor,
    *,
    layout: Layout,
    plan: Plan,
    comm: Communicator,
    chunks: int = 1,
) -> int:
    """Carry out the hops: fill this rank's spare slots (`rows` of bytes); the bytes it sent.

    Chunk c of a hop at depth d travels in round c + d; all messages of a round go at once.
    """
    me = comm.rank
    mine = plan.topology.home_experts(me)
    packed = {
        hop.expert: layout.pack(weights, int(np.searchsorted(mine, hop.expert)))
        for hop in found
        if hop.sender == me and hop.sender_slot == HOME
    }
    chunks = chunks if any(hop.depth for hop in found) else 1
    rounds = chunks + max((hop.depth for hop in found), default=-1)
    sent = 0
    for moment in range(rounds):
        sends, receives = [], []
        for hop in found:
            piece = _chunk(layout.nbytes, moment - hop.depth, chunks)
            if hop.sender == me and piece is not None:
                held = packed[hop.expert] if hop.sender_slot == HOME else rows[hop.sender_slot]
                sends.append(Message(hop.receiver, held[piece]))
            if hop.receiver == me and piece is not None:
                receives.append(Message(hop.sender, rows[hop.slot][piece]))
        comm.exchange(sends, receives)
        sent += sum(message.tensor.numel() for message in sends)
    return sent


def _chunk(nbytes: int, index: int, chunks: int) -> slice | None:
    """The bytes of one chunk, or None if it is not this hop's turn."""
    if not 0 <= index < chunks:
        return None
    size = -(-nbytes // chunks)
    return slice(index * size, min(nbytes, (index + 1) * size))


def reduce_gradients(
    homes: Mapping[str, Stack],
    own: Mapping[str, Stack],
    rows_LB: torch.Tensor,
    layout: Layout,
    plan: Plan,
    comm: Communicator,
    *,
    staging: Callable[[int], torch.Tensor],
) -> int:
    """The gradients of home experts that have copies, from their own and those; the bytes sent.

    homes, own: `[H, ...]` or H tensors for every tensor of the layout; may be the same.
    rows_LB: gradients of the copies of this rank.   staging: gives `[n, B]` rows to receive in.
    """
    home_of_expert = plan.topology.home_of_expert
    mine = plan.topology.home_experts(comm.rank)
    sends, arriving = [], []
    for expert, host, slot in plan.replicas.tolist():
        if host == comm.rank:
            sends.append(Message(int(home_of_expert[expert]), rows_LB[slot]))
        if home_of_expert[expert] == comm.rank:
            arriving.append((int(np.searchsorted(mine, expert)), host))
    staged = staging(len(arriving))
    comm.exchange(
        sends, [Message(host, row) for (_, host), row in zip(arriving, staged, strict=True)]
    )
    views = layout.views(staged)
    for index, group in groupby(enumerate(arriving), key=lambda found: found[1][0]):
        numbers = [number for number, _ in group]
        for name, stack in homes.items():
            others = [views[name][number] for number in numbers]
            _add(stack[index], own[name][index], others)
    return len(sends) * layout.nbytes


def _add(home: torch.Tensor, own: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
    """Into `home`, an expert's own gradient with those of its copies; rounded once."""
    total = own.to(accumulator(own.dtype))
    for other in others:
        total = total + other.to(total.dtype)
    home.copy_(total)
