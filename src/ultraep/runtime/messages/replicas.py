"""MessageReplicas: the replicas of one microbatch, whose weights and gradients travel as messages.

Weights travel along hops (hops.py). In mode `direct` the home sends every replica itself. In mode
`chain` each replica forwards a chunk while it receives the next one, so that no rank sends an
expert more than once. Mode `auto` picks the faster mode for each plan.

In backward every replica sends its gradient to the home of its expert, all tensors in one row of
bytes. The home adds them to its own gradient in the order of the plan (by host rank), so the sum
does not depend on the order of arrival. Experts without replicas are not touched.

All layers share the spare slots and gradient rows of a `SlotPool`. A buffer of slots is lent while
a microbatch fills and uses it, in forward and again in backward.

Shapes: R ranks, H home experts of this rank, L spare slots, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from ultraep.backends import has_kernels
from ultraep.bundle import Bundle, Layout, Stack, device_of_bundle, resolve
from ultraep.comm import Communicator, Message, moved
from ultraep.hops import CHUNKS, HOME, Hop, hops
from ultraep.microbatch import Context
from ultraep.ops.modes import outside_dispatch_modes
from ultraep.ops.products import accumulator
from ultraep.passes import Passes
from ultraep.plan import Plan
from ultraep.replicas import Replicas, TensorSpecs, no_free_slots


class MessageReplicas(Replicas):
    """The replicas of one plan and one bundle of home weights.

    device: where the tokens are.
    """

    def __init__(
        self,
        context: Context,
        pool: SlotPool,
        passes: Passes,
        plan: Plan,
        bundle: Bundle,
        device: torch.device,
    ) -> None:
        super().__init__(context.lent_in_backward, passes, bundle)
        self._context, self._pool, self._plan, self._device = context, pool, plan, device
        self._home_experts = plan.topology.home_experts(context.comm.rank)
        self.num_homes = len(self._home_experts)
        self.possible = plan.num_replicas > 0
        self.kernels = has_kernels(device.type)
        self._buffer: Buffer | None = None  # the one that was lent last
        self._filling = object()  # what a buffer holds that these replicas have filled
        self._layout: Layout | None = None
        self._gradients: tuple[Layout, torch.Tensor] | None = None

    def _fill(self, loan: ExitStack) -> None:
        tensors = resolve(self.bundle)
        layout = self._layout = Layout.of(tensors, self.num_homes)
        device = device_of_bundle(tensors)
        lend = self._pool.lend(layout, device, str(self), self._buffer)
        buffer = self._buffer = loan.enter_context(lend)
        sent = self._send(buffer, layout, tensors) if self.possible else 0
        self.passes.record.sent.append(("weights", layout.nbytes, sent // layout.nbytes))

    def _send(self, buffer: Buffer, layout: Layout, tensors: dict[str, Stack]) -> int:
        """Send and receive the weights, unless they are still there; return the bytes sent."""
        if buffer.holds is self._filling:
            return 0
        plan, settings, comm = self._plan, self._context.settings, self._context.comm
        path = hops(plan, settings.relay, chunks=CHUNKS)
        buffer.holds = None  # if sending fails
        nbytes = send_weights(
            path,
            tensors,
            buffer.rows,
            layout=layout,
            plan=plan,
            comm=comm,
            chunks=CHUNKS,
        )
        buffer.holds = self._filling
        return nbytes

    def _slot_tensors(self) -> dict[str, torch.Tensor]:
        assert self._buffer is not None
        assert self._layout is not None
        return self._layout.views(self._buffer.rows)

    def served_rows(self, like_AD: torch.Tensor) -> None:
        """None: rows are sent from any memory."""

    @outside_dispatch_modes
    def gradient_slots(self, specs: TensorSpecs) -> dict[str, torch.Tensor]:
        """`[L, ...]` memory that all layers share."""
        layout = Layout(tuple((name, *kind) for name, kind in specs.items()))
        rows = self._gradient_rows("replicas", self._plan.topology.slots, layout)
        self._gradients = layout, rows
        return layout.views(rows)

    @outside_dispatch_modes
    def spans(self) -> torch.Tensor:
        experts = self._plan.replicas[:, 0]
        begins = np.searchsorted(experts, self._home_experts, "left")
        ends = np.searchsorted(experts, self._home_experts, "right")
        spans = np.stack([begins, ends], axis=1).astype(np.int32)
        return moved(torch.from_numpy(spans), self._device)

    @outside_dispatch_modes
    def reduce(
        self,
        homes: Mapping[str, Stack],
        own: Mapping[str, torch.Tensor] | None = None,
        *,
        beside: bool = False,
    ) -> None:
        """Stage 8; returns when all gradients are added."""
        del beside
        record = self.passes.record
        record.at("reduce")
        assert self._gradients is not None, "gradient_slots() must be called before reduce()"
        layout, rows_LB = self._gradients
        comm, home_of_expert = self._context.comm, self._plan.topology.home_of_expert
        sends, arriving = [], []  # arriving: index of the home expert, host rank of the replica
        for expert, host, slot in self._plan.replicas.tolist():
            if host == comm.rank:
                sends.append(Message(int(home_of_expert[expert]), rows_LB[slot]))
            if home_of_expert[expert] == comm.rank:
                arriving.append((int(np.searchsorted(self._home_experts, expert)), host))
        staging = self._gradient_rows("arriving", len(arriving), layout)
        hosts = [host for _, host in arriving]
        comm.exchange(sends, [Message(host, row) for host, row in zip(hosts, staging, strict=True)])
        views = layout.views(staging)
        of_homes: Mapping[str, Stack] = own or homes
        for index, group in groupby(range(len(arriving)), key=lambda number: arriving[number][0]):
            numbers = list(group)
            for name, stack in homes.items():
                replicas = [views[name][number] for number in numbers]
                _add(stack[index], of_homes[name][index], replicas)
        record.sent.append(("gradients", layout.nbytes, len(sends)))
        record.at("experts back")

    def reduced(self) -> None:
        """End backward if no gradients leave; `reduce` has waited."""
        if not self.passes.gradients_leave:
            self.passes.record.end()

    def _gradient_rows(self, use: str, count: int, layout: Layout) -> torch.Tensor:
        return self._pool.gradient_rows(use, count, layout.nbytes, self._device)


@dataclass(eq=False)
class Buffer:
    """The spare slots of this rank for one bundle layout."""

    rows: torch.Tensor  # [slots, bytes]
    holds: object = None  # the replicas that filled it last
    borrower: str | None = None


class SlotPool:
    """Lends buffers of spare slots; allocates at most `buffers` for each layout and device.

    A request while all are lent is an error that names the borrowers.
    """

    def __init__(self, slots: int, buffers: int) -> None:
        self._slots, self._max_buffers = slots, buffers
        self._buffers: dict[tuple[Layout, torch.device], list[Buffer]] = {}
        self._rows: dict[tuple[str, torch.device], torch.Tensor] = {}

    @contextmanager
    def lend(
        self,
        layout: Layout,
        device: torch.device,
        borrower: str,
        last: Buffer | None = None,
    ) -> Iterator[Buffer]:
        """Lend a free buffer of this layout until the end of the `with` block.

        Prefers the `last` buffer of the borrower; allocates one if all are lent.
        """
        buffers = self._buffers.setdefault((layout, device), [])
        free = [buffer for buffer in buffers if buffer.borrower is None]
        if not free and len(buffers) < self._max_buffers:
            free = [Buffer(_zeros(self._slots, layout.nbytes, device))]
            buffers += free
        if not free:
            raise no_free_slots(borrower, [b.borrower for b in buffers])
        buffer = last if last is not None and last in free else free[0]
        buffer.borrower = borrower
        try:
            yield buffer
        finally:
            buffer.borrower = None

    def gradient_rows(
        self, use: str, count: int, nbytes: int, device: torch.device
    ) -> torch.Tensor:
        """Return `[count, nbytes]` of the memory for this use, which only grows."""
        flat = self._rows.get((use, device))
        if flat is None or flat.numel() < count * nbytes:
            flat = self._rows[use, device] = _zeros(count, nbytes, device).view(-1)
        return flat[: count * nbytes].view(count, nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        slots = sum(b.rows.numel() for buffers in self._buffers.values() for b in buffers)
        return slots + sum(rows.numel() for rows in self._rows.values())


@torch.inference_mode(False)
def _zeros(rows: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory that both inference mode and training can write."""
    return torch.zeros(rows, nbytes, dtype=torch.uint8, device=device)


