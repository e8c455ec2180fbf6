"""Estimate: sizes, memory and time of an inspection, before it starts.

Speeds are measured here for a moment: a product on the device, reading of a file.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

SIDE = 768  # of the matrices whose product is timed
REACHED = 0.25  # of that speed, by the many smaller products of a model
CALL = 0.02  # seconds of a block besides its products, for every window
SAMPLE = 16 << 20  # bytes that are read for a measurement
IN_BETWEEN = 12  # tensors of a window, as wide as the model, that a block holds at one time
PLAN = 0.0006  # seconds of a plan
LIBRARIES = 500_000_000  # bytes of torch and transformers themselves


@dataclass(frozen=True)
class Estimate:
    """What is known before."""

    parameters: int
    active: int  # that a token meets
    read: int  # bytes of files
    memory: int  # bytes at one time, weights and tokens on their way
    tokens: int
    seconds: float


@dataclass(frozen=True, eq=False)
class Work:
    """What is computed. share: of the experts, those that a token chooses."""

    blocks: Sequence[nn.Module]
    experts: Sequence[nn.Module]
    share: float
    tokens: int
    windows: int
    cases: int  # in which every record is planned

    @property
    def active(self) -> int:
        """Parameters that a token meets."""
        whole, experts = _count(self.blocks), _count(self.experts)
        return whole - experts + round(experts * self.share)

    def seconds(self, device: torch.device, dtype: torch.dtype) -> float:
        """Products at what a model reaches of the speed of one, calls of blocks, and plans."""
        products = 2 * self.active * self.tokens / operations_per_second(device, dtype) / REACHED
        plans = len(self.experts) * self.windows * self.cases
        return products + len(self.blocks) * self.windows * CALL + plans * PLAN


def _count(modules: Sequence[nn.Module]) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def operations_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Speed of products of two large matrices, the best of three."""
    one = torch.ones(SIDE, SIDE, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        float((one @ one)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - begin)
    return 2 * SIDE**3 / best


def bytes_per_second(file: Path) -> float:
    """Speed of reading, in the middle of a file."""
    with file.open("rb") as content:
        content.seek(max(0, file.stat().st_size - SAMPLE) // 2)
        begin = time.perf_counter()
        count = len(content.read(SAMPLE))
    return max(count, 1) / max(time.perf_counter() - begin, 1e-6)
