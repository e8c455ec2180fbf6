"""Steps of torchtitan's Trainer on two CPU ranks with skewed routing: what balancing gains there.

    python benchmarks/bench_torchtitan.py            # EP2 on two cores; three minutes
    python benchmarks/bench_torchtitan.py --toy      # tiny, for CI

Two processes, one pinned core and one thread each. All steps are whole ones of the framework's
Trainer: batches, forward, backward, FSDP2, the norm, the optimizer. The router's choices are given,
by an override of the framework, with a skew: unmodified, through our stages without copies, and
balanced. The ceiling is the framework's own flag for forced balance, unmodified otherwise. Beside
the time of a step stands what the busiest rank used of its processor: on a machine on which others
work too, that is what to look at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness import Bench, main
from layers import gain_lines, on_ranks
from load_cases import Shape


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    shape: Shape
    layers: int
    rounds: int


WIDE = Shape(hidden=256, ffn=1024, experts=8, top_k=2, tokens=1024, ranks=2)
SMALL = Shape(hidden=32, ffn=32, experts=8, top_k=2, tokens=128, ranks=2)
FULL, QUICK, TOY = Scale(WIDE, 2, 15), Scale(WIDE, 2, 5), Scale(SMALL, 1, 1)


def on_rank(rank: int, scale: Scale) -> Any:
    """One process; the framework is imported only there."""
    from torchtitan_steps import measure

    return measure(rank, scale)


def gain(bench: Bench) -> None:
    """Tokens a second of two ranks: unmodified, unbalanced, balanced, forced balanced."""
    shape = bench.scale.shape
    found = on_ranks(shape.ranks, on_rank, bench.scale)
    lines = gain_lines(shape, found, {"layers": bench.scale.layers})
    bench.table("steps of the Trainer in processes", lines)


if __name__ == "__main__":
    main("torchtitan", __doc__, {"gain": gain}, {"toy": TOY, "quick": QUICK, "full": FULL})
