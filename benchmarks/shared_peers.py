"""Mapped memory without one GPU per rank: processes of a gloo group, and ranks of one process."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ultraep.comm import Region
from ultraep.runtime.mapped.peers import check_same


class FilePeers:
    """One rank of a group of processes that share files, for kernels in Triton's interpreter.

    comm: a communicator, or anything else with its `rank`, `size` and `gather_objects`.
    """

    def __init__(self, comm: Any) -> None:
        self._comm, self.device = comm, torch.device("cpu")
        self.rank, self.size = comm.rank, comm.size

    def allocate(self, name: str, nbytes: int) -> Region:
        check_same(self._comm.gather_objects((name, nbytes)))
        folder, nbytes = "/dev/shm" if os.path.isdir("/dev/shm") else None, max(64, nbytes)
        number, path = tempfile.mkstemp(prefix=f"ultraep-peers-{os.getpid()}-", dir=folder)
        try:
            os.ftruncate(number, nbytes)
            os.close(number)
            pieces = [
                torch.from_file(other, shared=True, size=nbytes, dtype=torch.uint8)
                for other in self._comm.gather_objects(path)
            ]
            self._comm.gather_objects(None)  # all ranks have opened the files
        finally:
            os.unlink(path)
        addresses = torch.tensor([piece.data_ptr() for piece in pieces])
        return Region(pieces[self.rank], addresses, pieces)

    def close(self) -> None:
        """Do nothing: the last tensor frees the memory."""


class SharedPeers(FilePeers):
    """`FilePeers` of a gloo group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.rank, self.size = group, group.rank(), group.size()
        super().__init__(self)

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


class LocalPeers:
    """The memory of all ranks of one process on one device, for kernels that run alone."""

    def __init__(self, size: int, device: torch.device | str) -> None:
        self.size, self.device = size, torch.empty(0, device=device).device
        self._regions: dict[str, tuple[list[torch.Tensor], torch.Tensor]] = {}

    def of(self, rank: int) -> LocalPeer:
        """Return the peers as seen from one rank."""
        return LocalPeer(self, rank)

    def allocate(self, rank: int, name: str, nbytes: int) -> Region:
        """Return the region of this name; the first rank allocates it for all."""
        if name not in self._regions:
            zeros = partial(torch.zeros, nbytes, dtype=torch.uint8, device=self.device)
            pieces = [zeros() for _ in range(self.size)]
            addresses = torch.tensor([piece.data_ptr() for piece in pieces], device=self.device)
            self._regions[name] = pieces, addresses
        pieces, addresses = self._regions[name]
        return Region(pieces[rank], addresses, pieces)


class LocalPeer:
    """One rank of `LocalPeers`."""

    def __init__(self, group: LocalPeers, rank: int) -> None:
        self._group, self.rank = group, rank
        self.size, self.device = group.size, group.device

    def allocate(self, name: str, nbytes: int) -> Region:
        return self._group.allocate(self.rank, name, nbytes)

    def close(self) -> None:
        """The group owns the memory."""
