"""Speeds of this machine, measured for a moment: a product on the device, reading of a file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

SIDE = 768  # of the matrices whose product is timed
SAMPLE = 16 << 20  # bytes that are read for a measurement


@dataclass(frozen=True)
class Estimate:
    """Sizes and time of an inspection before it starts."""

    parameters: int
    active: int  # per token
    read: int  # bytes of files
    memory: int  # bytes at one time, weights and activations
    tokens: int
    seconds: float


def operations_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Speed of products of two large matrices, the best of three."""
    matrix = torch.ones(SIDE, SIDE, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - begin)
    return 2 * SIDE**3 / best


def bytes_per_second(file: Path) -> float:
    """Speed of reading, in the middle of a file."""
    with file.open("rb") as content:
        content.seek(max(0, file.stat().st_size - SAMPLE) // 2)
        begin = time.perf_counter()
        count = len(content.read(SAMPLE))
    return max(count, 1) / max(time.perf_counter() - begin, 1e-6)
