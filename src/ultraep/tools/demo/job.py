"""What the ranks of a demo are to do."""

from __future__ import annotations

from dataclasses import dataclass

from ultraep.tools.demo.sizes import Sizes


@dataclass(frozen=True)
class Job:
    """What all ranks are to do."""

    sizes: Sizes
    policies: tuple[str, ...]
    out: str
    seed: int = 0
    device: str = "cpu"
    notes: tuple[str, ...] = ()