def send_weights(
    path: list[Hop],
    weights: Mapping[str, Stack],
    rows: torch.Tensor,
    *,
    layout: Layout,
    plan: Plan,
    comm: Communicator,
    chunks: int = 1,
) -> int:
    """Carry out the hops: fill the spare slots of this rank (`rows`) and return the bytes sent.

    Chunk c of a hop at depth d travels in round c + d; all messages of a round go at once.
    """
    packed = _packed(path, weights, layout, plan, comm.rank)
    chunks = chunks if any(hop.depth for hop in path) else 1
    rounds = chunks + max((hop.depth for hop in path), default=-1)
    sent = 0
    for number in range(rounds):
        sends, receives = _messages_of_round(number, path, packed, rows, comm.rank, chunks)
        comm.exchange(sends, receives)
        sent += sum(message.tensor.numel() for message in sends)
    return sent


def _packed(
    path: list[Hop], weights: Mapping[str, Stack], layout: Layout, plan: Plan, rank: int
) -> dict[int, torch.Tensor]:
    """Return the row of bytes of every home expert that this rank sends, by expert."""
    homes = plan.topology.home_experts(rank)
    return {
        hop.expert: layout.pack(weights, int(np.searchsorted(homes, hop.expert)))
        for hop in path
        if hop.sender == rank and hop.sender_slot == HOME
    }


def _messages_of_round(
    number: int,
    path: list[Hop],
    packed: Mapping[int, torch.Tensor],
    rows: torch.Tensor,
    rank: int,
    chunks: int = 1,
) -> tuple[list[Message], list[Message]]:
    """Return what this rank sends and receives in one round."""
    sends, receives = [], []
    for hop in path:
        chunk = _chunk(rows.shape[1], number - hop.depth, chunks)
        if hop.sender == rank and chunk is not None:
            source = packed[hop.expert] if hop.sender_slot == HOME else rows[hop.sender_slot]
            sends.append(Message(hop.receiver, source[chunk]))
        if hop.receiver == rank and chunk is not None:
            receives.append(Message(hop.sender, rows[hop.slot][chunk]))
    return sends, receives


def _chunk(nbytes: int, index: int, chunks: int) -> slice | None:
    """Return the bytes of one chunk, or None if the index is out of range."""
    if not 0 <= index < chunks:
        return None
    size = -(-nbytes // chunks)
    return slice(index * size, min(nbytes, (index + 1) * size))


def _add(home: torch.Tensor, own: torch.Tensor, replicas: Sequence[torch.Tensor]) -> None:
    """Store in `home` the sum of an expert's own gradient and its replicas', rounded once."""
    total = own.to(accumulator(own.dtype))
    for gradient in replicas:
        total = total + gradient.to(total.dtype)
    home.copy_(total)
