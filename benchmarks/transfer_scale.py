"""How much bench_transfer.py measures, and what its sections share.

Shapes: C copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from harness import Bench, Metric, Mismatch

from ultraep.bundle import Layout
from ultraep.runtime.mapped.peers import LocalPeers

if TYPE_CHECKING:  # kernels are imported late: Triton reads its settings when they are
    from ultraep.backends.triton.board import Board

POISON = 0xA5  # byte that a slot holds before it is filled
TIMEOUT = 5.0  # seconds after which a rank that waits gives up

TIME = Metric("time_p50", "us", "us", ".1f")
RATE = Metric("rate", "TB/s", "TB/s", ".3f")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is measured."""

    hidden: int  # of an expert: gate and up [2 * ffn, hidden], down [hidden, ffn], bf16
    ffn: int
    ranks: int  # of the ring
    programs: tuple[int, ...]  # of a rank
    relay_ranks: int
    budgets: tuple[int, ...]  # programs of a rank that relays
    fans: tuple[int, ...]  # copies of one expert; the first is 1
    chunks: tuple[int, ...]
    plan_sizes: tuple[tuple[int, int], ...]  # ranks and experts
    ratios: tuple[float, ...]
    seeds: int
    tokens: int
    numbers: int  # of a gradient
    homes: int  # experts of the rank that pulls
    pull_fans: tuple[int, ...]
    pull_programs: tuple[int, ...]
    schedule_sizes: tuple[tuple[int, int], ...]
    meets: tuple[int, ...]

    @property
    def layout(self) -> Layout:
        """Where the two tensors of an expert stand in a row."""
        shapes = {"gate_up": (2 * self.ffn, self.hidden), "down": (self.hidden, self.ffn)}
        return Layout(tuple((name, shape, torch.bfloat16) for name, shape in shapes.items()))

    @property
    def ring_bytes(self) -> int:
        """What all ranks of the ring send together."""
        return self.ranks * self.layout.nbytes


FULL = Scale(
    hidden=4096,  # Qwen3-235B
    ffn=1536,
    ranks=8,
    programs=(8, 16, 32, 64, 96),
    relay_ranks=16,
    budgets=(2, 4, 8, 16),
    fans=(1, 2, 4, 8, 15),
    chunks=(1, 2, 4, 8, 16, 32, 64),
    plan_sizes=((8, 128), (8, 256), (16, 128), (16, 256), (64, 128), (64, 256)),
    ratios=(1.5, 2.0, 3.0),
    seeds=5,
    tokens=8192,
    numbers=18_874_368,
    homes=8,
    pull_fans=(1, 2, 4, 7),
    pull_programs=(132, 264, 528, 1056),
    schedule_sizes=((8, 128), (64, 256), (256, 1024)),
    meets=(2, 8, 64),
)
QUICK = replace(
    FULL,
    programs=(16, 64),
    budgets=(4, 16),
    fans=(1, 2, 8),
    chunks=(1, 4, 16, 64),
    seeds=2,
    pull_fans=(1, 4),
    pull_programs=(528,),
    schedule_sizes=((8, 128), (64, 256)),
    meets=(2, 8),
)
TOY = Scale(
    hidden=64,
    ffn=32,
    ranks=4,
    programs=(2, 4),
    relay_ranks=9,
    budgets=(2,),
    fans=(1, 8),
    chunks=(1, 4),
    plan_sizes=((4, 8), (8, 32)),
    ratios=(1.5,),
    seeds=2,
    tokens=64,
    numbers=1000,
    homes=2,
    pull_fans=(1, 2),
    pull_programs=(2,),
    schedule_sizes=((4, 8),),
    meets=(2,),
)


@dataclass(frozen=True, slots=True)
class TransferBench(Bench):
    """Also knows how fast a copy within the device is."""

    copied: dict[int, float] = field(default_factory=dict)  # microseconds, by bytes

    def copy_us(self, size: int) -> float:
        """Microseconds of a copy of so many bytes within the device."""
        if size not in self.copied:
            device = self.clock.device
            source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
            target = torch.empty_like(source)
            before = partial(target.fill_, POISON)
            self.copied[size] = self.clock.us(partial(target.copy_, source), before)
            if not torch.equal(source, target):
                raise Mismatch(f"a copy of {size} bytes")
        return self.copied[size]

    @property
    def copy_rate(self) -> float:
        """Bytes per microsecond, read and written, of a copy of all that the ring sends."""
        size: int = self.scale.ring_bytes
        return 2 * size / self.copy_us(size)


def board_of(group: LocalPeers, rank: int) -> Board:
    from ultraep.backends.triton.board import Board

    return Board(group.of(rank), slots=1, buffers=1, timeout=TIMEOUT)


def as_replicas(rows: Sequence[Sequence[int]], copies: int, device: torch.device) -> torch.Tensor:
    """[C, 3] expert, host and slot of every copy, as a plan on the device has them."""
    nobody = [[-1, -1, -1]] * (copies - len(rows))
    return torch.tensor([*map(list, rows), *nobody], dtype=torch.int32, device=device)


def tera(rate: float) -> str:
    return f"{rate / 1e6:.2f} TB/s read and written"


def verdict(reached: bool) -> str:
    return "reached" if reached else "MISSED"
