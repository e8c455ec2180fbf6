"""Buffers and launches of stage 1 on the GPU: ids in, loads out.

Shapes: N rows, E experts.
"""

from __future__ import annotations

import torch

from ultraep.backends.triton.kernels import count
from ultraep.backends.triton.launch import cdiv, power_of_2, quick

ROWS, TOKENS = 512, 64  # of a tile of ids, of a tile of a map


class Counter:
    """Counts the rows of every expert, up to `rows` rows at a time; allocated once.

    `totals`: [E + 1] rows of every expert, then those that have none.
    `offsets`: rows of every expert in earlier tiles.   `unknown`: ids out of range, ever.
    """

    def __init__(self, experts: int, rows: int, device: torch.device) -> None:
        self.experts, self.rows = experts, rows
        tiles = cdiv(max(rows, 1), TOKENS)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.offsets, self.totals = numbers(tiles, experts + 1), numbers(experts + 1)
        self.unknown = numbers(1)

    def count(self, ids: torch.Tensor) -> None:
        """Count ids of any shape and integer type; -1 is padding."""
        tiles = cdiv(ids.numel(), ROWS)
        if tiles:
            quick(count.tile_counts)[(tiles,)](
                ids,
                self.offsets,
                self.unknown,
                ids.numel(),
                self.experts,
                B=ROWS,
                E=power_of_2(self.experts + 1),
                num_warps=8,
            )
        self._add_up(tiles)

    def count_map(self, routing_map: torch.Tensor) -> None:
        """Count the tokens of every expert in a map `[N, E]`."""
        tokens, columns = len(routing_map), 64
        tiles = cdiv(tokens, TOKENS)
        if tiles:
            quick(count.tile_counts_of_map)[(tiles, cdiv(self.experts + 1, columns))](
                routing_map,
                self.offsets,
                tokens,
                self.experts,
                routing_map.stride(0),
                B=TOKENS,
                E=columns,
                num_warps=4,
            )
        self._add_up(tiles)

    def _add_up(self, tiles: int) -> None:
        bins, columns = self.experts + 1, 8
        quick(count.tile_offsets)[(cdiv(bins, columns),)](
            self.offsets,
            self.totals,
            tiles,
            bins,
            T=min(256, power_of_2(max(tiles, 1))),
            E=columns,
            num_warps=4,
        )
