"""Memory that processes without GPUs share, for kernels in Triton's interpreter."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch

from ultraep.comm import Region
from ultraep.runtime.mapped.peers import check_same


class SharedPeers:
    """One rank of a group of processes that share files.

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
