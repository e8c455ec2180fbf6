"""SlotPool: spare slots and gradient rows, allocated once and lent to all layers.

A buffer is lent while a microbatch fills and uses it, in forward and again in backward. Whoever
asks while all are lent gets an error that names the borrowers: a live slot is never overwritten.

The pool also remembers what every slot of every rank holds. All ranks see the same plans in the
same order, so all know it alike, and what is there already is not sent again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ultraep.bundle import Layout
from ultraep.errors import ConfigError, SlotError
from ultraep.runtime.backward import LentInBackward

Content = tuple[int, int, int]  # layer, expert, version of the home's weights
Contents = dict[tuple[int, int], Content]  # by host rank and slot


@dataclass(eq=False)
class Buffer:
    """The spare slots of this rank for one bundle layout."""

    rows: torch.Tensor  # [slots, bytes]
    held: Contents = field(default_factory=dict)
    borrower: str | None = None

    def holds(self, wanted: Contents) -> int:
        """How much of it is there."""
        return sum(self.held.get(place) == content for place, content in wanted.items())


class SlotPool:
    """Lends buffers of spare slots; makes at most `buffers` of each layout and device."""

    def __init__(self, slots: int, buffers: int) -> None:
        if buffers < 1:
            raise ConfigError(f"a pool needs at least one buffer, got {buffers}")
        self._slots, self._most = slots, buffers
        self.in_backward = LentInBackward()
        self._buffers: dict[tuple[Layout, torch.device], list[Buffer]] = {}
        self._rows: dict[tuple[str, torch.device], torch.Tensor] = {}

    @contextmanager
    def lend(
        self,
        layout: Layout,
        device: torch.device,
        borrower: str,
        wanted: Contents | None = None,
        before: Buffer | None = None,
    ) -> Iterator[Buffer]:
        """A free buffer of this layout until the end of the `with` block.

        wanted: what is to be in it; a buffer that holds some of that is preferred, then a new one,
        then the one that was lent longest ago.   before: the one that is preferred to all others.
        """
        wanted = wanted or {}
        buffers = self._buffers.setdefault((layout, device), [])
        free = [buffer for buffer in buffers if buffer.borrower is None]
        buffer = max(free, key=lambda b: (b is before, b.holds(wanted)), default=None)
        would_lose = wanted and buffer not in (None, before) and not buffer.holds(wanted)
        if (buffer is None or would_lose) and len(buffers) < self._most:
            buffer = Buffer(_zeros((self._slots, layout.nbytes), torch.uint8, device))
            buffers.append(buffer)
        if buffer is None:
            raise SlotError(
                f"{borrower} needs spare slots, all {self._most} are lent to "
                f"{', '.join(str(b.borrower) for b in buffers)}: "
                f"let it finish, or give the balancer more with in_flight="
            )
        buffers.sort(key=lambda b: b is buffer)
        buffer.borrower = borrower
        try:
            yield buffer
        finally:
            buffer.borrower = None

    def gradient_rows(
        self, use: str, count: int, nbytes: int, device: torch.device
    ) -> torch.Tensor:
        """`[count, nbytes]` of memory that is kept for this use, and grows only."""
        flat = self._rows.get((use, device))
        if flat is None or flat.numel() < count * nbytes:
            flat = self._rows[use, device] = _zeros((count * nbytes,), torch.uint8, device)
        return flat[: count * nbytes].view(count, nbytes)

    @property
    def nbytes(self) -> int:
        """Memory taken so far."""
        lent = sum(b.rows.numel() for buffers in self._buffers.values() for b in buffers)
        return lent + sum(rows.numel() for rows in self._rows.values())


@torch.inference_mode(False)
def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that serves inference and training alike, whichever comes first."""
    return torch.zeros(shape, dtype=dtype, device=device)
