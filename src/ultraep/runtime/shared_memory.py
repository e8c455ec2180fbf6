"""The communicator of CPU ranks on one host: bytes travel through /dev/shm, not through sockets.

The process group serves to find each other, once. wire.py moves the messages. The sockets of gloo
would do the same, but a layer then takes 4 to 9 % longer (benchmarks/bench_layer.py), and a rank
that dies is not named.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import platform
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from ultraep.comm import Message, Peers
from ultraep.errors import CommunicationError, ConfigError
from ultraep.runtime import segments, wire
from ultraep.runtime.mapped.peers import mapped_by
from ultraep.runtime.torch_dist import (
    TorchDistCommunicator,
    as_bytes,
    copy_own,
    landing,
    timeout_of,
)

MACHINES = ("Linux x86_64", "Linux aarch64")  # aligned words are stored whole

logger = logging.getLogger(__name__)


class SharedMemoryCommunicator:
    """One rank of a gloo group on one host. To make one is collective, and it is for one thread.

    After an error the communicator stays broken, here and soon on all other ranks. `timeout` is
    how many seconds to wait without any progress; None: as long as the group does. A rank that
    died is noticed at once.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float | None = None) -> None:
        self._group, self._wire = group, _set_up(group, timeout)
        self.rank, self.size, self.timeout = self._wire.rank, self._wire.size, self._wire.timeout
        # Also at exit; the wire does not know the communicator, so nothing keeps that alive.
        self._release = weakref.finalize(self, self._wire.close)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._gather("all_gather", tensor)

    def all_to_all(
        self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        width = math.prod(rows.shape[1:]) * rows.element_size()
        arrived = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        parts = as_bytes(rows).split([count * width for count in send_counts])
        places = as_bytes(arrived).split([count * width for count in receive_counts])
        self._swap("all_to_all", parts, places)
        return arrived

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        with landing(receives) as buffers:
            copy_own(self.rank, sends, buffers)
            self._wire.move("exchange", self._queues(sends), self._queues(buffers))

    def gather_objects(self, value: Any) -> list[Any]:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._gather("gather_objects", torch.tensor(len(data), device="cpu")).tolist()
        places = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        self._swap("gather_objects", [data] * self.size, places)
        return [pickle.loads(place.numpy().tobytes()) for place in places]

    def hosts(self) -> Self:
        """Itself: it is of hosts."""
        return self

    def peers(self, device: torch.device) -> Peers:
        """Symmetric memory of GPUs: this communicator carries only what is on the CPU."""
        return mapped_by(self._group, device)

    def abort(self) -> None:
        """Tell the other ranks that this one failed: they stop waiting for it."""
        self._wire.abort()

    def close(self) -> None:
        """Let go of the shared memory; what was sent can still be read.

        The end of the interpreter does it too. Ranks that wait for this one get an error.
        """
        self._release()

    def _gather(self, verb: str, tensor: torch.Tensor) -> torch.Tensor:
        data = as_bytes(tensor)
        gathered = tensor.new_empty((self.size, *tensor.shape))
        self._swap(verb, [data] * self.size, as_bytes(gathered).split([len(data)] * self.size))
        return gathered

    def _swap(
        self, verb: str, parts: Sequence[torch.Tensor], places: Sequence[torch.Tensor]
    ) -> None:
        """One message of bytes to, and one from, every rank."""
        places[self.rank].copy_(parts[self.rank])
        # Every rank starts with another peer: all sending to rank 0 first would make a queue.
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        outgoing = {peer: deque([parts[peer]]) for peer in peers}
        self._wire.move(verb, outgoing, {peer: deque([places[peer]]) for peer in peers})

    def _queues(self, messages: Iterable[Message]) -> wire.Queues:
        queues: wire.Queues = {}
        for peer, tensor in messages:
            if peer != self.rank:
                queues.setdefault(peer, deque()).append(as_bytes(tensor))
        return queues


class _Host(NamedTuple):
    """What a rank knows about where it runs."""

    machine: str
    writable: bool
    free: int  # bytes
    place: tuple[str, ...]


def usable(group: dist.ProcessGroup, timeout: float | None = None) -> bool:
    """Whether all ranks of the group can share memory, and should; collective, alike everywhere."""
    if dist.get_backend(group) != "gloo":
        return False
    with closing(TorchDistCommunicator(group, timeout)) as setup:
        hosts = setup.gather_objects(_this_host(setup.rank))
    obstacle = _obstacle(hosts, wire.wanted_bytes(setup.size))
    if obstacle:
        logger.info("no shared memory: %s", obstacle)
    return not obstacle


def _set_up(group: dist.ProcessGroup, timeout: float | None) -> wire.Wire:
    """Connect to the other ranks; collective."""
    if dist.get_backend(group) != "gloo":
        raise ConfigError(f"shared memory needs a gloo group, got {dist.get_backend(group)}")
    with closing(TorchDistCommunicator(group, timeout)) as setup:
        return _meet(setup, timeout_of(group) if timeout is None else timeout)


def _meet(setup: TorchDistCommunicator, patience: float) -> wire.Wire:
    told = setup.gather_objects((_this_host(setup.rank), segments.new_prefix()))
    hosts, prefix = [host for host, _ in told], told[0][1]
    obstacle = _obstacle(hosts, wire.control_bytes(setup.size))
    if obstacle:
        raise ConfigError(f"shared memory cannot be used: {obstacle}")
    with ExitStack() as undo:
        files = _join(setup, prefix, undo)
        files.limit = wire.largest_segment(setup.size, hosts[0].free)
        joined = wire.Wire(setup.rank, setup.size, patience, files)
        setup.gather_objects(None)  # nobody starts, or leaves, before all are on the roll
        undo.pop_all()
    return joined


def _join(setup: TorchDistCommunicator, prefix: str, undo: ExitStack) -> segments.Files:
    """Rank 0 makes the control file, then the others open it; an error on one is one on all."""
    size = wire.control_bytes(setup.size)
    for founder in (True, False):
        trouble = None
        if founder == (setup.rank == 0):
            try:
                made = segments.Files(prefix, size, founder=founder)
                files = undo.enter_context(closing(made))
            except OSError as error:
                trouble = f"rank {setup.rank}: {error}"
        troubles = [text for text in setup.gather_objects(trouble) if text]
        if troubles:
            raise CommunicationError(
                f"no control file of {size:,} bytes in {segments.FOLDER}: {'; '.join(troubles)}"
            )
    return files


def _this_host(rank: int) -> _Host:
    if rank == 0:  # what dead groups hold is as good as free
        segments.sweep()
    boot = _first_line("/proc/sys/kernel/random/boot_id")
    writable = os.access(segments.FOLDER, os.R_OK | os.W_OK)
    return _Host(
        machine=f"{platform.system()} {platform.machine()}",
        writable=writable,
        free=segments.free_bytes() if writable else 0,
        place=(platform.node(), boot, *_namespace()),
    )


def _namespace() -> tuple[str, ...]:
    """Containers of one host may have a /dev/shm and process numbers of their own."""
    try:
        return str(os.stat(segments.FOLDER).st_dev), os.readlink("/proc/self/ns/pid")
    except OSError:
        return ()


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.readline().strip()
    except OSError:
        return ""


def _obstacle(hosts: Sequence[_Host], wanted: int) -> str:
    """Why these ranks cannot share so many bytes of memory; empty if they can."""
    for rank, host in enumerate(hosts):
        if host.machine not in MACHINES:
            return f"rank {rank} runs on {host.machine}, not on {' or '.join(MACHINES)}"
        if not host.writable:
            return f"rank {rank} may not write to {segments.FOLDER}"
        if host.place != hosts[0].place:
            return f"rank {rank} is not in the host or container of rank 0"
    if hosts[0].free < wanted:
        return (
            f"{segments.FOLDER} has {hosts[0].free:,} bytes free, {len(hosts)} ranks want "
            f"{wanted:,}; containers get more by --shm-size"
        )
    return ""
