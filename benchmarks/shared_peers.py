"""Mapped memory without one GPU per rank: processes of a gloo group, and ranks of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ultraep.comm import Region
from ultraep_tools.soak import shared_peers


class SharedPeers(shared_peers.SharedPeers):
    """One rank of a gloo group whose processes share files."""

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
