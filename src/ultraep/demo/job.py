"""What the ranks are to do, and where each of them stands."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ultraep.demo.sizes import Sizes


@dataclass(frozen=True)
class Job:
    """What all ranks are to do."""

    sizes: Sizes
    policies: tuple[str, ...]
    out: str
    seed: int = 0
    device: str = "cpu"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where a rank stands. `store`: a file through which the ranks find each other."""

    rank: int
    size: int
    local: int  # number on its host
    store: str | None = None  # None: torchrun told the environment

    @classmethod
    def of_torchrun(cls) -> Place | None:
        """The place that torchrun gave to this process, if it did."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return cls(rank, size, int(os.environ.get("LOCAL_RANK", rank)))
