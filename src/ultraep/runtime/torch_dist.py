"""The communicator over torch.distributed: any process group, gloo or NCCL, sub-groups included.

Tensors travel as bytes: nothing is summed on the way, and gloo does not support every dtype. Errors
name the ranks that a roll call finds missing.
"""

from __future__ import annotations

import math
import pickle
import re
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ultraep.comm import Communicator, Message, Peers
from ultraep.errors import CommunicationError, ConfigError
from ultraep.runtime.mapped.peers import mapped_by
from ultraep.runtime.roll_call import Cause, RollCall

# torch 2.13 renamed it and warns about the old name; 2.11 has only the old one.
_all_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
HANG_UP = 1 << 30  # the tag of a message that is never sent

Connect = Callable[..., Communicator]  # (group, *, timeout=): see `connect.connect`
Pieces = Sequence[tuple[int, torch.Tensor]]  # peer, bytes to send or to receive

# Groups that were made of parts of a group, by their ranks and backend. They are used again: torch
# gives the name of a destroyed group to the next one, which waits for addresses of the old one.
Made = dict[tuple[tuple[int, ...], str], dist.ProcessGroup]
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Made] = weakref.WeakKeyDictionary()


class BytesCommunicator(ABC):
    """One rank of a process group that sends tensors as bytes; a subclass moves the bytes."""

    rank: int
    size: int
    timeout: float
    first_rank: int  # number of rank 0 in the group that this one is part of, for errors
    _group: dist.ProcessGroup
    _connect: Connect | None  # None: no other communicators can be made of this one
    _linked: weakref.ref[BytesCommunicator] | None = None  # of the domain, or of the whole group

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._gather("all_gather", tensor)

    def all_to_all(
        self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        width = math.prod(rows.shape[1:]) * rows.element_size()
        arrived = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        if width:
            sent, received = [n * width for n in send_counts], [n * width for n in receive_counts]
            self._all_to_all(as_bytes(rows), sent, as_bytes(arrived), received)
        return arrived

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        buffers = [
            m if m.tensor.is_contiguous() else Message(m.peer, m.tensor.detach().contiguous())
            for m in receives
        ]
        own = ([tensor for peer, tensor in part if peer == self.rank] for part in (sends, buffers))
        for source, target in zip(*own, strict=True):
            target.detach().copy_(source.detach())
        self._exchange(
            [(peer, as_bytes(tensor)) for peer, tensor in sends if peer != self.rank],
            [(peer, as_bytes(tensor)) for peer, tensor in buffers if peer != self.rank],
        )
        for message, buffer in zip(receives, buffers, strict=True):
            if buffer is not message:
                message.tensor.detach().copy_(buffer.tensor)

    def gather_objects(self, value: Any) -> list[Any]:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._gather("gather_objects", torch.tensor(len(data), device="cpu")).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: len(data)] = data
        rows = self._gather("gather_objects", padded)
        return [pickle.loads(row[:n].numpy().tobytes()) for row, n in zip(rows, sizes, strict=True)]

    def peers(self, device: torch.device) -> Peers:
        """Return symmetric memory of the ranks' GPUs."""
        return mapped_by(self._group, device)

    def part(self, size: int) -> Communicator:
        first = self.rank - self.rank % size
        part = self._connected(range(first, first + size), dist.get_backend(self._group))
        if isinstance(part, BytesCommunicator):
            self._linked, part._linked = weakref.ref(part), weakref.ref(self)
        return part

    @abstractmethod
    def give_up(self, cause: int) -> None:
        """Report to waiting ranks that this rank leaves because of `cause`, counted as in errors.

        The cause ended another communicator of this rank, which they may not be part of.
        """

    def _pass_on(self, causes: Sequence[int]) -> None:
        """Let the linked communicator give up, after a failure of this one."""
        linked = None if self._linked is None else self._linked()
        if linked is not None and causes:
            linked.give_up(causes[0])

    def _connected(self, ranks: range, backend: str) -> Communicator:
        """Return a communicator of some ranks of this group; collective for them."""
        assert self._connect is not None
        every = dist.get_process_group_ranks(self._group)
        members = tuple(every[rank] for rank in ranks)
        made = _made.setdefault(self._group, {})
        if (members, backend) not in made:
            made[members, backend] = dist.new_group(
                list(members), backend=backend, use_local_synchronization=True
            )
        first = self.first_rank + ranks.start
        return self._connect(made[members, backend], timeout=self.timeout, first_rank=first)

    def _gather(self, verb: str, tensor: torch.Tensor) -> torch.Tensor:
        gathered = tensor.new_empty((self.size, *tensor.shape))
        self._all_gather(verb, as_bytes(tensor), as_bytes(gathered))
        return gathered

    @abstractmethod
    def _all_gather(self, verb: str, data: torch.Tensor, gathered: torch.Tensor) -> None: ...

    @abstractmethod
    def _all_to_all(
        self, data: torch.Tensor, sent: list[int], arrived: torch.Tensor, received: list[int]
    ) -> None: ...

    @abstractmethod
    def _exchange(self, sends: Pieces, receives: Pieces) -> None: ...


