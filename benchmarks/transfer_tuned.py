"""Launches of stages 3 and 8 with other tiles and chunks than those that the runtime ships.

Import it late: Triton reads its settings when kernels are imported.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from transfer_scale import PullTile, Tile

from ultraep.backends.triton import reducer, streamer
from ultraep.backends.triton.board import MAX_CHUNKS, STAGES
from ultraep.backends.triton.kernels import gradients, stream
from ultraep.backends.triton.streamer import Streamer
from ultraep.comm import Region

SHIPPED = Tile(streamer.WORDS, streamer.WARPS)
SHIPPED_PULL = PullTile(reducer.NUMBERS, reducer.WARPS, reducer.AHEAD)


class TunedStreamer(Streamer):
    """A streamer with its own tile, and with its own number of chunks of an expert.

    chunks: None, as the runtime chooses them.
    """

    def __init__(
        self, *args: Any, chunks: int | None = None, tile: Tile | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._wanted, self._tile = chunks, tile or SHIPPED

    def chunks_of_length(self, nbytes: int) -> torch.Tensor:
        if self._wanted is None:
            return super().chunks_of_length(nbytes)
        size, device = self.topology.ranks + 1, self.board.peers.device
        return torch.full((size,), self._wanted, dtype=torch.int32, device=device)

    def launch(
        self,
        homes: torch.Tensor,
        parts: torch.Tensor,
        schedules: torch.Tensor,
        row_bytes: int,
        rows: Region,
        buffer: int,
        first_rank: int,
        ranks: int,
    ) -> None:
        board, topology = self.board, self.topology
        stream.stream[(self.programs * ranks,)](
            board.region.addresses,
            rows.addresses,
            homes,
            parts,
            schedules,
            first_rank,
            topology.ranks,
            topology.slots,
            self.copies,
            row_bytes,
            len(parts),
            self.size,
            board.channel_of_buffer(buffer),
            board.released(buffer),
            board.arrived(buffer),
            MAX_CHUNKS,
            STAGES.index("weights"),
            board.patience,
            W=self._tile.words,
            PROGRAMS=self.programs,
            num_warps=self._tile.warps,
        )


def pull(
    gradients_HP: torch.Tensor,
    rows: Region,
    made: torch.Tensor,
    streamer: Streamer,
    *,
    tile: PullTile,
    programs: int,
    zero: bool,
) -> None:
    """As `reducer.pull`, with this tile."""
    gradients.pull[(programs,)](
        gradients_HP,
        rows.addresses,
        made,
        streamer.topology.slots,
        streamer.copies,
        len(gradients_HP),
        gradients_HP.shape[1],
        gradients_HP.stride(0),
        ACCUMULATOR=tl.float32,
        ZERO=zero,
        AHEAD=tile.ahead,
        ALIGNED=gradients_HP.shape[1] * gradients_HP.element_size() % 16 == 0,
        W=tile.numbers,
        PROGRAMS=programs,
        num_warps=tile.warps,
    )
