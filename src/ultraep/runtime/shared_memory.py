"""The communicator of CPU ranks on one host: messages through /dev/shm instead of sockets.

Why not gloo's sockets: with them a layer takes 4 to 9 % longer (benchmarks/bench_layer.py), and
gloo never names a rank that died. The process group is used once, to set up. wire.py moves the
messages, segments.py owns the file.
"""

from __future__ import annotations

import logging
import os
import platform
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import NamedTuple, Self

import torch
import torch.distributed as dist

from ultraep.comm import Communicator
from ultraep.errors import CommunicationError, ConfigError
from ultraep.runtime import segments, wire
from ultraep.runtime.flight import watch
from ultraep.runtime.hosts import Host, this_host
from ultraep.runtime.torch_dist import (
    BytesCommunicator,
    Connect,
    Pieces,
    TorchDistCommunicator,
    timeout_of,
)

MACHINES = ("Linux x86_64", "Linux aarch64")  # aligned words are stored whole

logger = logging.getLogger(__name__)


class SharedMemoryCommunicator(BytesCommunicator):
    """One rank of a gloo group on one host, for one thread.

    After an error the communicator stays broken, here and soon on all other ranks. A rank that died
    is noticed at once.
    """

    def __init__(
        self, group: dist.ProcessGroup, joined: wire.Wire, connect: Connect | None = None
    ) -> None:
        self._group, self._wire, self._connect = group, joined, connect
        self.rank, self.size, self.timeout = joined.rank, joined.size, joined.timeout
        self.first_rank = joined.first_rank
        # Also at exit. The wire does not refer to the communicator, so it can be collected.
        self._release = weakref.finalize(self, self._wire.close)
        watch(joined.has_failed)

    def hosts(self) -> Self:
        """Return itself: its messages wait for no device."""
        return self

    def part(self, size: int) -> Communicator:
        part = super().part(size)
        if isinstance(part, SharedMemoryCommunicator):
            self._wire.link(part._wire)
        return part

    def give_up(self, cause: int) -> None:
        self._wire.give_up(cause)

    def close(self) -> None:
        """Release the shared memory; other ranks can still read what was sent.

        Also happens at the end of the interpreter. Ranks that wait for this one get an error.
        """
        self._release()

    def _all_gather(self, verb: str, data: torch.Tensor, gathered: torch.Tensor) -> None:
        self._swap(verb, [data] * self.size, gathered.split([len(data)] * self.size))

    def _all_to_all(
        self, data: torch.Tensor, sent: list[int], arrived: torch.Tensor, received: list[int]
    ) -> None:
        self._swap("all_to_all", data.split(sent), arrived.split(received))

    def _exchange(self, sends: Pieces, receives: Pieces) -> None:
        self._move("exchange", _queues(sends), _queues(receives))

    def _swap(
        self, verb: str, parts: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> None:
        """Send one message to every rank, and receive one."""
        targets[self.rank].copy_(parts[self.rank])
        # Every rank starts with another peer, so that ranks do not queue for rank 0.
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        outgoing = {peer: deque([parts[peer]]) for peer in peers}
        self._move(verb, outgoing, {peer: deque([targets[peer]]) for peer in peers})

    def _move(self, verb: str, outgoing: wire.Queues, incoming: wire.Queues) -> None:
        try:
            self._wire.move(verb, outgoing, incoming)
        except CommunicationError as error:
            self._pass_on(error.ranks)
            raise


def _queues(pieces: Pieces) -> wire.Queues:
    queues: wire.Queues = {}
    for peer, data in pieces:
        queues.setdefault(peer, deque()).append(data)
    return queues


class _Memory(NamedTuple):
    """The shared memory that a rank sees."""

    machine: str
    writable: bool
    free: int  # bytes
    host: Host


def connect_shared(
    group: dist.ProcessGroup,
    timeout: float | None,
    connect: Connect | None = None,
    *,
    required: bool,
    first_rank: int = 0,
) -> SharedMemoryCommunicator | None:
    """Connect all ranks, or return None if they cannot share enough memory; collective.

    required: with little memory, send small pieces; raise ConfigError if that is impossible, too.
    """
    if dist.get_backend(group) != "gloo":
        if required:
            raise ConfigError(f"shared memory needs a gloo group, got {dist.get_backend(group)}")
        return None
    timeout = timeout_of(group) if timeout is None else timeout
    with ExitStack() as setting_up, ExitStack() as undo:
        setup = TorchDistCommunicator(group, timeout, first_rank=first_rank)
        setting_up.callback(setup.close)
        gathered = setup.gather_objects((_this_memory(setup.rank), segments.new_prefix()))
        hosts, prefix = [host for host, _ in gathered], gathered[0][1]
        least = wire.control_bytes(setup.size) if required else wire.wanted_bytes(setup.size)
        obstacle = _obstacle(hosts, least)
        if obstacle and required:
            raise ConfigError(f"shared memory cannot be used: {obstacle}")
        if obstacle:
            logger.info("no shared memory: %s", obstacle)
            return None
        limit = wire.largest_segment(setup.size, hosts[0].free)
        file = _open_file(setup, prefix, limit, undo)
        joined = wire.Wire(setup.rank, timeout, file, setup.names, first_rank)
        setup.gather_objects(None)  # no rank starts or leaves before all have joined
        undo.pop_all()
    return SharedMemoryCommunicator(group, joined, connect)


def _open_file(
    setup: TorchDistCommunicator, prefix: str, limit: int, undo: ExitStack
) -> segments.SharedFile:
    """Rank 0 creates the file, then the others open it; an error is raised on all ranks."""
    size = wire.control_bytes(setup.size)
    for founder in (True, False):
        failure = None
        if founder == (setup.rank == 0):
            try:
                opened = segments.SharedFile(prefix, size, limit, founder=founder)
                file = undo.enter_context(closing(opened))
            except OSError as error:
                failure = str(error)
        failures = {rank: text for rank, text in enumerate(setup.gather_objects(failure)) if text}
        if failures:
            listed = "; ".join(f"{setup.names[rank]}: {text}" for rank, text in failures.items())
            raise CommunicationError(
                f"cannot create a control file of {size:,} bytes in {segments.FOLDER}: {listed}",
                ranks=[setup.first_rank + rank for rank in failures],
            )
    file.remove_name()
    return file


def _this_memory(rank: int) -> _Memory:
    if rank == 0:  # memory of dead groups counts as free
        segments.sweep()
    writable = os.access(segments.FOLDER, os.R_OK | os.W_OK)
    return _Memory(
        machine=f"{platform.system()} {platform.machine()}",
        writable=writable,
        free=segments.free_bytes() if writable else 0,
        host=this_host(),
    )


def _obstacle(hosts: Sequence[_Memory], needed: int) -> str:
    """Return why these ranks cannot share this much memory; empty if they can."""
    for rank, host in enumerate(hosts):
        if host.machine not in MACHINES:
            return f"rank {rank} runs on {host.machine}, not on {' or '.join(MACHINES)}"
        if not host.writable:
            return f"rank {rank} may not write to {segments.FOLDER}"
        if host.host != hosts[0].host:
            return f"rank {rank} is not in the host or container of rank 0"
    if hosts[0].free < needed:
        return (
            f"{segments.FOLDER} has {hosts[0].free:,} bytes free, {len(hosts)} ranks need "
            f"{needed:,}; start containers with a larger --shm-size"
        )
    return ""