class TorchDistCommunicator(BytesCommunicator):
    """One rank of a process group. Creating one is collective.

    timeout: seconds, for CPU tensors; None: the timeout of the group. On a GPU the host does not
        wait, and the watchdog of the group applies.
    connect: for `hosts` and `part`; None: they are not needed.
    first_rank: number of rank 0 in errors, if the group is a part of another one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: float | None = None,
        connect: Connect | None = None,
        first_rank: int = 0,
    ) -> None:
        self.rank, self.size, self.first_rank = dist.get_rank(group), group.size(), first_rank
        if self.rank < 0:
            raise ConfigError(
                "this process is not a rank of the group; pass a group that contains it"
            )
        self._group = group
        self._timeout, self._connect = timeout, connect
        self._over_gloo = "cpu:" in dist.get_backend_config(group)
        self.names = rank_names(group, first_rank)
        self._roll_call = RollCall(group, self.rank, self.names)
        # NCCL connects in the first call, which all ranks must join; some may skip an exchange.
        self.gather_objects(None)

    @property
    def timeout(self) -> float:  # type: ignore[override]
        """Seconds after which a silent rank is an error."""
        return timeout_of(self._group) if self._timeout is None else self._timeout

    def gather_objects(self, value: Any) -> list[Any]:
        if self._over_gloo:
            return super().gather_objects(value)  # all_gather_object has no timeout
        values = [None] * self.size
        with self._named("gather_objects"):
            dist.all_gather_object(values, value, group=self._group)
        return values

    def hosts(self) -> Communicator | None:
        """Return a communicator over gloo, or over shared memory if all ranks are on one host."""
        if dist.get_backend(self._group) == "gloo":
            return self
        return self._connect and self._connected(range(self.size), "gloo")

    def give_up(self, cause: int) -> None:
        text = f"{self.names[self.rank]} gave up, because of rank {cause}"
        self._roll_call.note(Cause(text, [cause - self.first_rank]))

    def close(self) -> None:
        """Stop answering the questions of ranks that fail; the group stays."""
        self._roll_call.close()

    def _all_gather(self, verb: str, data: torch.Tensor, gathered: torch.Tensor) -> None:
        if data.numel():
            with self._named(verb):
                work = _all_gather(gathered, data, group=self._group, async_op=True)
                self._wait(work, data.device, self._deadline())

    def _all_to_all(
        self, data: torch.Tensor, sent: list[int], arrived: torch.Tensor, received: list[int]
    ) -> None:
        with self._named("all_to_all"):
            if data.device.type == "cpu" and dist.get_backend(self._group) == "gloo":
                self._all_to_all_in_pairs(data.split(sent), arrived.split(received))
                return
            work = dist.all_to_all_single(
                arrived, data, received, sent, group=self._group, async_op=True
            )
            self._wait(work, data.device, self._deadline())

    def _all_to_all_in_pairs(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
    ) -> None:
        """As gloo's own, which uses the two directions of a connection in turn."""
        received[self.rank].copy_(sent[self.rank])
        sends, receives = (
            [(peer, data) for peer, data in enumerate(parts) if peer != self.rank]
            for parts in (sent, received)
        )
        works, ops, deadline = [], self._ops(sends, receives), self._deadline()
        for op in ops:
            with self._naming_peer(op):
                works.append(op.op(op.tensor, op.peer, self._group))
        for op, work in zip(ops, works, strict=True):
            with self._naming_peer(op):
                self._wait(work, op.tensor.device, deadline)

    @contextmanager
    def _naming_peer(self, op: dist.P2POp) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            peer = dist.get_group_rank(self._group, op.peer)
            raise _PeerError(f"{self.names[peer]}: {error}", peer) from error

    def _exchange(self, sends: Pieces, receives: Pieces) -> None:
        ops = self._ops(sends, receives)
        with self._exchanging(*ops):
            works = dist.batch_isend_irecv(ops) if ops else []
        self._wait_all(works, ops)

    def _ops(self, sends: Pieces, receives: Pieces) -> list[dist.P2POp]:
        """Receives come first: otherwise gloo uses the directions of a connection in turn."""
        return [
            dist.P2POp(verb, data, dist.get_global_rank(self._group, peer), self._group)
            for verb, pieces in ((dist.irecv, receives), (dist.isend, sends))
            for peer, data in pieces
            if data.numel()  # backends treat empty messages differently
        ]

    def _wait_all(self, works: Sequence[Any], ops: Sequence[dist.P2POp]) -> None:
        deadline = self._deadline()
        if len(works) != len(ops):  # NCCL returns one work for all
            with self._exchanging(*ops):
                for work in works:
                    self._wait(work, ops[0].tensor.device, deadline)
            return
        for work, op in zip(works, ops, strict=True):
            with self._exchanging(op):
                self._wait(work, op.tensor.device, deadline)

    def _exchanging(self, *ops: dist.P2POp) -> AbstractContextManager[None]:
        """Name the peers of these messages in errors of torch.distributed."""
        peers = sorted({dist.get_group_rank(self._group, op.peer) for op in ops})
        names = ", ".join(self.names[peer] for peer in peers)
        return self._named(f"exchange with {names}", *peers, collective=False)

    def _deadline(self) -> float | None:
        return None if self._timeout is None else time.monotonic() + self._timeout

    def _wait(self, work: Any, device: torch.device, deadline: float | None) -> None:
        if deadline is None or device.type != "cpu":
            work.wait()
        else:  # zero would mean the timeout of the group
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))

    @contextmanager
    def _named(self, verb: str, *peers: int, collective: bool = True) -> Iterator[None]:
        """Turn an error of torch.distributed into one that names the missing ranks or peers."""
        if collective:
            self._roll_call.enter()
        try:
            yield
        except RuntimeError as error:
            cause = self._roll_call.missing()
            self._hang_up()
            symptom = re.sub(r"\[\S+:\d+\] ", "", str(error), count=1).partition("\n")[0]
            symptom = symptom.partition(". This is typically")[0]
            first = [error.peer] if isinstance(error, _PeerError) else peers
            # Another rank may have found the cause, and counts this one among the late ranks.
            others = [rank for rank in cause.ranks if rank != self.rank]
            ranks = [self.first_rank + rank for rank in others or cause.ranks or first]
            # The first connection that closed is the likeliest cause of the others.
            self._pass_on([self.first_rank + peer for peer in first] or ranks)
            raise CommunicationError(
                f"{verb}: {cause.text}{'; ' * bool(cause.text)}noticed by "
                f"{self.names[self.rank]}: {symptom}",
                ranks=ranks,
            ) from error

    def _hang_up(self) -> None:
        """Close the connections of gloo: an operation that timed out would keep the process alive.

        A receive that times out closes the connections to all ranks; `abort` does not. A receive
        from a rank that has left fails at once and closes nothing, so it is tried with all ranks.
        """
        for step in range(1, self.size if self._over_gloo else 1):
            peer = dist.get_global_rank(self._group, (self.rank + step) % self.size)
            nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
            with suppress(RuntimeError):
                work = dist.irecv(nothing, peer, self._group, HANG_UP)
                assert work is not None
                work.wait(timedelta(milliseconds=1))


class _PeerError(RuntimeError):
    """An operation with one peer failed."""

    def __init__(self, text: str, peer: int) -> None:
        super().__init__(text)
        self.peer = peer


def rank_names(group: dist.ProcessGroup, first_rank: int) -> list[str]:
    """Return the names of all ranks of a group; they include global ranks that differ."""
    return [
        f"rank {rank}" if rank == everywhere else f"rank {rank} (global rank {everywhere})"
        for rank, everywhere in enumerate(dist.get_process_group_ranks(group), first_rank)
    ]


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return the timeout of the group in seconds; of its CPU side, if it has one."""
    devices = group._device_types
    device = next((device for device in devices if device.type == "cpu"), devices[0])
    seconds: float = group._get_backend(device).options._timeout.total_seconds()
    return seconds


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in one dimension, without a copy if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
