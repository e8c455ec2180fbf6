"""The communicator over torch.distributed: any process group, gloo or NCCL, sub-groups included.

Tensors travel as bytes: nothing is summed on the way, and gloo does not know every dtype.
"""

from __future__ import annotations

import math
import pickle
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ultraep.comm import Communicator, Message, Peers
from ultraep.errors import CommunicationError, ConfigError
from ultraep.runtime.mapped.peers import mapped_by
from ultraep.runtime.roll_call import RollCall

# torch 2.13 renamed it and warns about the old name; 2.11 knows only that one.
_all_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
HANG_UP = 1 << 30  # the tag of a message that is never sent


class TorchDistCommunicator:
    """One rank of a process group. To make one is collective: all ranks of the group do it.

    `timeout` in seconds holds for CPU tensors; on a GPU the host does not wait, and the watchdog
    of the group does the rest. None leaves it to the group in both cases. `connect_hosts` makes
    the communicator of the hosts of a group of GPUs; None: they have none.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: float | None = None,
        connect_hosts: Callable[[dist.ProcessGroup, float | None], Communicator] | None = None,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise ConfigError("this process is no rank of the group")
        self._group = group
        self._timeout, self._connect_hosts = timeout, connect_hosts
        self._over_gloo = "cpu:" in dist.get_backend_config(group)
        self._roll_call = RollCall(group, self.rank, self.size)
        # NCCL connects in the first call, which all ranks must join; an exchange may lack some.
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
            with self._named("all_to_all"):
                work = dist.all_to_all_single(
                    as_bytes(arrived),
                    as_bytes(rows),
                    [count * width for count in receive_counts],
                    [count * width for count in send_counts],
                    group=self._group,
                    async_op=True,
                )
                self._wait(work, rows.device, self._deadline())
        return arrived

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        with landing(receives) as buffers:
            copy_own(self.rank, sends, buffers)
            ops = [*self._ops(dist.isend, sends), *self._ops(dist.irecv, buffers)]
            if ops:
                with self._named("exchange", collective=False):
                    self._wait_all(dist.batch_isend_irecv(ops), ops)

    def gather_objects(self, value: Any) -> list[Any]:
        if not self._over_gloo:
            values = [None] * self.size
            with self._named("gather_objects"):
                dist.all_gather_object(values, value, group=self._group)
            return values
        # all_gather_object has no timeout.
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._gather("gather_objects", torch.tensor(len(data), device="cpu")).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: len(data)] = data
        rows = self._gather("gather_objects", padded)
        return [pickle.loads(row[:n].numpy().tobytes()) for row, n in zip(rows, sizes, strict=True)]

    def hosts(self) -> Communicator | None:
        """Over gloo, and shared memory where all ranks are on one host."""
        if dist.get_backend(self._group) == "gloo":
            return self
        return self._connect_hosts and self._connect_hosts(self._group, self._timeout)

    def peers(self, device: torch.device) -> Peers:
        """Symmetric memory of GPUs."""
        return mapped_by(self._group, device)

    def close(self) -> None:
        """Answer no more questions of ranks that fail; the group stays."""
        self._roll_call.close()

    def _gather(self, verb: str, tensor: torch.Tensor) -> torch.Tensor:
        source = as_bytes(tensor)
        gathered = tensor.new_empty((self.size, *tensor.shape))
        if source.numel():
            with self._named(verb):
                work = _all_gather(as_bytes(gathered), source, group=self._group, async_op=True)
                self._wait(work, tensor.device, self._deadline())
        return gathered

    def _ops(self, verb: Callable[..., Any], messages: Sequence[Message]) -> list[dist.P2POp]:
        """Without empty ones: both sides know their sizes, and backends differ about them."""
        return [
            dist.P2POp(verb, as_bytes(tensor), dist.get_global_rank(self._group, peer), self._group)
            for peer, tensor in messages
            if peer != self.rank and tensor.numel()
        ]

    def _wait_all(self, works: Sequence[Any], ops: Sequence[dist.P2POp]) -> None:
        deadline = self._deadline()
        if len(works) != len(ops):  # NCCL makes one work of them all
            for work in works:
                self._wait(work, ops[0].tensor.device, deadline)
            return
        for work, op in zip(works, ops, strict=True):
            peer = dist.get_group_rank(self._group, op.peer)
            with self._named(f"exchange with rank {peer}", collective=False):
                self._wait(work, op.tensor.device, deadline)

    def _deadline(self) -> float | None:
        return None if self._timeout is None else time.monotonic() + self._timeout

    def _wait(self, work: Any, device: torch.device, deadline: float | None) -> None:
        if deadline is None or device.type != "cpu":
            work.wait()
        else:  # zero would mean the timeout of the group
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))

    @contextmanager
    def _named(self, verb: str, *, collective: bool = True) -> Iterator[None]:
        """Turn an error of torch.distributed into one that names the ranks that are missing."""
        if collective:
            self._roll_call.enter()
        try:
            yield
        except RuntimeError as error:
            missing = self._roll_call.missing()
            self._hang_up()
            symptom = re.sub(r"^\[\S+:\d+\] ", "", str(error)).partition("\n")[0]
            symptom = symptom.partition(". This is typically")[0]
            raise CommunicationError(
                f"{verb}: {missing}{'; ' * bool(missing)}noticed by rank {self.rank} of "
                f"{self.size}: {symptom}"
            ) from error

    def _hang_up(self) -> None:
        """Close gloo's connections: what timed out here would else keep the process from ending.

        A receive that times out closes the connections to all ranks; `abort` does not.
        """
        if self._over_gloo and self.size > 1:
            peer = dist.get_global_rank(self._group, (self.rank + 1) % self.size)
            nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
            with suppress(RuntimeError):
                work = dist.irecv(nothing, peer, self._group, HANG_UP)
                assert work is not None
                work.wait(timedelta(milliseconds=1))


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds after which the group itself gives up; of its CPU side, if it has one."""
    devices = group._device_types
    device = next((device for device in devices if device.type == "cpu"), devices[0])
    seconds: float = group._get_backend(device).options._timeout.total_seconds()
    return seconds


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in one dimension: its own memory if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@contextmanager
def landing(receives: Sequence[Message]) -> Iterator[list[Message]]:
    """Contiguous places to receive into; what is not contiguous is filled at the end."""
    buffers = [
        message
        if message.tensor.is_contiguous()
        else Message(
            message.peer, torch.empty_like(message.tensor, memory_format=torch.contiguous_format)
        )
        for message in receives
    ]
    yield buffers
    for message, buffer in zip(receives, buffers, strict=True):
        if buffer is not message:
            message.tensor.detach().copy_(buffer.tensor)


def copy_own(rank: int, sends: Sequence[Message], receives: Sequence[Message]) -> None:
    """What a rank sends to itself."""
    sources = [tensor for peer, tensor in sends if peer == rank]
    targets = [tensor for peer, tensor in receives if peer == rank]
    for source, target in zip(sources, targets, strict=True):
        target.detach().copy_(source.detach())
