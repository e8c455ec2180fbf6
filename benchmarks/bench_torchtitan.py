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

import argparse
import sys
from dataclasses import dataclass
from typing import Any

from gain import FORCED, PLAIN, RATIO, gain_lines
from harness import Bench, common_options, section_option
from load_cases import Shape
from timing import Host
from world import on_ranks


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
    known = {PLAIN: (RATIO, RATIO), FORCED: (1.0, 1.0)}
    for name, imbalance in known.items():
        found[name] |= dict(zip(("before", "after"), imbalance, strict=True))
    lines = gain_lines(shape, found, {"layers": bench.scale.layers})
    bench.table("steps of the Trainer in processes", lines)


SECTIONS = {"gain": gain}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    common_options(parser)
    section_option(parser, SECTIONS)
    options = parser.parse_args()
    scale = TOY if options.toy else QUICK if options.quick else FULL
    bench = Bench.of("torchtitan", sys.argv, scale, Host(name="torch on the CPU"), options.json)
    bench.run(SECTIONS, options.only)


if __name__ == "__main__":
    main()
