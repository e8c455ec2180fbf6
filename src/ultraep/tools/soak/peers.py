"""Mapped memory between processes without a GPU: files in /dev/shm replace symmetric memory.

Kernels run in Triton's interpreter, one process per rank, and wait for each other.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any, Protocol

import torch

from ultraep.comm import Region
from ultraep.errors import ConfigError

DIRECTORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


class Gathering(Protocol):
    """The part of a `Communicator` that is needed here."""

    rank: int
    size: int

    def gather_objects(self, value: Any) -> list[Any]: ...


class SharedPeers:
    """One rank of a group whose ranks map each other's memory."""

    def __init__(self, comm: Any) -> None:
        self._comm: Gathering = comm
        self.rank, self.size = self._comm.rank, self._comm.size
        self.device = torch.device("cpu")

    def allocate(self, name: str, nbytes: int) -> Region:
        requests = self._comm.gather_objects((name, nbytes))
        if len(set(requests)) > 1:
            raise ConfigError(f"ranks request different memory: {requests}")
        nbytes = max(64, nbytes)
        number, path = tempfile.mkstemp(prefix=f"ultraep-peers-{os.getpid()}-", dir=DIRECTORY)
        try:
            os.ftruncate(number, nbytes)
            os.close(number)
            paths = self._comm.gather_objects(path)
            pieces = [
                torch.from_file(p, shared=True, size=nbytes, dtype=torch.uint8) for p in paths
            ]
            self._comm.gather_objects(None)  # all ranks have opened the files
        finally:
            os.unlink(path)
        addresses = torch.tensor([piece.data_ptr() for piece in pieces])
        return Region(pieces[self.rank], addresses, pieces)

    def close(self) -> None:
        """Do nothing: the last tensor frees the memory."""
