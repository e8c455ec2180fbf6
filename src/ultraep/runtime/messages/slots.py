"""SlotPool: spare slots and gradient rows, allocated once and lent to all layers.

A buffer is lent while a microbatch fills and uses it, in forward and again in backward. A request
while all buffers are lent is an error that names the borrowers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ultraep.bundle import Layout
from ultraep.replicas import no_free_slots


@dataclass(eq=False)
class Buffer:
    """The spare slots of this rank for one bundle layout."""

    rows: torch.Tensor  # [slots, bytes]
    holds: object = None  # the replicas that filled it last
    borrower: str | None = None


class SlotPool:
    """Lends buffers of spare slots; allocates at most `buffers` for each layout and device."""

    def __init__(self, slots: int, buffers: int) -> None:
        self._slots, self._max_buffers = slots, buffers
        self._buffers: dict[tuple[Layout, torch.device], list[Buffer]] = {}
        self._rows: dict[tuple[str, torch.device], torch.Tensor] = {}

    @contextmanager
    def lend(
        self,
        layout: Layout,
        device: torch.device,
        borrower: str,
        last: Buffer | None = None,
    ) -> Iterator[Buffer]:
        """Lend a free buffer of this layout until the end of the `with` block.

        Prefers the `last` buffer of the borrower; allocates one if all are lent.
        """
        buffers = self._buffers.setdefault((layout, device), [])
        free = [buffer for buffer in buffers if buffer.borrower is None]
        if not free and len(buffers) < self._max_buffers:
            free = [Buffer(_zeros(self._slots, layout.nbytes, device))]
            buffers += free
        if not free:
            raise no_free_slots(borrower, [b.borrower for b in buffers])
        buffer = last if last is not None and last in free else free[0]
        buffer.borrower = borrower
        try:
            yield buffer
        finally:
            buffer.borrower = None

    def gradient_rows(
        self, use: str, count: int, nbytes: int, device: torch.device
    ) -> torch.Tensor:
        """Return `[count, nbytes]` of the memory for this use, which only grows."""
        flat = self._rows.get((use, device))
        if flat is None or flat.numel() < count * nbytes:
            flat = self._rows[use, device] = _zeros(count, nbytes, device).view(-1)
        return flat[: count * nbytes].view(count, nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        slots = sum(b.rows.numel() for buffers in self._buffers.values() for b in buffers)
        return slots + sum(rows.numel() for rows in self._rows.values())


@torch.inference_mode(False)
def _zeros(rows: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory that both inference mode and training can write."""
    return torch.zeros(rows, nbytes, dtype=torch.uint8, device=device)
