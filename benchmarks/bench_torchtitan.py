"""The gain of balancing for steps of torchtitan's Trainer, in two CPU processes.

    python benchmarks/bench_torchtitan.py            # EP2 on two cores; three minutes
    python benchmarks/bench_torchtitan.py --toy      # tiny, for CI

Two processes, one pinned core and one thread each. Steps are whole steps of the Trainer: batches,
forward, backward, FSDP2, gradient norm, optimizer. An override of the framework fixes skewed
choices of the router. The variants are unmodified, `none` (our stages without replicas) and
`ultraep`; the ceiling is the framework's own flag for forced balance. `cpu ms` is the CPU time of
the busiest rank; on a busy machine it is more reliable than the time of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness import Bench, main
from layers import gain_lines, on_ranks
from load_cases import Shape


@dataclass(frozen=True)
class Scale:
    """What one run measures."""

    shape: Shape
    layers: int
    rounds: int


WIDE = Shape(hidden=256, ffn=1024, experts=8, top_k=2, tokens=1024, ranks=2)
SMALL = Shape(hidden=32, ffn=32, experts=8, top_k=2, tokens=128, ranks=2)
FULL, QUICK, TOY = Scale(WIDE, 2, 15), Scale(WIDE, 2, 5), Scale(SMALL, 1, 1)


def on_rank(rank: int, scale: Scale) -> Any:
    """Run in one process, which imports the framework."""
    from torchtitan_steps import measure

    return measure(rank, scale)


def gain(bench: Bench) -> None:
    """Measure tokens per second of two ranks."""
    shape = bench.scale.shape
    facts = on_ranks(shape.ranks, on_rank, bench.scale)
    lines = gain_lines(shape, facts, {"layers": bench.scale.layers})
    bench.table("steps of the Trainer in processes", lines)


if __name__ == "__main__":
    main("torchtitan", __doc__, {"gain": gain}, {"toy": TOY, "quick": QUICK, "full": FULL})
