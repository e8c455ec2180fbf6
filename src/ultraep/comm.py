"""Communicator and Peers: messages between ranks, and memory that ranks share. Protocols.

Every rank of a group calls the same verbs in the same order, even with nothing to send. Both sides
know shapes and counts from the plan, so they are not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from ultraep.errors import UltraEPError
from ultraep.supported import TORCH

TORCH.check()  # here: whatever runs on ranks imports this module


class Message(NamedTuple):
    """A contiguous tensor to send to a peer, or to receive from it."""

    peer: int
    tensor: torch.Tensor


class Communicator(Protocol):
    """Messages between the ranks of a group. Errors are `CommunicationError` and name the peer."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def timeout(self) -> float:
        """Seconds after which a silent rank is an error."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return [size, ...] the tensors of all ranks, which have one shape."""

    def all_to_all(
        self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        """Send rows to all ranks, in rank order; return the rows from all ranks, in rank order."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive point to point, all at once; two ranks keep the order of messages."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the small picklable values of all ranks; for set-up and errors."""

    def peers(self, device: torch.device) -> Peers:
        """Return memory of a device that all ranks map; raises ConfigError if it is impossible."""

    def hosts(self) -> Communicator:
        """Return a communicator whose messages wait for no device; collective."""

    def check_alive(self) -> None:
        """Raise if a rank has died. Not collective; may take some seconds."""

    def part(self, size: int) -> Communicator:
        """Return a communicator of the block of `size` consecutive ranks with this one; collective.

        The blocks begin at rank 0, `size`, 2 * `size` and so on. Errors of the new communicator
        name the ranks of this one.
        """

    def close(self) -> None:
        """Free the resources of the communicator; the group itself stays."""


@dataclass(frozen=True, eq=False)
class Region:
    """Memory of the same size on every rank, which all ranks can read and write."""

    local: torch.Tensor  # [bytes] of this rank
    addresses: torch.Tensor  # [size] where the memory of every rank begins, in this process
    handle: object = None  # keeps it mapped
    _views: dict[Any, torch.Tensor] = field(default_factory=dict)

    def part(
        self, begin: int, end: int | None = None, dtype: torch.dtype = torch.int32, width: int = 0
    ) -> torch.Tensor:
        """Return bytes of this rank as a vector, or as rows of this width; made once."""
        key = begin, end, dtype, width
        view = self._views.get(key)
        if view is None:
            if width:
                row = width * dtype.itemsize
                end = begin + (self.local.numel() - begin) // row * row
            view = self.local[begin:end].view(dtype)
            view = self._views[key] = view.view(-1, width) if width else view
        return view


class Peers(Protocol):
    """Ranks that map each other's memory. All allocate the same regions, in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def allocate(self, name: str, nbytes: int) -> Region:
        """Return zeros, aligned to 64 bytes; raises on all ranks if their sizes differ."""

    def close(self) -> None:
        """Free the memory."""


class Gathers(Protocol):
    """Ranks that can gather small values, such as a communicator."""

    def gather_objects(self, value: Any) -> list[Any]: ...


def raise_together(ranks: Gathers, error: UltraEPError | None) -> None:
    """Raise on all ranks if a rank passes an error; collective.

    All ranks raise the same: the class of the first error, and the texts of all errors with their
    ranks.
    """
    gathered = ranks.gather_objects(None if error is None else (type(error), str(error)))
    failures = {rank: failure for rank, failure in enumerate(gathered) if failure is not None}
    if failures:
        kind = next(iter(failures.values()))[0]
        listed = "; ".join(f"rank {rank}: {text}" for rank, (_, text) in failures.items())
        raise kind(listed, ranks=failures) from error


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to a device, without waiting for a GPU."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
