"""The communicator of CPU ranks on one host: messages through /dev/shm instead of sockets.

Why not gloo's sockets: with them a layer takes 4 to 9 % longer (benchmarks/bench_layer.py), and
gloo never names a rank that died. The process group is used once, to set up. wire.py moves the
messages, segments.py owns the files.
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
from contextlib import ExitStack, closing, suppress
from pathlib import Path
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
    contiguous,
    copy_own,
    timeout_of,
)

MACHINES = ("Linux x86_64", "Linux aarch64")  # aligned words are stored whole

logger = logging.getLogger(__name__)


class SharedMemoryCommunicator:
    """One rank of a gloo group on one host, for one thread. Creating one is collective.

    After an error the communicator stays broken, here and soon on all other ranks.
    timeout: seconds to wait without progress; None: the timeout of the group. A rank that died is
        noticed at once.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float | None = None) -> None:
        self._group, self._wire = group, _set_up(group, timeout)
        self.rank, self.size, self.timeout = self._wire.rank, self._wire.size, self._wire.timeout
        # Also at exit. The wire does not refer to the communicator, so it can be collected.
        self._release = weakref.finalize(self, self._wire.close)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._gather("all_gather", tensor)

    def all_to_all(
        self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        width = math.prod(rows.shape[1:]) * rows.element_size()
        arrived = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        parts = as_bytes(rows).split([count * width for count in send_counts])
        targets = as_bytes(arrived).split([count * width for count in receive_counts])
        self._swap("all_to_all", parts, targets)
        return arrived

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        with contiguous(receives) as buffers:
            copy_own(self.rank, sends, buffers)
            self._wire.move("exchange", self._queues(sends), self._queues(buffers))

    def gather_objects(self, value: Any) -> list[Any]:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._gather("gather_objects", torch.tensor(len(data), device="cpu")).tolist()
        targets = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        self._swap("gather_objects", [data] * self.size, targets)
        return [pickle.loads(target.numpy().tobytes()) for target in targets]

    def hosts(self) -> Self:
        """Return itself: its messages wait for no device."""
        return self

    def peers(self, device: torch.device) -> Peers:
        """Return symmetric memory of GPUs; this communicator sends only CPU tensors."""
        return mapped_by(self._group, device)

    def close(self) -> None:
        """Release the shared memory; other ranks can still read what was sent.

        Also happens at the end of the interpreter. Ranks that wait for this one get an error.
        """
        self._release()

    def _gather(self, verb: str, tensor: torch.Tensor) -> torch.Tensor:
        data = as_bytes(tensor)
        gathered = tensor.new_empty((self.size, *tensor.shape))
        self._swap(verb, [data] * self.size, as_bytes(gathered).split([len(data)] * self.size))
        return gathered

    def _swap(
        self, verb: str, parts: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> None:
        """Send one message of bytes to every rank, and receive one."""
        targets[self.rank].copy_(parts[self.rank])
        # Every rank starts with another peer, so that ranks do not queue for rank 0.
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        outgoing = {peer: deque([parts[peer]]) for peer in peers}
        self._wire.move(verb, outgoing, {peer: deque([targets[peer]]) for peer in peers})

    def _queues(self, messages: Iterable[Message]) -> wire.Queues:
        queues: wire.Queues = {}
        for peer, tensor in messages:
            if peer != self.rank:
                queues.setdefault(peer, deque()).append(as_bytes(tensor))
        return queues


class _Host(NamedTuple):
    """Where a rank runs."""

    machine: str
    writable: bool
    free: int  # bytes
    place: tuple[str, ...]  # equal for ranks that share memory and pids


def usable(group: dist.ProcessGroup, timeout: float | None = None) -> bool:
    """Whether all ranks of the group can share enough memory; collective."""
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
    timeout = timeout_of(group) if timeout is None else timeout
    with closing(TorchDistCommunicator(group, timeout)) as setup, ExitStack() as undo:
        gathered = setup.gather_objects((_this_host(setup.rank), segments.new_prefix()))
        hosts, prefix = [host for host, _ in gathered], gathered[0][1]
        obstacle = _obstacle(hosts, wire.control_bytes(setup.size))
        if obstacle:
            raise ConfigError(f"shared memory cannot be used: {obstacle}")
        files = _open_files(setup, prefix, undo)
        files.limit = wire.largest_segment(setup.size, hosts[0].free)
        joined = wire.Wire(setup.rank, setup.size, timeout, files)
        setup.gather_objects(None)  # no rank starts or leaves before all have joined
        undo.pop_all()
    return joined


def _open_files(setup: TorchDistCommunicator, prefix: str, undo: ExitStack) -> segments.Files:
    """Rank 0 creates the control file, then the others open it; an error is raised on all ranks."""
    size = wire.control_bytes(setup.size)
    for founder in (True, False):
        failure = None
        if founder == (setup.rank == 0):
            try:
                opened = segments.Files(prefix, size, founder=founder)
                files = undo.enter_context(closing(opened))
            except OSError as error:
                failure = f"rank {setup.rank}: {error}"
        failures = [text for text in setup.gather_objects(failure) if text]
        if failures:
            raise CommunicationError(
                f"no control file of {size:,} bytes in {segments.FOLDER}: {'; '.join(failures)}"
            )
    return files


def _this_host(rank: int) -> _Host:
    if rank == 0:  # memory of dead groups counts as free
        segments.sweep()
    writable = os.access(segments.FOLDER, os.R_OK | os.W_OK)
    place = [platform.node()]
    with suppress(OSError):  # containers of one host may have separate /dev/shm and pids
        place.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        place.append(str(os.stat(segments.FOLDER).st_dev))
        place.append(os.readlink("/proc/self/ns/pid"))
    return _Host(
        machine=f"{platform.system()} {platform.machine()}",
        writable=writable,
        free=segments.free_bytes() if writable else 0,
        place=tuple(place),
    )


def _obstacle(hosts: Sequence[_Host], wanted: int) -> str:
    """Return why these ranks cannot share this much memory; empty if they can."""
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
            f"{wanted:,}; start containers with a larger --shm-size"
        )
    return ""
