"""Mapped memory between processes without a GPU: files in /dev/shm replace symmetric memory.

Kernels run in Triton's interpreter, one process per rank, and wait for each other.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist

from ultraep.comm import Region
from ultraep.errors import ConfigError

DIRECTORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


class SharedPeers:
    """One rank of a gloo group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()
        self.device = torch.device("cpu")

    def allocate(self, name: str, nbytes: int) -> Region:
        requests = self.gather_objects((name, nbytes))
        if len(set(requests)) > 1:
            raise ConfigError(f"ranks request different memory: {requests}")
        nbytes = max(64, nbytes)
        number, path = tempfile.mkstemp(prefix="ultraep-peers-", dir=DIRECTORY)
        os.ftruncate(number, nbytes)
        os.close(number)
        paths = self.gather_objects(path)
        pieces = [torch.from_file(p, shared=True, size=nbytes, dtype=torch.uint8) for p in paths]
        dist.barrier(self._group)
        os.unlink(path)
        addresses = torch.tensor([piece.data_ptr() for piece in pieces])
        return Region(pieces[self.rank], addresses, pieces)

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def close(self) -> None:
        """Do nothing: the last tensor frees the memory."""
