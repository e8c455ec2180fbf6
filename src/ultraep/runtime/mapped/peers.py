"""Memory that ranks map: of GPUs of a group, or of many ranks of one process on one device.

group = LocalPeers(8)
planes = [... group.of(rank) ... for rank in range(8)]
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from ultraep.comm import Peers, Region
from ultraep.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LocalPeers:
    """The memory of all ranks of one process."""

    def __init__(self, size: int, device: torch.device | str | None = None) -> None:
        if size < 1:
            raise ConfigError(f"a group needs at least one rank, got {size}")
        self.size = size
        self.device = torch.empty(0, device=device or "cuda").device
        self._pieces: dict[str, list[torch.Tensor]] = {}
        self._tables: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()

    def of(self, rank: int) -> LocalPeer:
        """What one rank sees of it."""
        if not 0 <= rank < self.size:
            raise ConfigError(f"rank must lie in 0..{self.size - 1}, got {rank}")
        return LocalPeer(self, rank)

    def allocate(self, rank: int, name: str, nbytes: int) -> Region:
        """The first rank that asks gets it for all."""
        with self._lock:
            if name not in self._pieces:
                pieces = [
                    torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
                    for _ in range(self.size)
                ]
                self._pieces[name] = pieces
                self._tables[name] = torch.tensor(
                    [piece.data_ptr() for piece in pieces], device=self.device
                )
        pieces = self._pieces[name]
        if pieces[0].numel() != nbytes:
            raise ConfigError(
                f"rank {rank} wants {nbytes} bytes for {name!r}, others {pieces[0].numel()}"
            )
        return Region(pieces[rank], self._tables[name], pieces)


class LocalPeer:
    """One rank of `LocalPeers`."""

    def __init__(self, group: LocalPeers, rank: int) -> None:
        self._group, self.rank = group, rank
        self.size, self.device = group.size, group.device

    def allocate(self, name: str, nbytes: int) -> Region:
        return self._group.allocate(self.rank, name, nbytes)

    def gather_objects(self, value: Any) -> list[Any]:
        """Ranks of one process are made one after the other; there is nobody to ask."""
        return [value]

    def close(self) -> None:
        """The memory lives as long as the group."""


class NamedPeers:
    """Peers whose regions have names of their own."""

    def __init__(self, peers: Peers, name: str) -> None:
        self._peers, self._name = peers, name
        self.rank, self.size, self.device = peers.rank, peers.size, peers.device

    def allocate(self, name: str, nbytes: int) -> Region:
        return self._peers.allocate(f"{self._name}: {name}", nbytes)

    def gather_objects(self, value: Any) -> list[Any]:
        return self._peers.gather_objects(value)

    def close(self) -> None:
        """Nothing of its own is taken."""


def mapped_by(group: ProcessGroup, device: torch.device) -> Peers:
    """Return memory of the ranks' GPUs that they all map, whatever backend the group has."""
    if device.type != "cuda":
        raise ConfigError(f"tokens are on {device}, and only GPUs map each other's memory")
    if group.size() == 1:
        return LocalPeers(1, device).of(0)
    from ultraep.runtime.mapped.symmetric import SymmetricPeers

    return SymmetricPeers(group, device)


class SilentCommunicator:
    """One of several ranks that one thread drives, one after the other: nobody can wait."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.timeout = rank, size, 30.0

    def gather_objects(self, value: Any) -> list[Any]:
        """As if all had the same."""
        return [value] * self.size

    def close(self) -> None:
        """Nothing was taken."""

    def _refuse(self, *_: Any) -> Any:
        raise ConfigError(f"{self.size} ranks of one process have no group to speak over")

    all_gather = all_to_all = exchange = peers = _refuse

    def hosts(self) -> None:
        """Nobody."""
