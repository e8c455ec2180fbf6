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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ultraep.comm import Message, Peers
from ultraep.errors import CommunicationError, ConfigError
from ultraep.runtime.mapped.peers import mapped_by
from ultraep.runtime.roll_call import RollCall

# torch 2.13 renamed it and warns about the old name; 2.11 has only the old one.
_all_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
HANG_UP = 1 << 30  # the tag of a message that is never sent

Pieces = Sequence[tuple[int, torch.Tensor]]  # peer, bytes to send or to receive

# Groups that were made of parts of a group, by their ranks and backend. They are used again: torch
# gives the name of a destroyed group to the next one, which waits for addresses of the old one.
Made = dict[tuple[tuple[int, ...], str], dist.ProcessGroup]
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Made] = weakref.WeakKeyDictionary()


class TorchDistCommunicator:
    """One rank of a process group. Creating one is collective.

    timeout: seconds, for CPU tensors; None: the timeout of the group. On a GPU the host does not
        wait, and the watchdog of the group applies.
    whole: the communicator that this one is a part of.
    first_rank: number of rank 0 in `whole`, for errors.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: float | None = None,
        whole: TorchDistCommunicator | None = None,
        first_rank: int = 0,
    ) -> None:
        self.rank, self.size = dist.get_rank(group), group.size()
        if self.rank < 0:
            raise ConfigError(
                "this process is not a rank of the group; pass a group that contains it"
            )
        self._group, self._first_rank = group, first_rank
        self._timeout = timeout
        self._over_gloo = "cpu:" in dist.get_backend_config(group)
        self._names = rank_names(group, first_rank)
        whole_roll_call = None if whole is None else whole._roll_call
        self._roll_call: RollCall = RollCall(group, self._names, first_rank, whole_roll_call)
        # NCCL connects in the first call, which all ranks must join; some may skip an exchange.
        self.gather_objects(None)

    @property
    def timeout(self) -> float:
        """Seconds after which a silent rank is an error."""
        return timeout_of(self._group) if self._timeout is None else self._timeout

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
        with self._named("exchange", collective=False):
            self._send_and_receive(
                [(peer, as_bytes(tensor)) for peer, tensor in sends],
                [(peer, as_bytes(tensor)) for peer, tensor in buffers],
            )
        for message, buffer in zip(receives, buffers, strict=True):
            if buffer is not message:
                message.tensor.detach().copy_(buffer.tensor)

    def gather_objects(self, value: Any) -> list[Any]:
        if not self._over_gloo:
            values = [None] * self.size
            with self._named("gather_objects"):
                dist.all_gather_object(values, value, group=self._group)
            return values
        # all_gather_object has no timeout
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._gather("gather_objects", torch.tensor(len(data), device="cpu")).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: len(data)] = data
        rows = self._gather("gather_objects", padded)
        return [pickle.loads(row[:n].numpy().tobytes()) for row, n in zip(rows, sizes, strict=True)]

    def peers(self, device: torch.device) -> Peers:
        """Return symmetric memory of the ranks' GPUs."""
        return mapped_by(self._group, device)

    def part(self, size: int) -> TorchDistCommunicator:
        first = self.rank - self.rank % size
        return self._connected(range(first, first + size), dist.get_backend(self._group))

    def hosts(self) -> TorchDistCommunicator:
        """Return a communicator over gloo."""
        if dist.get_backend(self._group) == "gloo":
            return self
        return self._connected(range(self.size), "gloo")

    def check_alive(self) -> None:
        cause = self._roll_call.dead()
        if cause.ranks:
            raise CommunicationError(cause.text, ranks=cause.ranks)

    def close(self) -> None:
        """Stop answering the questions of ranks that fail; the group stays."""
        self._roll_call.close()

    def _connected(self, ranks: range, backend: str) -> TorchDistCommunicator:
        """Return a communicator of some ranks of this group; collective for them."""
        every = dist.get_process_group_ranks(self._group)
        members = tuple(every[rank] for rank in ranks)
        made = _made.setdefault(self._group, {})
        if (members, backend) not in made:
            made[members, backend] = dist.new_group(
                list(members), backend=backend, use_local_synchronization=True
            )
        first = self._first_rank + ranks.start
        return TorchDistCommunicator(made[members, backend], self.timeout, self, first)

    def _gather(self, verb: str, tensor: torch.Tensor) -> torch.Tensor:
        gathered = tensor.new_empty((self.size, *tensor.shape))
        if tensor.numel():
            data = as_bytes(tensor)
            with self._named(verb):
                work = _all_gather(as_bytes(gathered), data, group=self._group, async_op=True)
                self._wait(work, data.device, self._deadline())
        return gathered

    def _all_to_all(
        self, data: torch.Tensor, sent: list[int], arrived: torch.Tensor, received: list[int]
    ) -> None:
        with self._named("all_to_all"):
            if data.device.type == "cpu" and dist.get_backend(self._group) == "gloo":
                # gloo's own uses the two directions of a connection in turn.
                self._send_and_receive(
                    list(enumerate(data.split(sent))), list(enumerate(arrived.split(received)))
                )
                return
            work = dist.all_to_all_single(
                arrived, data, received, sent, group=self._group, async_op=True
            )
            self._wait(work, data.device, self._deadline())

    def _send_and_receive(self, sends: Pieces, receives: Pieces) -> None:
        """Exchange pieces with peers, and copy those of this rank; errors name the peers."""
        own = ([data for peer, data in part if peer == self.rank] for part in (sends, receives))
        for source, target in zip(*own, strict=True):
            target.copy_(source)
        # Receives come first: otherwise gloo uses the directions of a connection in turn.
        ops = [
            dist.P2POp(verb, data, dist.get_global_rank(self._group, peer), self._group)
            for verb, pieces in ((dist.irecv, receives), (dist.isend, sends))
            for peer, data in pieces
            if peer != self.rank and data.numel()  # backends treat empty messages differently
        ]
        works, deadline = [], self._deadline()
        if dist.get_backend(self._group) != "gloo":
            with self._naming_peers(*ops):
                for work in dist.batch_isend_irecv(ops) if ops else []:
                    self._wait(work, ops[0].tensor.device, deadline)
            return
        for op in ops:
            with self._naming_peers(op):
                works.append(op.op(op.tensor, op.peer, self._group))
        for op, work in zip(ops, works, strict=True):
            with self._naming_peers(op):
                self._wait(work, op.tensor.device, deadline)

    @contextmanager
    def _naming_peers(self, *ops: dist.P2POp) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            peers = sorted({dist.get_group_rank(self._group, op.peer) for op in ops})
            names = ", ".join(self._names[peer] for peer in peers)
            raise _PeerError(f"{names}: {error}", peers) from error

    def _deadline(self) -> float | None:
        return None if self._timeout is None else time.monotonic() + self._timeout

    def _wait(self, work: Any, device: torch.device, deadline: float | None) -> None:
        if deadline is None or device.type != "cpu":
            work.wait()
        else:  # zero would mean the timeout of the group
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))

    @contextmanager
    def _named(self, verb: str, *, collective: bool = True) -> Iterator[None]:
        """Turn an error of torch.distributed into one that names the missing ranks or peers."""
        self._roll_call.enter(counted=collective)
        try:
            yield
        except RuntimeError as error:
            cause = self._roll_call.missing()
            self._hang_up()
            symptom = re.sub(r"\[\S+:\d+\] ", "", str(error), count=1).partition("\n")[0]
            symptom = symptom.partition(". This is typically")[0]
            first = error.peers if isinstance(error, _PeerError) else []
            # Another rank may have found the cause, and counts this one among the late ranks.
            own = self._first_rank + self.rank
            others = [rank for rank in cause.ranks if rank != own]
            ranks = others or cause.ranks or [self._first_rank + peer for peer in first]
            self._roll_call.note(ranks)
            raise CommunicationError(
                f"{verb}: {cause.text}{'; ' * bool(cause.text)}noticed by "
                f"{self._names[self.rank]}: {symptom}",
                ranks=ranks,
            ) from error
        finally:
            self._roll_call.leave()

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
    """An operation with these peers failed."""

    def __init__(self, text: str, peers: list[int]) -> None:
        super().__init__(text)
        self.peers = peers


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
