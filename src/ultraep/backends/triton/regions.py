"""What lies where in the memory that ranks read from each other in stages 5 and 7.

Shapes: R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ultraep.arrays import IntArray
from ultraep.errors import ConfigError

ALIGNMENT = 128  # bytes, of every part of a region
SCALAR = 8  # bytes, at most


@dataclass(frozen=True, kw_only=True, eq=False)
class RegionLayout:
    """What the regions of a group hold. It must be the same on every rank.

    first_slot_of_rank: [R + 1] of the topology.
    tokens, top_k: the most tokens that a rank has at once, and the choices of each.
    capacity: rows that may arrive at a rank.
    """

    first_slot_of_rank: IntArray
    tokens: int
    top_k: int
    capacity: int

    def __post_init__(self) -> None:
        for name in ("tokens", "top_k", "capacity"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")

    @cached_property
    def ranks(self) -> int:
        return len(self.first_slot_of_rank) - 1

    @cached_property
    def num_slots(self) -> int:
        return int(self.first_slot_of_rank[-1])

    @cached_property
    def most_local(self) -> int:
        """Slots of the rank that has the most of them."""
        return int(np.diff(self.first_slot_of_rank).max())

    @cached_property
    def rows(self) -> int:
        """Routed rows of a rank, at most."""
        return self.tokens * self.top_k

    @cached_property
    def begins_at(self) -> int:
        """Bytes from the beginning of the tables, where the order stands."""
        return aligned(4 * self.rows)

    @cached_property
    def blocks_at(self) -> int:
        return self.begins_at + aligned(4 * self.num_slots)

    @cached_property
    def scalars_at(self) -> int:
        return self.blocks_at + aligned(4 * self.ranks * self.most_local)

    @cached_property
    def table_bytes(self) -> int:
        """Size of the region of the tables."""
        return self.scalars_at + aligned(SCALAR * self.rows)

    def value_bytes(self, row_bytes: int) -> int:
        """Size of a region for the values of all tokens."""
        return aligned(self.tokens * row_bytes)

    @cached_property
    def served_at(self) -> int:
        """Bytes from the beginning of what was served, where the scalars stand, to the rows."""
        return aligned(SCALAR * self.capacity)

    def served_bytes(self, row_bytes: int) -> int:
        """Size of a region for served rows and their scalars."""
        return self.served_at + aligned(self.capacity * row_bytes)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
