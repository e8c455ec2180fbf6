"""Where a rank stands among the processes of a group, whoever started them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ultraep.errors import ConfigError

MOST_RANKS = 1 << 16


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands. `store`: a file through which the ranks find each other."""

    rank: int
    size: int
    local: int  # number on its host
    store: str | None = None  # None: torchrun told the environment

    @classmethod
    def of_torchrun(cls) -> RankPlace | None:
        """The place that torchrun gave to this process, if it did."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None
        rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
        if rank >= size:
            raise ConfigError(f"RANK is {rank} in the environment, but WORLD_SIZE {size}")
        return cls(rank, size, _number("LOCAL_RANK", 0) if "LOCAL_RANK" in os.environ else rank)


def _number(variable: str, least: int) -> int:
    text = os.environ[variable]
    if not text.isdecimal() or not least <= int(text) < MOST_RANKS:
        raise ConfigError(
            f"{variable} must lie between {least} and {MOST_RANKS - 1} in the environment, "
            f"got {text!r}"
        )
    return int(text)
