"""Communicator: the few verbs by which ranks speak. A protocol, no code.

Every rank of a group calls the same verbs in the same order, also with nothing to say. Shapes and
counts are known on both sides beforehand, from the plan: nothing is negotiated.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def close(self) -> None:
        """Give back what the communicator took. The group itself stays."""
        ...
