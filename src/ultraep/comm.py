"""Communicator and Peers: how ranks speak, and memory that they share. Protocols, no code.

Every rank of a group calls the same verbs in the same order, also with nothing to say. Shapes and
counts are known on both sides beforehand, from the plan: nothing is negotiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch


class Message(NamedTuple):
    """A contiguous tensor to send to a peer, or to be filled by what the peer sends."""

    peer: int
    tensor: torch.Tensor


class Communicator(Protocol):
    """What a stage needs of the group. Errors are `CommunicationError` and name the peer."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def timeout(self) -> float:
        """Seconds after which a silent rank is an error."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[size, ...] the tensors of all ranks, which have one shape."""
        ...

    def all_to_all(
        self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        """Rows from all ranks, in their order; `rows` are for rank 0, then rank 1, and so on."""
        ...

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Point to point, all at once; messages between two ranks keep their order."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """The small picklable values of all ranks; for set-up and errors, not for the hot path."""
        ...

    def peers(self, device: torch.device) -> Peers:
        """Memory of a device that all ranks map; a `ConfigError` says why there is none."""
        ...

    def hosts(self) -> Communicator | None:
        """One whose messages wait for no device; collective. None: nobody can wait."""
        ...

    def close(self) -> None:
        """Give back what the communicator took. The group itself stays."""
        ...


@dataclass(frozen=True, eq=False)
class Region:
    """Memory that every rank has alike, and that all ranks can read and write."""

    local: torch.Tensor  # [bytes] of this rank
    addresses: torch.Tensor  # [size] where that of every rank begins, as seen from this one
    handle: object = None  # what keeps it mapped


class Peers(Protocol):
    """Ranks that reach each other's memory. All allocate the same, in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def allocate(self, name: str, nbytes: int) -> Region:
        """Zeros, aligned to 64 bytes; an error on all ranks if they want different sizes."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """The small picklable values of all ranks; for set-up and errors."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on that device; nobody waits for a GPU."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
