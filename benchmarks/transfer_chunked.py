"""A streamer whose experts are cut into as many chunks as a benchmark likes.

Import it late: Triton reads its settings when kernels are imported.
"""

from __future__ import annotations

from typing import Any

import torch

from ultraep.backends.triton.streamer import Streamer


class ChunkedStreamer(Streamer):
    """chunks: of every chain; None: as the runtime chooses them."""

    def __init__(self, *args: Any, chunks: int | None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._wanted = chunks

    def chunks_of_length(self, nbytes: int) -> torch.Tensor:
        if self._wanted is None:
            return super().chunks_of_length(nbytes)
        size, device = self.topology.ranks + 1, self.board.peers.device
        return torch.full((size,), self._wanted, dtype=torch.int32, device=device)
